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

from assertions import assert_bitwise
from executed import executed
from interpreter import launcher
from kernel_tools.shipped_cases import CASES as SHIPPED
from kernels.gpu import (
    test_blockwise_mm,
    test_cast,
    test_cast_blockwise,
    test_cast_mx,
    test_cast_rowwise,
    test_cast_tokens,
    test_cast_tokens_mx,
    test_cast_weight,
    test_column_sums,
    test_grouped_mm,
    test_moments,
    test_norm_cast,
    test_optimizer_step,
    test_stacks,
    test_swiglu_cast,
    test_transpose,
)
from kernels.gpu.test_column_sums import OPS

from float8.granularity import scale_shape
from float8.kernels import definition
from float8.kernels.gpu import blockwise_mm
from scripts.kernel_tools.ptx import launch
from scripts.kernel_tools.ptx.machine import execute

pytestmark = pytest.mark.slow

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TILES = blockwise_mm.TILES
BOTH = (True, True)
NEAREST, AT_RANDOM = (False, False, False), (True, False, True)

# A test, its arguments but the device, and the architectures for which the suite runs it:
# compiling takes most of the time. ``scripts.kernel_tools run`` runs all of them for each.
EVERYWHERE = ("sm_89", "sm_90", "sm_100")
CASES: list[tuple[Any, tuple[Any, ...], tuple[str, ...]]] = [
    (test_cast.test_given_scale, ((80, 272), "contiguous", E4M3), EVERYWHERE),
    (test_cast.test_given_scale, ((5, 123), "transposed", E5M2), ()),
    (test_cast.test_dynamic, ((80, 272), "contiguous", BF16, True), ("sm_90",)),
    (test_cast.test_dynamic, ((5, 123), "sliced", F32, False), ("sm_90",)),
    (test_cast.test_special_values, ("nan", 0, E4M3), ("sm_90",)),
    (test_cast.test_special_values, ("subnormal", -130, E4M3), ()),
    (test_cast.test_special_values, ("inf", 120, E5M2), ()),
    (test_stacks.test_agrees, ((3, 32, 144), "transposed", (-1, -1), BOTH, False), ()),
    (test_stacks.test_agrees, ((3, 32, 144), "contiguous", (1, -1), BOTH, True), ()),
    (test_transpose.test_every_byte, ((80, 272), "contiguous"), ("sm_90",)),
    (test_cast_rowwise.test_agrees, ((80, 272), "contiguous", E4M3), ("sm_90",)),
    (test_cast_rowwise.test_agrees, ((5, 123), "offset", E5M2), ()),
    (test_cast_rowwise.test_special_values, ("negative_zero", BF16, True), ()),
    (test_cast_rowwise.test_special_values, ("nan", BF16, True), ()),
    (test_cast_rowwise.test_special_values, ("tiny", F16, True), ()),
    (test_cast_blockwise.test_agrees, ((80, 272), "contiguous", (1, 128)), ("sm_90",)),
    (test_cast_blockwise.test_agrees, ((80, 272), "contiguous", (128, 128)), ("sm_100",)),
    (test_cast_blockwise.test_agrees, ((5, 123), "transposed", (128, 128)), ("sm_90",)),
    (test_cast_blockwise.test_special_values, ("inf", BF16, (1, 128)), ()),
    (test_cast_mx.test_agrees, ((80, 144), "contiguous", "e8m0", True), ("sm_90",)),
    (test_cast_mx.test_special_values, ("nan", BF16, "e8m0", E4M3), ()),
    (test_cast_mx.test_special_values, ("inf", F16, "e8m0_floor", E5M2), ()),
    (
        test_column_sums.test_sums_are_exact_where_they_can_be,
        ("cast, amax", (80, 272), "contiguous"),
        ("sm_90",),
    ),
    (
        test_column_sums.test_sums_are_exact_where_they_can_be,
        ("cast_dynamic", (5, 123), "transposed"),
        (),
    ),
    (
        test_column_sums.test_sums_are_exact_where_they_can_be,
        ("cast_rowwise", (80, 272), "contiguous"),
        (),
    ),
    (
        test_column_sums.test_sums_are_exact_where_they_can_be,
        ("cast_blockwise, 1x128", (130, 129), "sliced"),
        (),
    ),
    (
        test_column_sums.test_sums_are_exact_where_they_can_be,
        ("cast_blockwise, 128x128", (2, 70, 20), "contiguous"),
        (),
    ),
    (test_cast_tokens.test_agrees, (((5, 0, 33), 9), (1, 128), BOTH, 144), ("sm_90",)),
    (test_cast_tokens.test_agrees, (((5, 0, 33), 9), (-1, -1), BOTH, 144), ()),
    (test_cast_tokens.test_agrees, (((5, 0, 33), 9), (1, -1), BOTH, 37), ()),
    (
        test_cast_tokens.test_any_strides_and_dtypes,
        ("transposed", (1, 128), F16, E5M2),
        (),
    ),
    (test_cast_tokens_mx.test_agrees, (((5, 0, 130), 9), "contiguous", "e8m0", E4M3), ("sm_90",)),
    (test_cast_weight.test_agrees, ((3, 300), 128, E4M3, False), ("sm_90",)),
    (
        test_norm_cast.check_form,
        ((48, 144), "rms, weight", "dynamic", "cpu", (BF16, BF16, BF16), "contiguous", "normal"),
        ("sm_90",),
    ),
    (
        test_norm_cast.check_form,
        ((5, 123), "layer, weight and bias", "tiles", "cpu", (BF16, F32, F32), "sliced", "normal"),
        ("sm_90",),
    ),
    (
        test_norm_cast.check_form,
        ((48, 144), "layer", "whole rows", "cpu", (BF16,) * 3, "contiguous", "one_large"),
        (),
    ),
    (
        test_norm_cast.check_form,
        ((48, 144), "rms", "tiles", "cpu", (F16, F16, F16), "contiguous", "normal"),
        (),
    ),
    (
        test_norm_cast.check_form,
        ((37, 1), "layer, weight", "whole rows", "cpu", (F32, BF16, F16), "transposed", "normal"),
        (),
    ),
    (
        test_swiglu_cast.check_data_and_amax,
        ((80, 144), (BF16, BF16), None, "contiguous", "cpu"),
        ("sm_90",),
    ),
    (test_swiglu_cast.check_data_and_amax, ((5, 123), (BF16, BF16), 0.037, "halves", "cpu"), ()),
    (test_swiglu_cast.test_data_and_amax, ((80, 144), (F16, F16), None, "contiguous"), ()),
    (test_swiglu_cast.test_backward, ((40, 144), "contiguous", F32), ("sm_90",)),
    (test_swiglu_cast.test_backward, ((5, 123), "expanded", F16), ()),
    (
        test_optimizer_step.test_agrees,
        ("adamw", (3, 300), 128, BF16, "e4m3", "contiguous", AT_RANDOM),
        ("sm_90",),
    ),
    (
        test_optimizer_step.test_agrees,
        ("lion", (37, 1), 32, F32, "float16", "contiguous", NEAREST),
        (),
    ),
    (
        test_optimizer_step.test_agrees,
        ("adamw", (4, 256), 128, "master", "e4m3", "contiguous", AT_RANDOM),
        (),
    ),
    *(
        (test_optimizer_step.test_agrees, (rule, (48, 256), 128, *form, "contiguous", bits), ())
        for rule, form, bits in (
            ("adam", (F16, "float16"), AT_RANDOM),
            ("sgd", (BF16, "e4m3"), (True, True, False)),
            ("sgd, dampened", (F32, "float32"), NEAREST),
            ("nesterov", ("master", "float16"), NEAREST),
            ("lion", ("master", "e4m3"), (True, True, False)),
        )
    ),
    (test_moments.test_twins, (BF16,), ()),
    (test_moments.test_twins, (F16,), ()),
    *((test_blockwise_mm.test_every_tile, (tile, (1, 128)), ()) for tile in TILES[1:]),
    (test_blockwise_mm.test_the_product, ((130, 272, 133), (E5M2, E4M3), (128, 1)), ()),
    (test_blockwise_mm.test_the_product, ((5, 123, 7), (E4M3, E4M3), (1, 1)), ()),
    *(
        (test_blockwise_mm.test_bias_is_added_before_rounding, (d, (1, 128)), ())
        for d in (F16, F32)
    ),
    (test_grouped_mm.test_out_dtypes, ("tokens",), ()),
    (test_grouped_mm.test_every_tile, (TILES[2], "experts"), ("sm_90",)),
    (test_grouped_mm.test_every_tile, (TILES[3], "tokens"), ("sm_90", "sm_100")),
    (
        test_grouped_mm.test_tokens_by_experts,
        ((64, 128, 16), "rowwise", (E5M2, E4M3), (144, 70)),
        (),
    ),
]


def on_cpu(test: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """``arguments``, and the device where it is left to give."""
    is_device_left = len(inspect.signature(test).parameters) > len(arguments)
    return (*arguments, "cpu") if is_device_left else arguments


@pytest.mark.parametrize(
    ("test", "arguments", "arch"),
    [
        pytest.param(test, arguments, arch, id=f"{test.__module__}.{test.__name__}-{i}-{arch}")
        for i, (test, arguments, archs) in enumerate(CASES)
        for arch in archs
    ],
)
def test_compiled(test, arguments, arch):
    with executed(arch) as runs:
        test(*on_cpu(test, arguments))
    assert runs


@pytest.mark.parametrize("file", SHIPPED)
def test_a_shipped_form_of_each_file(file):
    function, arguments = SHIPPED[file][0]
    with executed("sm_90") as runs:
        function(*arguments)
    assert runs


@pytest.mark.parametrize(
    ("arch", "rows", "tile"),
    [
        ("sm_89", (1, 128), TILES[1]),
        ("sm_90", (1, 1), TILES[0]),
        ("sm_90", (1, 128), TILES[2]),
        ("sm_100", (1, 128), TILES[3]),
    ],
)
def test_exact_sums(arch, rows, tile):
    """Small integers, and scales that are powers of two: no order of additions changes a bit."""
    (M, K, N), blocks = (131, 400, 144), test_blockwise_mm.BLOCKS[rows]
    parts = []
    for size, block in zip((M, N), blocks, strict=True):
        scale = torch.randint(-3, 4, scale_shape((size, K), block)).float().exp2()
        parts += [torch.randint(-8, 9, (size, K)).float().to(E4M3), scale]
    with executed(arch) as runs:
        multiply = launcher("blockwise_mm", "_launch", "cpu")
        found = multiply(*parts, *rows, None, F32, tile=tile)
    assert_bitwise(found, definition.scaled_mm(*parts, *blocks, None, F32))
    assert runs[0].programs == -(-M // tile.M) * -(-N // tile.N)


# What adds or compares across warps or programs: sums of columns, amaxes, norms, group amaxes.
REDUCING = (
    *((test_column_sums.test_sums_have_the_error_of_float32, (name,)) for name in OPS),
    *(case[:2] for case in CASES if "sm_90" in case[2] and case[0] in (
        test_cast.test_dynamic,
        test_cast_mx.test_agrees,
        test_cast_tokens.test_agrees,
        test_cast_tokens_mx.test_agrees,
        test_cast_weight.test_agrees,
        test_norm_cast.check_form,
        test_swiglu_cast.check_data_and_amax,
        test_swiglu_cast.test_backward,
        test_optimizer_step.test_agrees,
    )),
)  # fmt: skip


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "arguments"),
    [pytest.param(*c, id=f"{c[0].__module__}.{c[0].__name__}-{i}") for i, c in enumerate(REDUCING)],
)
def test_no_bit_depends_on_the_order_of_programs_and_warps(test, arguments, monkeypatch):
    """TransformerEngine's issue 2921: its cast with a bias gradient gave other bits in each run."""
    first, *others = (_written(test, arguments, seed, monkeypatch) for seed in (None, 1, 2))
    assert first
    for other in others:
        for (at, data), (other_at, other_data) in zip(first, other, strict=True):
            assert np.array_equal(at, other_at) and np.array_equal(data, other_data)
