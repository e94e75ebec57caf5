"""What kernel files share: registration, launches, and refusing pointers into other devices."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from assertions import assert_bitwise
from triton.runtime import driver

from benchmarks.measuring.stubbed_gpu import StubbedDriver
from float8.kernels import definition
from float8.kernels.gpu import launch as launch_module
from float8.kernels.gpu.launch import (
    LIBRARY,
    NO_FUSION,
    launch,
    register_op,
)
from float8.kernels.gpu.tiles import cast_tiles
from float8.kernels.registration import LAUNCHERS, load_kernels
from scripts.kernel_tools.ptx.launch import compiled

load_kernels("cast")


def test_a_registered_op_runs_its_definition_on_a_cpu_and_its_fake_on_meta():
    op = register_op(
        "launch_test(Tensor x) -> Tensor",
        kernel=lambda x: x * 3,
        definition=lambda x: x * 2,
        fake=torch.empty_like,
    )
    assert op is torch.ops.float8.launch_test.default
    assert op(torch.ones(2)).tolist() == [2.0, 2.0]
    assert op(torch.ones(2, device="meta")).device.type == "meta"
    torch.library.opcheck(op, (torch.ones(2),))
    with pytest.raises(RuntimeError, match="launch_test"):
        LIBRARY.define("launch_test(Tensor x) -> Tensor")


@triton.jit(do_not_specialize=["seed"])
def _scale_kernel(
    x_ptr, y_ptr, bias_ptr, n, stride, factor, seed, TILE: tl.constexpr, ADDS: tl.constexpr
):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + i * stride, i < n, 0.0)
    if bias_ptr is not None:
        x += tl.load(bias_ptr)
    tl.store(y_ptr + i, x * factor + seed + (1.0 if ADDS else 0.0), i < n)


@pytest.fixture
def stub(monkeypatch):
    """A driver that launches nothing; it keeps what it is asked to launch."""
    stub, outer = StubbedDriver(), driver._active
    driver.set_active(stub)
    monkeypatch.setattr(launch_module, "_forms", {})
    yield stub
    driver.set_active(outer)


def test_every_launch_runs_the_kernel_that_triton_would_choose(stub):
    """Sizes of 1 and others, odd addresses, dtypes, no pointer, constants; each twice."""
    memory = torch.zeros(64, dtype=torch.bfloat16)
    chosen = set()
    for x in (memory, memory[1:], memory.float()):
        for n in (1, 16, 17, 32):
            for stride, adds, factor in ((1, True, 0.5), (16, True, 0.5), (1, False, 2.5)):
                arguments = (x, memory, memory if n == 17 else None, n, stride, factor, n + 2)
                constants = {"TILE": 16, "ADDS": adds, "num_warps": 1, **NO_FUSION}
                expected = _scale_kernel[(2,)](*arguments, **constants)
                stub.launches.clear()
                for _ in range(2):
                    launch(_scale_kernel, 2, *arguments, **constants)
                for found in stub.launches:
                    assert found.grid == (2, 1, 1)
                    assert found.kernel.hash == expected.hash
                    assert found.arguments == (*arguments, 16, adds)
                chosen.add(expected.hash)
    assert len(chosen) > 12
    forms = launch_module._forms.values()
    values = [kept[0].hash for form in forms for kept in form.compiled.values()]
    assert len(values) == 36
    assert set(values) == chosen


def test_a_later_launch_asks_triton_for_nothing_and_rates_and_seeds_are_not_compiled_in(
    stub, monkeypatch
):
    x, y = torch.zeros(16), torch.zeros(16)
    launch(_scale_kernel, 1, x, y, y, 16, 1, 0.1, 1, TILE=16, ADDS=False, **NO_FUSION)
    monkeypatch.setattr(_scale_kernel, "run", None)
    launch(_scale_kernel, 1, x, y, y, 16, 1, 0.3, 32, TILE=16, ADDS=False, **NO_FUSION)
    assert [found.arguments[5] for found in stub.launches] == [0.1, 0.3]
    assert len({found.kernel.hash for found in stub.launches}) == 1
    with pytest.raises(TypeError, match="NoneType"):  # a seed of 64 bits is another kernel's
        launch(_scale_kernel, 1, x, y, y, 16, 1, 0.3, 2**31, TILE=16, ADDS=False, **NO_FUSION)


def test_an_operand_of_another_dtype_is_another_kernels(stub):
    """Of the same sizes; and each finds its kernel again."""
    outputs = torch.zeros(32, 32, dtype=torch.float8_e4m3fn), None, None, None
    for dtype in (torch.bfloat16, torch.float32) * 2:
        x, scale = torch.zeros(32, 32, dtype=dtype), torch.ones(1, 1)
        cast_tiles(x, outputs, (-1, -1), torch.float8_e4m3fn, "float32", scale=scale)
    first, second, *again = [found.kernel.hash for found in stub.launches]
    assert first != second
    assert again == [first, second]


@pytest.mark.parametrize(
    ("block", "scale_format"),
    [((-1, -1), "float32"), ((1, -1), "float32"), ((1, 128), "power_of_two"), ((1, 32), "e8m0")],
)
def test_later_launches_write_what_the_first_would(block, scale_format):
    """By their PTX, executed: a form passes float8 data as it is, and tells alignments apart."""
    dtype, memory = torch.float8_e4m3fn, torch.empty(16 * 48 + 1, dtype=torch.bfloat16)
    with compiled("sm_90") as runs:
        for start in (0, 1, 0, 1):
            x = memory[start : start + 16 * 48].view(16, 48).normal_(std=10.0 ** (3 * start))
            data, scale, data_t, scale_t, _ = LAUNCHERS["cast"](
                x, None, block, dtype, scale_format, False, True, True
            )
            scale_t = scale if scale_t is None else scale_t
            for source, codes, its in ((x, data, scale), (x.t(), data_t, scale_t)):
                expected, its_scale = definition.cast_dynamic(source, block, dtype, scale_format)
                assert_bitwise(codes, expected, f"start {start}", "data")
                assert_bitwise(its, its_scale, f"start {start}", "scale")
    assert len(runs) in (4, 8)
    for run in runs:
        run.check()
