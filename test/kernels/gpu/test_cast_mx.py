"""`cast_mx`: 1x32 blocks with E8M0 scales, both orientations, as the definition casts them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from pretend import into_squares
from shapes import DEVICES, FORMATS, HIGH_PRECISION, LAYOUTS, SPECIALS, Case, pairs

from float8.kernels import definition
from float8.kernels.gpu.cast_mx import cast_mx

E4M3 = torch.float8_e4m3fn
ROUNDINGS = ("e8m0", "e8m0_floor")
SHAPES = ((80, 144), (5, 123), (130, 129), (1, 1))
ORIENTATIONS = ((True, True), (True, False), (False, True), (False, False))


def check(x, dtype, rounding, swizzled, rows, cols, device, replay):
    """Requested outputs have the definition's data and scales, in the requested layout."""
    op = launcher("cast_mx", "_launch", device)
    got = op(x, dtype, rounding, swizzled, rows, cols)
    for wanted, source, data, scale in ((rows, x, *got[:2]), (cols, x.t(), *got[2:])):
        assert scale.dtype == torch.float8_e8m0fnu
        if not wanted:
            assert data.numel() == scale.numel() == 0
            continue
        codes, expected = definition.cast_dynamic(source.cpu(), (1, 32), dtype, rounding)
        exponents = expected.view(torch.uint8)
        assert scale.is_contiguous()
        assert_bitwise(
            scale.view(torch.uint8),
            into_squares(exponents) if swizzled else exponents,
            replay,
            "scale",
        )
        assert_bitwise(data, codes, replay, "data")
        assert data.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pairs(shape=SHAPES, layout=LAYOUTS, rounding=ROUNDINGS, swizzled=[True, False])
def test_agrees(shape, layout, rounding, swizzled, device):
    case = Case(shape, torch.bfloat16, fill="wide", layout=layout)
    check(case.make(device), E4M3, rounding, swizzled, True, True, device, case)


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=[(32, 144), (5, 123)],
    layout=["contiguous", "transposed"],
    wanted=ORIENTATIONS[1:],
    swizzled=[True, False],
)
def test_writes_what_is_asked_for(shape, layout, wanted, swizzled, device):
    case = Case(shape, torch.bfloat16, layout=layout, seed=1)
    check(case.make(device), E4M3, "e8m0", swizzled, *wanted, device, case)


@pytest.mark.parametrize("device", DEVICES)
@pairs(special=list(SPECIALS), source=HIGH_PRECISION, rounding=ROUNDINGS, dtype=FORMATS)
def test_special_values(special, source, rounding, dtype, device):
    """A special value reaches its own blocks, and no other."""
    case = Case((33, 48), source, fill="one_large", specials=(special,), seed=2)
    check(case.make(device), dtype, rounding, True, True, True, device, case)


@pytest.mark.parametrize("device", DEVICES)
@pairs(exponent=[-140, -126, -60, 100, 126], rounding=ROUNDINGS, dtype=FORMATS)
def test_far_exponents(exponent, rounding, dtype, device):
    case = Case((16, 40), torch.float32, exponent=exponent, fill="wide", seed=4)
    check(case.make(device), dtype, rounding, True, True, True, device, case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_amaxes_around_every_power_of_two(rounding, dtype, device):
    """Blocks with one element: all exponents, just below, at and above the powers."""
    largest = torch.finfo(dtype).max
    x = (2.0 ** torch.arange(-149, 127, dtype=torch.float64) * largest).to(torch.float32)
    bits = torch.cat([(x.view(torch.int32) + i).clamp(0, 0x7F800000) for i in (-2, -1, 0, 1, 2)])
    x = torch.zeros(128, 384)
    x[:, ::32] = torch.cat([bits, torch.arange(156)]).int().view(torch.float32).view(128, 12)
    check(x.to(device), dtype, rounding, True, True, False, device, rounding)


@pytest.mark.parametrize("device", DEVICES)
def test_every_block_has_its_own_scale(device):
    """Magnitudes differ by powers of ten between lines: another line's scale changes the data."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(144, 272, generator=generator)
    x *= 10.0 ** torch.randint(-6, 6, (144, 1), generator=generator)
    x *= 10.0 ** torch.randint(-6, 6, (1, 272), generator=generator)
    check(x.to(device), E4M3, "e8m0", True, True, True, device, "seed 5")


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=[(3, 33, 129), (2, 16, 48)], swizzled=[True, False], layout=["contiguous", "transposed"]
)
def test_each_matrix_of_a_stack_is_cast_by_itself(shape, swizzled, layout, device):
    x = Case(shape, torch.bfloat16, fill="wide", layout=layout, seed=6).make(device)
    op = launcher("cast_mx", "_launch", device)
    together = op(x, E4M3, "e8m0", swizzled, True, True)
    for e, matrix in enumerate(x):
        alone = op(matrix, E4M3, "e8m0", swizzled, True, True)
        for found, expected in zip(together, alone, strict=True):
            assert_bitwise(found[e].view(torch.uint8), expected.view(torch.uint8), shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_empty(shape, swizzled, device):
    x = Case(shape).make(device)
    check(x, torch.float8_e5m2, "e8m0", swizzled, True, True, device, shape)


@pytest.mark.parametrize("scale_format", ["float32", "power_of_two"])
def test_refuses_other_scales(scale_format):
    arguments = torch.ones(4, 4), E4M3, scale_format, True, True, True
    with pytest.raises(ValueError, match=r"float8::cast_mx: scales .* are E8M0, not .* use 'e8m0'"):
        cast_mx(*arguments)


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=[(130, 48), (0, 16)],
    layout=["contiguous", "transposed"],
    swizzled=[True, False],
    wanted=ORIENTATIONS[::2],
)
def test_opcheck(shape, layout, swizzled, wanted, device):
    x = Case(shape, torch.bfloat16, layout=layout).make(device)
    torch.library.opcheck(cast_mx, (x, E4M3, "e8m0", swizzled, *wanted))
