"""Counting magnitudes forgets nothing: SQNR and scales against the oracle's casts of the data."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from assertions import sqnr
from shapes import FORMATS, Case, pairs
from torch import Tensor

from float8.formats import E4M3, E5M2, format_of
from float8.numerics.distribution import Distribution

BFLOAT16 = torch.bfloat16
CASES = (
    Case((64, 33), BFLOAT16),
    Case((5, 123), BFLOAT16, exponent=-40, fill="wide", layout="transposed"),
    Case((130, 257), BFLOAT16, exponent=20, fill="one_large"),
    Case((37, 1), BFLOAT16, fill="ties", layout="sliced"),
    Case((4, 16), BFLOAT16, fill="codes", layout="expanded"),
)


def counted(*tensors: Tensor) -> Distribution:
    seen = Distribution()
    for x in tensors:
        seen.add(x)
    return seen


def exact_sqnr(x: Tensor, scale: float, dtype: torch.dtype) -> float:
    """Of the oracle's cast of the data itself."""
    scales = torch.full((1, 1), scale, dtype=torch.float32)
    codes = oracle.cast(x, scales, (-1, -1), dtype)
    return sqnr(oracle.values(codes, scales, (-1, -1), dtype), x)


@pairs(case=CASES, dtype=FORMATS, factor=[1.0, 0.3, 2.0**-5, 2.0**9])
def test_the_sqnr_of_any_scale_is_that_of_casting_the_data(case, dtype, factor):
    x, fmt = case.make(), format_of(dtype)
    seen = counted(x)
    scale = float(torch.tensor(seen.amax_scale(fmt) * factor, dtype=torch.float32))
    (found,) = seen.sqnr(torch.tensor([scale]), fmt).tolist()
    assert found == pytest.approx(exact_sqnr(x, scale, dtype), rel=1e-9), (case, scale)


def test_batches_add_up_whatever_their_shapes():
    x = torch.randn(7, 11, 13).bfloat16()
    whole, parts = counted(x), counted(x[:3], x[3], x[4:].transpose(0, 2), x[:0])
    assert torch.equal(whole._counts, parts._counts)
    assert (parts.elements, parts.amax) == (x.numel(), float(x.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_rounded_and_keep_their_amax(dtype):
    x = torch.randn(100, 50).to(dtype)
    seen = counted(x)
    assert seen.amax == float(x.abs().max())
    assert seen.amax_scale(E4M3) == oracle.scale_of(seen.amax, E4M3.dtype)
    (found,) = seen.sqnr(torch.tensor([seen.amax_scale(E4M3)]), E4M3).tolist()
    # One part in 2^9 beside one in 2^4: a thousandth of the noise.
    assert found == pytest.approx(exact_sqnr(x, seen.amax_scale(E4M3), E4M3.dtype), abs=0.05)


def test_what_is_not_finite_is_counted_apart():
    x = torch.randn(20, 20)
    x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    seen = counted(x)
    assert seen.nonfinite == 3
    assert seen.amax == float(x[1:].abs().max().maximum(x[0, 3:].abs().max()))
    assert seen.values[0].isfinite().all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("steps", [1, 8])
def test_the_search_finds_the_best_of_its_grid(dtype, steps):
    """Against a loop over the grid with the oracle's casts."""
    fmt = format_of(dtype)
    # Two octaves wider than the format, its power spread evenly: something has to give.
    exponents = torch.rand(4000, 1, dtype=torch.float64) * 42
    x = torch.exp2(exponents / 2 - 10).bfloat16()
    seen = counted(x)
    top = math.log2(seen.amax_scale(fmt))
    grid = [
        2.0 ** (k / steps)
        for k in range(math.floor((top - 6) * steps), math.ceil((top + 2) * steps))
    ]
    best = max(exact_sqnr(x, scale, dtype) for scale in grid)
    found = exact_sqnr(x, seen.sqnr_scale(fmt, steps), dtype)
    assert found >= best - 1e-6


def test_the_search_clips_a_lone_outlier_only_where_that_pays():
    x = torch.randn(1000, 100).bfloat16() * 2.0**-14
    x[0, 0] = 2.0**-4  # 10 octaves above: E4M3 holds both
    seen = counted(x)
    assert seen.sqnr_scale(E4M3) >= 2.0**-4 / 448 / 2
    x *= 0
    x[1:] = (torch.randn(999, 100) * 2.0**-24).bfloat16()
    x[0, 0] = 2.0**-14.0
    assert counted(x).sqnr_scale(E5M2) > 0


def test_a_search_is_never_worse_than_the_amax_scale():
    for seed in range(5):
        torch.manual_seed(seed)
        seen = counted(torch.randn(64, 64).pow(2 * seed + 1).bfloat16())
        chosen = torch.tensor([seen.sqnr_scale(E4M3), seen.amax_scale(E4M3)])
        found = seen.sqnr(chosen, E4M3)
        assert found[0] >= found[1], seed


def test_a_percentile_leaves_that_share_unsaturated():
    x = torch.randn(200, 500).bfloat16()
    seen = counted(x, torch.zeros(1000, 500))  # zeros do not count: they need no range
    for percent in (50.0, 99.0, 99.99, 100.0):
        scale = seen.percentile_scale(E4M3, percent)
        share = float((x.double().abs() <= scale * 448 * (1 + 1e-6)).double().mean())
        assert share >= percent / 100
        if percent < 100:
            # one magnitude of bfloat16 less would be too little
            smaller = scale * (1 - 2.0**-8)
            assert float((x.double().abs() <= smaller * 448).double().mean()) < percent / 100
    assert seen.percentile_scale(E4M3, 100.0) == seen.amax_scale(E4M3)


def test_values_below_bfloat16s_range_still_have_a_scale():
    seen = counted(torch.full((3,), 1e-44))
    tiny = torch.finfo(torch.float32).tiny
    assert seen.percentile_scale(E4M3, 99.0) == seen.sqnr_scale(E4M3) == tiny


@pytest.mark.parametrize("factor", [1.0, 2.0**-4, 2.0**14])
def test_what_is_lost_at_both_ends(factor):
    x = Case((64, 100), BFLOAT16, fill="wide").make()
    seen = counted(x)
    scale = seen.amax_scale(E4M3) * factor
    saturated, flushed = seen.lost(scale, E4M3)
    magnitudes = x.double().abs()
    exact = float((magnitudes > 448 * scale * (1 + 2**-8)).double().mean())
    assert saturated == pytest.approx(exact)
    codes = oracle.cast(x, torch.full((1, 1), scale), (-1, -1), E4M3.dtype)
    zero = (oracle.table(E4M3.dtype)[codes.long()] == 0) & (magnitudes > 0)
    assert flushed == pytest.approx(float(zero.double().mean()))
    assert (saturated > 0) == (factor < 1)
