"""Statistics of a cast against the 256-code table in float64, and their merging."""

from __future__ import annotations

import math
from dataclasses import replace

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import DEVICES, FORMATS, GRANULARITIES, Case, cases, pairs

from float8 import kernels
from float8.numerics import statistics
from float8.numerics.statistics import CastLabels, CastMatrix, measure_cast, merged


def labels(scaling):
    return CastLabels("layer", "input", "output", "e4m3", scaling, "tensorwise")


def row(x, coded, is_fixed=False):
    """The one row of one cast."""
    scaling = "float8" if x is None else "static" if is_fixed else "dynamic"
    return measure_cast(coded._replace(source=x)).statistics(labels(scaling))


def cast(x, dtype, granularity, scale=None):
    block = granularity.block_of(x.shape)
    if scale is None:
        scale = kernels.scale_from_amax(kernels.amax(x, block), torch.finfo(dtype).max)
    return CastMatrix(kernels.cast_by_scale(x, scale, block, dtype), scale, block, x)


def expected(x, coded):
    """The numbers of a row, from the codes' bit fields and in float64; fractions as counts."""
    dtype = coded.data.dtype
    x = x.detach().cpu().double()
    decoded = oracle.table(dtype)[coded.data.cpu().contiguous().view(torch.uint8).long()]
    scale = oracle.spread(coded.scale.cpu().double(), tuple(x.shape), coded.block)
    finite = x.isfinite()
    kept, values = x[finite], (decoded * scale)[finite]
    n = max(kept.numel(), 1)
    mean = kept.sum() / n
    exponents = [math.frexp(v)[1] - 1 for v in kept.abs().tolist() if v]
    return {
        "zeros": int((x == 0).sum()),
        "nonfinite": int((~finite).sum()),
        "amax": float(kept.abs().max()) if kept.numel() else 0.0,
        "flushed": int(((x != 0) & (decoded == 0)).sum()),
        "saturated": int((kept.abs() > (scale[finite] * oracle.largest(dtype)) * 1.0000015).sum()),
        "signal": float((kept**2).sum()),
        "noise": float(((kept - values) ** 2).sum()),
        "variance": float(((kept - mean) ** 2).sum() / n),
        "fourth": float(((kept - mean) ** 4).sum() / n),
        "exponents": {e: exponents.count(e) for e in set(exponents)},
    }


def check(x, coded, replay):
    found, want = row(x, coded), expected(x, coded)
    for name in ("zeros", "nonfinite", "amax"):
        assert getattr(found, name) == want[name], f"{name}: {replay}"
    for name in ("flushed", "saturated"):
        count = getattr(found, name) * max(x.numel(), 1)
        assert count == pytest.approx(want[name], abs=1e-6), f"{name}: {replay}"
    lowest, counts = found.histogram
    assert {lowest + i: n for i, n in enumerate(counts) if n} == want["exponents"], replay
    if want["nonfinite"] == x.numel():
        assert found.sqnr is None, replay
    elif not math.isfinite(want["noise"]):
        assert found.sqnr == -math.inf, replay
    elif want["noise"] == 0:
        assert found.sqnr == math.inf, replay
    else:
        decibel = 10 * math.log10(want["signal"] / want["noise"])
        assert found.sqnr == pytest.approx(decibel, abs=1e-9), replay
    if want["variance"] > 1e-6 * want["signal"] / max(x.numel(), 1) > 0:
        assert found.kurtosis == pytest.approx(want["fourth"] / want["variance"] ** 2, rel=1e-8)


@pairs(
    dtype=FORMATS,
    granularity=list(GRANULARITIES),
    shape=[(5, 123), (1, 1), (130, 257), (16, 0), (0, 16), (37, 1)],
    fill=["normal", "wide", "codes", "zeros", "one_large"],
    source=[torch.float32, torch.bfloat16, torch.float16],
    layout=["contiguous", "transposed", "expanded", "sliced"],
)
def test_every_number_is_that_of_the_table_of_codes(
    dtype, granularity, shape, fill, source, layout
):
    case = Case(shape, source, fill=fill, layout=layout, seed=3)
    x = case.make()
    check(x, cast(x, dtype, GRANULARITIES[granularity]), case)


@settings(max_examples=60)
@given(
    case=cases(),
    dtype=st.sampled_from(oracle.DTYPES),
    name=st.sampled_from(list(GRANULARITIES)),
    octaves=st.one_of(st.none(), st.integers(-12, 12)),
)
def test_weird_tensors_under_right_and_wrong_scales(case, dtype, name, octaves):
    x = case.make()
    coded = cast(x, dtype, GRANULARITIES[name])
    if octaves is not None:  # a scale from elsewhere: saturates or flushes
        scale = (coded.scale * 2.0**octaves).nan_to_num(1.0, 1.0).clamp(2.0**-126, 2.0**126)
        coded = cast(x, dtype, GRANULARITIES[name], scale)
    check(x, coded, (case, dtype, name, octaves))


@pytest.mark.parametrize("name", GRANULARITIES)
def test_pieces_are_small_and_change_nothing(name, monkeypatch):
    x = Case((300, 70), fill="wide", specials=("inf",), seed=1).make()
    x[200:, :] *= 100
    coded = cast(x, FORMATS[0], GRANULARITIES[name], None)
    monkeypatch.setitem(statistics._PIECE, "cpu", 700)
    rows_of_pieces = [len(piece.exact) for piece in coded.pieces()]
    assert max(rows_of_pieces) <= max(700 // 70, coded.block[0])
    check(x, coded, name)


def test_staleness_counts_octaves_above_and_below_the_range():
    x = torch.tensor([[0.5, -448.0]])
    for octaves in (-3, 0, 2):
        scale = torch.full((1, 1), 2.0**-octaves)
        found = row(x, cast(x, FORMATS[0], GRANULARITIES["tensorwise"], scale), is_fixed=True)
        assert found.staleness == octaves
        assert found.saturated == (0.5 if octaves > 0 else 0)
    assert row(x * 0, cast(x * 0, FORMATS[0], GRANULARITIES["tensorwise"])).staleness is None


def test_the_scale_of_a_row_of_zeros_is_no_scale():
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0], [4.0, -8.0]])
    found = row(x, cast(x, FORMATS[0], GRANULARITIES["rowwise"]))
    assert found.scale_min == pytest.approx(2 / 448)
    assert found.scale_max == pytest.approx(8 / 448)
    all_zero = row(x * 0, cast(x * 0, FORMATS[0], GRANULARITIES["rowwise"]))
    assert (all_zero.scale_min, all_zero.scale_max) == (2.0**-126, 2.0**-126)
    assert (all_zero.sqnr, all_zero.kurtosis, all_zero.flushed) == (math.inf, None, 0)


@pytest.mark.parametrize("mean", [0, 1, 30, 200, 1e3, 1e4, 1e6])
def test_a_kurtosis_is_right_or_not_given(mean):
    x = (Case((300, 300), torch.float32, seed=5).make().double() + mean).float()
    x[0, 0] = mean + 9
    found = row(x, cast(x, FORMATS[0], GRANULARITIES["tensorwise"])).kurtosis
    central = x.double() - x.double().mean()
    if mean <= 200:
        assert found == pytest.approx(float((central**4).mean() / (central**2).mean() ** 2), 1e-3)
    else:
        assert found is None


def test_a_wrong_cast_is_seen():
    """Planted: codes of an adjacent scale, of the other sign, and one element swapped."""
    x = torch.randn(64, 64)
    right = cast(x, FORMATS[0], GRANULARITIES["tensorwise"])
    good = row(x, right).sqnr
    assert 30 < good < 33
    assert row(x, right._replace(scale=right.scale * 1.1)).sqnr < 21
    assert row(x, right._replace(data=(-right.data.float()).to(FORMATS[0]))).sqnr < 0
    swapped = right.data.clone().view(torch.uint8)
    swapped[0, 0], swapped[1, 1] = swapped[1, 1].clone(), swapped[0, 0].clone()
    assert row(x, right._replace(data=swapped.view(FORMATS[0]))).sqnr < good


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_device_measures_what_the_cpu_does(device):
    x = Case((300, 512), torch.bfloat16, fill="wide", specials=("inf", "zero")).make()
    coded = cast(x, FORMATS[0], GRANULARITIES["1x128"])
    there = row(
        x.to(device), CastMatrix(coded.data.to(device), coded.scale.to(device), coded.block)
    )
    here = row(x, coded)
    assert there.histogram == here.histogram
    assert there.sqnr == pytest.approx(here.sqnr)
    assert (there.nonfinite, there.zeros, there.amax) == (here.nonfinite, here.zeros, here.amax)


def test_merging_is_seeing_all_elements():
    parts = [Case((8, 16), fill="wide", specials=("inf", "zero"), seed=i).make() for i in (1, 2)]
    parts[1] *= 4
    scales = [torch.full((1, 1), 0.01 * (i + 1)) for i in range(2)]
    casts = [
        cast(x, FORMATS[0], GRANULARITIES["tensorwise"], s)
        for x, s in zip(parts, scales, strict=True)
    ]
    (found,) = merged(row(x, c, True) for x, c in zip(parts, casts, strict=True))
    by_row = torch.cat(scales).repeat_interleave(8, 0)
    data = torch.cat([c.data.view(torch.uint8) for c in casts]).view(FORMATS[0])
    whole = row(torch.cat(parts), CastMatrix(data, by_row, (1, -1)), True)
    assert (found.calls, found.staleness) == (2, row(parts[1], casts[1], True).staleness)
    same = replace(found, calls=1, staleness=None, sums=())
    for name, value in vars(replace(whole, sums=())).items():
        mine = getattr(same, name)
        assert mine == value or mine == pytest.approx(value, rel=1e-12), name
    # Other casts stay apart; a scale that is NaN stays NaN.
    other = replace(found, format="e5m2")
    assert merged([found, other]) == [found, other]
    lost = row(parts[0], casts[0]._replace(scale=scales[0] * math.nan), True)
    for both in ([found, lost], [lost, found]):
        assert math.isnan(merged(both)[0].scale_max)
