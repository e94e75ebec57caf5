"""Casts in both orientations add the columns of their tiles, and cast to the same bits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from shapes import DEVICES, Case, pairs

from float8 import kernels
from float8.granularity import scale_shape
from float8.kernels.casts import import_kernels
from float8.kernels.gpu.launch import DEFINITIONS, LAUNCHERS

import_kernels(("cast", "cast_rowwise", "cast_blockwise"))
E4M3, BOTH = torch.float8_e4m3fn, (True, True)
# op -> its file, the rows of a tile, and its arguments between the matrix and the sums
OPS = {
    "cast": ("cast", 64, (torch.full((1, 1), 0.37), E4M3, *BOTH, None)),
    "cast, amax": ("cast", 64, (torch.full((1, 1), 0.37), E4M3, *BOTH, torch.zeros(()))),
    "cast_dynamic": ("cast", 64, (E4M3, False, *BOTH, None)),
    "cast_rowwise": ("cast_rowwise", 64, (E4M3, True, *BOTH)),
    "cast_blockwise, 1x128": ("cast_blockwise", 128, (E4M3, True, 1, 128, *BOTH)),
    "cast_blockwise, 128x128": ("cast_blockwise", 128, (E4M3, True, 128, 128, *BOTH)),
}


def run(name, x, sums, device, replay):
    """The sums are filled; the other results are those of a cast without them."""
    file, _, arguments = OPS[name]
    op = name.partition(",")[0]

    def moved():
        return [a.to(device, copy=True) if isinstance(a, torch.Tensor) else a for a in arguments]

    mine, theirs = moved(), moved()
    launch = launcher(file, "_launch" if file != "cast" else f"_{op}", device)
    got = launch(x, *mine, sums)
    for one, other in zip(got, DEFINITIONS[op](x, *theirs), strict=True):
        assert_bitwise(one, other, replay)
    if mine[-1] is not None and mine[-1] is not True:
        assert_bitwise(mine[-1].reshape(1), theirs[-1].reshape(1), replay, "recorded amax")


def empty_sums(name, x):
    shape = scale_shape(x.shape, (*[1] * (x.dim() - 2), OPS[name][1], 1))
    return torch.full(shape, torch.nan, device=x.device)


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    name=list(OPS),
    shape=[(80, 272), (5, 123), (130, 129), (2, 70, 20)],
    layout=["contiguous", "transposed", "sliced"],
)
def test_sums_are_exact_where_they_can_be(name, shape, layout, device):
    """Small integers: each sum is exact in float32, in whichever order; a row counts once."""
    if len(shape) == 3:
        name, layout = name.removesuffix(", amax"), "contiguous"
    case = Case(shape, torch.bfloat16, layout=layout)
    x = case.make(device)
    numbers = torch.arange(x.numel(), device=device).reshape(x.shape) * 7 % 31 - 15
    x.copy_(numbers)
    sums = empty_sums(name, x)
    run(name, x, sums, device, (name, case))
    rows = OPS[name][1]
    for i, part in enumerate(numbers.split(rows, -2)):
        assert torch.equal(sums[..., i, :].double(), part.sum(-2).double()), (name, case, i)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_sums_have_the_error_of_float32(name, device):
    x = Case((130, 144), torch.bfloat16, fill="wide", exponent=9).make(device)
    sums, plain = empty_sums(name, x), empty_sums(name, x.cpu())
    run(name, x, sums, device, name)
    DEFINITIONS[name.partition(",")[0]](x.cpu(), *OPS[name][2], plain)
    exact, size = x.double().sum(0).cpu(), x.double().abs().sum(0).cpu()
    for found in (sums.cpu(), plain):
        assert ((found.double().sum(0) - exact).abs() <= size * 2**-20).all()


@pytest.mark.parametrize("device", DEVICES)
def test_special_values_reach_their_own_column(device):
    x = torch.ones(70, 20, dtype=torch.bfloat16, device=device)
    x[3, 2], x[66, 4], x[69, 5] = torch.nan, torch.inf, -torch.inf
    sums = empty_sums("cast", x)
    run("cast", x, sums, device, "special values")
    assert (~sums.isfinite()).sum() == 3
    assert sums[0, 2].isnan()
    assert (sums[1, 4], sums[1, 5]) == (torch.inf, -torch.inf)


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    file, _, arguments = OPS[name]
    op = getattr(torch.ops.float8, name.partition(",")[0]).default
    for shape in ((32, 48), (0, 16)):
        x = Case(shape, torch.bfloat16).make("cpu")
        torch.library.opcheck(op, (x, *arguments, kernels.new_column_sums(file, x)))


@pytest.mark.parametrize("op", ["cast_dynamic", "cast_rowwise"])
@pytest.mark.parametrize(
    ("sums", "both"),
    [
        (torch.empty(1, 48), (True, False)),
        (torch.empty(1, 48), (False, True)),
        (torch.empty(2, 48), BOTH),
        (torch.empty(1, 47), BOTH),
        (torch.empty(1, 48, dtype=torch.bfloat16), BOTH),
        (torch.empty(1, 96)[:, ::2], BOTH),
    ],
)
def test_refuses_sums_that_it_would_not_fill(op, sums, both):
    arguments = (E4M3, True, *both, None)[: 5 if op == "cast_dynamic" else 4]
    with pytest.raises(
        ValueError, match=rf"float8::{op}: column_sums must be contiguous float32 of shape \(1, 48"
    ):
        LAUNCHERS[op](torch.ones(32, 48), *arguments, sums)
