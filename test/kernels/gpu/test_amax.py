"""`amax`: every block's largest magnitude, as the definition finds it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from shapes import DEVICES, HIGH_PRECISION, LAYOUTS, SPECIALS, Case, pairs

from float8.kernels import definition
from float8.kernels.gpu.amax import amax

BLOCKS = ((-1, -1), (1, -1), (-1, 1), (1, 128), (128, 128), (8, 16))


def check(case, block, device):
    x = case.make(device)
    got = launcher("amax", "_launch", device)(x, *block)
    assert_bitwise(got, definition.amax(x, block), case, f"amax of blocks {block}")
    assert got.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pairs(shape=[(5, 123), (130, 257)], layout=LAYOUTS, block=BLOCKS)
def test_blocks(shape, layout, block, device):
    check(Case(shape, torch.bfloat16, fill="wide", layout=layout), block, device)


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    specials=[*((s,) for s in SPECIALS), ("inf", "nan")],
    source=HIGH_PRECISION,
    block=BLOCKS,
    layout=["contiguous", "transposed"],
)
def test_special_values(specials, source, block, layout, device):
    check(Case((33, 40), source, specials=specials, seed=3, layout=layout), block, device)


@pytest.mark.parametrize("device", DEVICES)
@pairs(shape=[(0, 16), (16, 0)], block=BLOCKS)
def test_empty(shape, block, device):
    check(Case(shape), block, device)


@pytest.mark.parametrize("block", [(3, 128), (1, 256), (-1, 128), (0, 0)])
def test_refuses_other_blocks(block):
    with pytest.raises(ValueError, match=r"float8::amax: no kernel takes blocks .* powers of two"):
        amax(torch.ones(4, 4), *block)


@pytest.mark.parametrize("device", DEVICES)
@pairs(shape=[(5, 123), (1, 5), (0, 16)], layout=["contiguous", "transposed"], block=BLOCKS)
def test_opcheck(shape, layout, block, device):
    torch.library.opcheck(amax, (Case(shape, layout=layout).make(device), *block))
