"""Every kernel that casts a matrix has the definition's data and scales, in both orientations.

A stack of matrices, such as the weights of experts, is cast one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from pretend import into_squares
from shapes import DEVICES, FORMATS, HIGH_PRECISION, LAYOUTS, SPECIALS, Case, pairs

from float8.kernels import definition
from float8.kernels.definition import E8M0, E8M0_FLOOR, FLOAT32, scale_format_of
from float8.kernels.registration import LAUNCHERS, load_kernels

load_kernels("cast")
OPS = torch.ops.float8
E4M3, WHOLE, BY_128 = torch.float8_e4m3fn, (-1, -1), (1, 128)
POWER_OF_TWO = scale_format_of(True)
BOTH = (True, True)
ORIENTATIONS = (BOTH, (True, False), (False, True), (False, False))


class Kind(NamedTuple):
    """The block of a matrix, and how its scales may be rounded."""

    block: tuple[int, int]
    scale_formats: tuple[str, str] = (FLOAT32, POWER_OF_TWO)
    given: float | None = None
    swizzled: bool = False


KINDS = {
    "given": Kind(WHOLE, given=0.37),
    "dynamic": Kind(WHOLE),
    "rowwise": Kind((1, -1)),
    "1x128": Kind(BY_128),
    "128x128": Kind((128, 128)),
    "mx": Kind((1, 32), (E8M0, E8M0_FLOOR)),
    "mx, 32x32": Kind((32, 32), (E8M0, E8M0_FLOOR)),
    "mx, 32x32, swizzled": Kind((32, 32), (E8M0, E8M0_FLOOR), swizzled=True),
    "mx, swizzled": Kind((1, 32), (E8M0, E8M0_FLOOR), swizzled=True),
}
EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES)
EVERY_KIND = pytest.mark.parametrize("name", KINDS)


def arguments(name, x, dtype, scale_format, wanted, finds_amax=False):
    """Of the op, and of what launches its kernels."""
    kind = KINDS[name]
    scale = None if kind.given is None else torch.full((1, 1), kind.given, device=x.device)
    return x, scale, kind.block, dtype, scale_format, kind.swizzled, *wanted, finds_amax


def check(name, x, dtype, scale_format, wanted, device, replay, finds_amax=True):
    """Requested outputs have the definition's data and scales, in the layout that GEMMs read."""
    kind = KINDS[name]
    is_whole = kind.block == WHOLE
    finds_amax = finds_amax and is_whole and x.dim() == 2
    given = arguments(name, x, dtype, scale_format, wanted, finds_amax)
    data, scale, data_t, scale_t, amax = launcher("cast", "_launch", device)(*given)
    if is_whole:
        assert scale_t is None and (kind.given is None or scale is None)
        scale = scale if kind.given is None else given[1]
        scale = scale_t = scale.expand(*x.shape[:-2], 1, 1)
    for is_wanted, source, codes, its in (
        (wanted[0], x, data, scale),
        (wanted[1], x.mT, data_t, scale_t),
    ):
        if not is_wanted:
            assert codes is None
            continue
        assert codes.is_contiguous()
        if x.dim() == 2:
            strides = (1, max(its.shape[0], 1)) if kind.block == BY_128 else None
            assert its.stride() == strides if strides else its.is_contiguous()
        parts = (source, codes, its) if x.dim() == 3 else (source[None], codes[None], its[None])
        for e, (matrix, mine, found) in enumerate(zip(*parts, strict=True)):
            if kind.given is not None:
                expected, its_scale = definition.cast_by_scale(matrix, found, WHOLE, dtype), found
            else:
                expected, its_scale = definition.cast_dynamic(
                    matrix, kind.block, dtype, scale_format
                )
            if kind.swizzled:
                of_rows = its_scale.view(torch.uint8).cpu().repeat_interleave(kind.block[0], 0)
                its_scale = into_squares(of_rows[: len(matrix)]).view(found.dtype)
            assert_bitwise(found, its_scale, f"{replay}, matrix {e}", "scale")
            assert_bitwise(mine, expected, f"{replay}, matrix {e}", "data")
    if finds_amax:
        assert_bitwise(amax, definition.amax(x, WHOLE), replay, "amax")
    else:
        assert amax is None


@EVERY_DEVICE
@pairs(
    name=list(KINDS),
    shape=[(80, 272), (5, 123), (130, 129), (1, 16), (3, 37, 50), (2, 32, 144), (0, 16), (16, 0)],
    layout=LAYOUTS,
    source=HIGH_PRECISION,
    dtype=FORMATS,
    rounding=[0, 1],
    wanted=ORIENTATIONS,
)
def test_agrees(name, shape, layout, source, dtype, rounding, wanted, device):
    case = Case(shape, source, fill="wide", layout=layout)
    x = case.make(device)
    if len(shape) == 3 and layout != "expanded":  # another matrix's scale changes the data
        x.mul_(100.0 ** torch.arange(shape[0], device=device)[:, None, None])
    scale_format = KINDS[name].scale_formats[rounding]
    check(name, x, dtype, scale_format, wanted, device, case)


@EVERY_DEVICE
@pairs(
    name=list(KINDS),
    special=list(SPECIALS),
    source=HIGH_PRECISION,
    exponent=[-140, -126, -60, 0, 100, 126],
    dtype=FORMATS,
    rounding=[0, 1],
)
def test_special_values(name, special, source, exponent, dtype, rounding, device):
    """A special value reaches its own blocks, and no other."""
    case = Case((33, 48), source, exponent, "one_large", specials=(special,), seed=2)
    scale_format = KINDS[name].scale_formats[rounding]
    check(name, case.make(device), dtype, scale_format, BOTH, device, case)


@EVERY_DEVICE
@EVERY_KIND
def test_every_line_has_its_own_scale(name, device):
    """Magnitudes differ by powers of ten between lines: another line's scale changes the data."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(144, 272, generator=generator)
    for shape in ((144, 1), (1, 272)):
        x *= 10.0 ** torch.randint(-6, 6, shape, generator=generator)
    check(name, x.to(device), E4M3, KINDS[name].scale_formats[0], BOTH, device, "seed 5")


@EVERY_DEVICE
@pytest.mark.parametrize("scale_format", [E8M0, E8M0_FLOOR])
@pytest.mark.parametrize("dtype", FORMATS)
def test_amaxes_around_every_power_of_two(scale_format, dtype, device):
    """Blocks with one element: all exponents, just below, at and above the powers."""
    x = (2.0 ** torch.arange(-149, 127, dtype=torch.float64) * torch.finfo(dtype).max).float()
    bits = torch.cat([(x.view(torch.int32) + i).clamp(0, 0x7F800000) for i in (-2, -1, 0, 1, 2)])
    x = torch.zeros(128, 384)
    x[:, ::32] = torch.cat([bits, torch.arange(156)]).int().view(torch.float32).view(128, 12)
    check("mx", x.to(device), dtype, scale_format, (True, False), device, "powers of two")


@EVERY_DEVICE
@pytest.mark.parametrize(("name", "rounding"), [("given", 0), ("rowwise", 0), ("rowwise", 1)])
@pytest.mark.parametrize("dtype", FORMATS)
def test_every_kind_of_float(name, rounding, dtype, device):
    """Cast under a given scale; or each in a row of its own, by the scale of its magnitude."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (1 << 14,), dtype=torch.int64, generator=generator)
    powers = torch.exp2(torch.arange(-149, 128, dtype=torch.float64))
    powers = torch.cat([powers, powers * torch.finfo(dtype).max]).float()
    near = [powers, powers.nextafter(powers * 2), powers.nextafter(powers * 0)]
    ties = 1 + 2.0**-4 + torch.arange(-128, 128) * 2.0**-20  # rounding twice would be seen
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448.0, 57344.0])
    x = torch.cat([special, *near, ties * 0.37, bits.to(torch.int32).view(torch.float32)])
    x = x[: 1 << 14].view(128, 128) if name == "given" else x[:2048, None]
    scale_format = KINDS[name].scale_formats[rounding]
    check(name, x.to(device), dtype, scale_format, (True, False), device, "seed 7")


@EVERY_DEVICE
@pytest.mark.parametrize("columns", [16384, 24001])
def test_rows_longer_than_a_program_holds(columns, device):
    x = Case((2, columns), torch.bfloat16, fill="wide", seed=6).make(device)
    x[0, -1] = 64.0  # the largest of its row, in its last chunk
    check("rowwise", x, E4M3, POWER_OF_TWO, (True, False), device, f"seed 6, {columns} columns")


@EVERY_DEVICE
def test_more_tiles_than_programs(device):
    """Each program of the amax pass reads several tiles, and the last one is read too."""
    x = torch.zeros(64 * 5, 8, device=device)
    x[-1, -1] = 5.0
    partials = launcher("amax", "partial_amaxes", device)(x, 2)
    assert partials.shape == (2,)
    assert partials.max().view(torch.float32).item() == 5.0


@EVERY_DEVICE
def test_each_matrix_of_a_stack_may_have_a_given_scale(device):
    x = Case((3, 32, 40), torch.bfloat16).make(device)
    scale = torch.tensor([0.1, 0.02, 3.0], device=device).reshape(3, 1, 1)
    given = (x, scale, WHOLE, E4M3, FLOAT32, False, *BOTH, False)
    data, _, data_t, *_ = launcher("cast", "_launch", device)(*given)
    expected = definition.cast_by_scale(x, scale, (1, -1, -1), E4M3)
    assert_bitwise(data, expected)
    assert_bitwise(data_t, expected.mT)


@EVERY_DEVICE
@pairs(
    name=list(KINDS),
    shape=[(130, 48), (0, 16), (3, 16, 40)],
    wanted=[BOTH, (True, False)],
    finds_amax=[False, True],
)
def test_opcheck(name, shape, wanted, finds_amax, device):
    """Schema, fake and mutation are what the ops say, on every device."""
    kind, x = KINDS[name], Case(shape, torch.bfloat16, layout="transposed").make(device)
    finds_amax = finds_amax and kind.block == WHOLE and len(shape) == 2
    given = arguments(name, x, E4M3, kind.scale_formats[0], wanted, finds_amax)
    torch.library.opcheck(OPS.cast.default, given)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@EVERY_KIND
def test_a_second_device_casts(name):
    """While another one is current: its kernels are launched there, on its own memory."""
    case, scale_format = Case((256, 256), torch.bfloat16), KINDS[name].scale_formats[1]
    assert torch.cuda.current_device() == 0
    x = case.make("cuda:1")
    check(name, x, E4M3, scale_format, BOTH, "cuda", case)


def test_a_scale_on_another_device_is_refused():
    scale = torch.ones((), device="meta")
    with pytest.raises(ValueError, match="float8::cast: scale is on meta and the operand on cpu"):
        LAUNCHERS["cast"](torch.ones(32, 48), scale, WHOLE, E4M3, FLOAT32, False, *BOTH)
