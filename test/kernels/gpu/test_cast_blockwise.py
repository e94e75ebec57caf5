"""`cast_blockwise`: 1x128 and 128x128 blocks, both orientations, as the definition casts them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from shapes import DEVICES, FORMATS, HIGH_PRECISION, LAYOUTS, SPECIALS, Case, pairs

from float8.kernels import definition
from float8.kernels.definition import scale_format_of
from float8.kernels.gpu.cast_blockwise import cast_blockwise

BLOCKS = ((1, 128), (128, 128))
SHAPES = ((80, 144), (5, 123), (130, 129))
ORIENTATIONS = ((True, True), (True, False), (False, True), (False, False))


def check(x, dtype, power_of_two, block, rows, cols, device, replay):
    """Requested outputs have the definition's data and scales, in cuBLASLt's layout."""
    got = launcher("cast_blockwise", "_launch", device)(x, dtype, power_of_two, *block, rows, cols)
    for wanted, source, data, scale in ((rows, x, *got[:2]), (cols, x.t(), *got[2:])):
        if not wanted:
            assert data.shape == scale.shape == (0, 0)
            continue
        codes, expected = definition.cast_dynamic(
            source, block, dtype, scale_format_of(power_of_two)
        )
        assert_bitwise(scale, expected, replay, "scale")
        assert_bitwise(data, codes, replay, "data")
        assert data.is_contiguous()
        if block[0] == 1:
            assert scale.stride() == (1, max(source.shape[0], 1))
        else:
            assert scale.stride() == (max(scale.shape[1], 1), 1)


@pytest.mark.parametrize("device", DEVICES)
@pairs(shape=SHAPES, layout=LAYOUTS, block=BLOCKS)
def test_agrees(shape, layout, block, device):
    case = Case(shape, torch.bfloat16, fill="wide", layout=layout)
    check(case.make(device), torch.float8_e4m3fn, True, block, True, True, device, case)


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=[(32, 144), (5, 123)],
    layout=["contiguous", "transposed"],
    block=BLOCKS,
    wanted=ORIENTATIONS[1:],
)
def test_writes_what_is_asked_for(shape, layout, block, wanted, device):
    case = Case(shape, torch.bfloat16, layout=layout, seed=1)
    check(case.make(device), torch.float8_e4m3fn, True, block, *wanted, device, case)


@pytest.mark.parametrize("device", DEVICES)
@pairs(special=list(SPECIALS), source=HIGH_PRECISION, block=BLOCKS)
def test_special_values(special, source, block, device):
    """A special value reaches its own blocks, and no other."""
    case = Case((130, 48), source, fill="one_large", specials=(special,), seed=2)
    dtype, power_of_two = FORMATS[source == torch.bfloat16], source != torch.float32
    check(case.make(device), dtype, power_of_two, block, True, True, device, case)


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    exponent=[-140, -126, -60, 100, 126], power_of_two=[False, True], block=BLOCKS, dtype=FORMATS
)
def test_far_exponents(exponent, power_of_two, block, dtype, device):
    case = Case((16, 40), torch.float32, exponent=exponent, fill="wide", seed=4)
    check(case.make(device), dtype, power_of_two, block, True, True, device, case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_has_its_own_scale(block, device):
    """Magnitudes differ by powers of ten between lines: another line's scale changes the data."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(144, 272, generator=generator)
    x *= 10.0 ** torch.randint(-6, 6, (144, 1), generator=generator)
    x *= 10.0 ** torch.randint(-6, 6, (1, 272), generator=generator)
    check(x.to(device), torch.float8_e4m3fn, False, block, True, True, device, "seed 5")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_empty(shape, block, device):
    check(Case(shape).make(device), torch.float8_e5m2, False, block, True, True, device, shape)


@pytest.mark.parametrize("block", [(1, 32), (128, 1), (-1, -1)])
def test_refuses_other_blocks(block):
    arguments = torch.ones(4, 4), torch.float8_e4m3fn, True, *block, True, True
    with pytest.raises(ValueError, match=r"float8::cast_blockwise: no kernel casts .* use one of"):
        cast_blockwise(*arguments)


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    shape=[(130, 48), (0, 16)],
    layout=["contiguous", "transposed"],
    block=BLOCKS,
    wanted=ORIENTATIONS[::2],
)
def test_opcheck(shape, layout, block, wanted, device):
    x = Case(shape, torch.bfloat16, layout=layout).make(device)
    torch.library.opcheck(cast_blockwise, (x, torch.float8_e4m3fn, True, *block, *wanted))
