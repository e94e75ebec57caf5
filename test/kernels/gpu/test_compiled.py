"""Each kernel's compiled form, executed: it has the definition's bits and does nothing forbidden.

Triton compiles for a GPU that is not there, and `scripts/kernel_tools/ptx` executes the PTX. The
checks are those of the kernels' own tests, called inside `executed.executed`, which also raises for
what an execution finds (accesses out of bounds, races, reads of what was never written). GEMMs are
held to their definition's error, and to its bits where every sum is exact.

The cases have edges of tiles, odd sizes and strides, and special values. Those whose sizes are
multiples of 16 are the forms that training uses. `test/kernel_tools/shipped_cases.py` has at least
one for each form that ships, of which the suite runs one for each file. ``scripts.kernel_tools
run`` runs all of both, for other architectures and other versions of Triton too.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from executed import executed
from kernel_tools.shipped_cases import CASES as SHIPPED
from kernels.gpu import (
    test_blockwise_mm,
    test_cast_tokens,
    test_casts,
    test_dequantize_groups,
    test_expand_scales,
    test_grouped_mm,
    test_norm_cast,
    test_optimizer_step,
    test_swiglu_cast,
    test_swiglu_gradients,
    test_transpose,
)
from kernels.gpu.test_casts import BOTH

from float8.kernels.gpu import blockwise_mm
from scripts.kernel_tools.ptx import launch
from scripts.kernel_tools.ptx.machine import execute

pytestmark = pytest.mark.slow

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TILES = blockwise_mm.GEMM_TILES
NEAREST, AT_RANDOM = (False, False, False), (True, False, True)
DEQUANTIZE = test_dequantize_groups.test_every_code
STEP, STATES = test_optimizer_step.test_agrees, test_optimizer_step.test_states_of_any_numbers
PRODUCT = test_blockwise_mm.test_the_product
GROUPED, SWIGLU = test_grouped_mm.test_the_product, test_swiglu_cast.check
SAME, TOKENS = (E4M3, E4M3), ((5, 0, 33), 9)

# file of gpu/ -> a test and its arguments but the device: sizes that nothing divides, strides,
# special values. The suite runs the first; ``scripts.kernel_tools run`` runs all for each
# architecture, and so does pytest with every test of the folder: see `executed`.
CASES: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {
    "cast": [
        case
        for name, layout, source, dtype, rounding in (
            ("dynamic", "sliced", F32, E4M3, 0),
            ("rowwise", "offset", BF16, E5M2, 1),
            ("128x128", "transposed", BF16, E4M3, 1),
            ("mx, swizzled", "transposed", F16, E5M2, 1),
        )
        for case in (
            (test_casts.test_agrees, (name, (5, 123), layout, source, dtype, rounding, BOTH)),
            (test_casts.test_special_values, (name, "nan", source, 0, E4M3, rounding)),
            (test_casts.test_agrees, (name, (3, 32, 144), "contiguous", BF16, E4M3, 1, BOTH)),
        )
    ],
    "dequantize_groups": [(DEQUANTIZE, ((5, 123), E5M2, F32, "rows"))],
    "transpose": [(test_transpose.test_every_byte, ((5, 123), "transposed"))],
    "cast_tokens": [
        (test_cast_tokens.test_agrees, (TOKENS, block, BOTH, 37))
        for block in ((1, 128), (-1, -1), (1, -1), (1, 32))
    ],
    "norm_cast": [
        (test_norm_cast.check_form, (shape, norm, form, "cpu", dtypes, layout, "normal"))
        for shape, norm, form, dtypes, layout in (
            ((5, 123), "rms, weight", "dynamic", (BF16,) * 3, "contiguous"),
            ((5, 123), "layer, weight and bias", "given", (BF16, F32, F32), "sliced"),
            ((37, 1), "layer, weight", "given", (F32, BF16, F16), "transposed"),
        )
    ],
    "swiglu_cast": [
        (SWIGLU, ((5, 123), BF16, None, "halves", "cpu")),
        (SWIGLU, ((5, 123), F16, 0.037, "transposed", "cpu")),
    ],
    "swiglu_gradients": [
        (test_swiglu_gradients.check, ((5, 123), BF16, "halves", True, False, "cpu")),
        (test_swiglu_gradients.check, ((5, 123), F16, "transposed", False, True, "cpu")),
        (test_swiglu_gradients.check, ((37, 130), F32, "sliced", False, False, "cpu")),
        (test_swiglu_gradients.check, ((1, 48), BF16, "contiguous", False, False, "cpu")),
    ],
    "optimizer_step": [
        *(
            (STEP, (rule, (3, 300), 128, dtype, kind, "transposed", bits, captured))
            for rule, dtype, kind, bits, captured in (
                ("adamw", BF16, "e4m3", AT_RANDOM, False),
                ("adam", F16, "float16", AT_RANDOM, True),
                ("sgd, dampened", F32, "float32", NEAREST, False),
                ("nesterov", "master", "float16", NEAREST, True),
                ("lion", "master", "e4m3", (True, True, False), False),
            )
        ),
        *((STATES, (kinds, True)) for kinds in test_optimizer_step.KINDS),
    ],
    "blockwise_mm": [
        *((PRODUCT, ((130, 272, 133), (E5M2, E4M3), (128, 1), tile)) for tile in TILES),
        (PRODUCT, ((5, 123, 7), SAME, (1, 1), None)),
    ],
    "expand_scales": [
        (test_expand_scales.check, ((5, 4112), block, "cpu", strided))
        for block in test_expand_scales.BLOCKS
        for strided in (False, True)
    ],
    "grouped_mm": [
        (GROUPED, ("tokens", (0, 131, 2), "1x128", SAME, (24, 20), TILES[-1], (None, False))),
        (GROUPED, ("experts", (0, 131, 2), "1x128", SAME, (144, 24), TILES[1], (F16, False))),
        (GROUPED, ("experts", (64, 128, 16), "rowwise", SAME, (144, 70), None, (None, False))),
    ],
}
ON = [(file, "sm_90") for file in CASES] + [("cast", "sm_89"), ("cast", "sm_100")]


def on_cpu(test: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """``arguments``, and the device where it is left to give."""
    signature = inspect.signature(test)
    is_given = "device" in signature.bind_partial(*arguments).arguments
    is_device_left = "device" in signature.parameters and not is_given
    return (*arguments, "cpu") if is_device_left else arguments


@pytest.mark.parametrize(("file", "arch"), ON)
def test_compiled(file, arch):
    test, arguments = CASES[file][0]
    with executed(arch) as runs:
        test(*on_cpu(test, arguments))
    assert runs


@pytest.mark.parametrize("file", SHIPPED)
def test_a_shipped_form_of_each_file(file):
    function, arguments = SHIPPED[file][0]
    with executed("sm_90") as runs:
        function(*arguments)
    assert runs


COPYING = ("transpose", "dequantize_groups")
# What adds or compares across warps or programs: amaxes, norms, group amaxes.
REDUCING = [
    *(CASES[file][0] for file in CASES if "mm" not in file and file not in COPYING),
    CASES["swiglu_cast"][1],
]


def _written(test, arguments, seed, monkeypatch):
    """The bytes that each launch of a case wrote, under an order of programs and warps."""
    found = []

    def spy(program, grid, passed, memory, **options):
        report = execute(program, grid, passed, memory, **options, seed=seed)
        written = memory.writer >= 0
        found.append((written.nonzero()[0], memory.data[written]))
        return report

    monkeypatch.setattr(launch, "execute", spy)
    torch.manual_seed(0)
    with executed("sm_90", raises=False):
        test(*on_cpu(test, arguments))
    return found


@pytest.mark.parametrize(("test", "arguments"), REDUCING)
def test_no_bit_depends_on_the_order_of_programs_and_warps(test, arguments, monkeypatch):
    """TransformerEngine's issue 2921: its cast with a bias gradient gave other bits in each run."""
    first, *others = (_written(test, arguments, seed, monkeypatch) for seed in (None, 1, 2))
    assert first
    for other in others:
        for (at, data), (other_at, other_data) in zip(first, other, strict=True):
            assert np.array_equal(at, other_at) and np.array_equal(data, other_data)
