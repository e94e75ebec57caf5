"""Rows sort, merge exactly, and survive strict JSON."""

import json
import math
from dataclasses import replace

import pytest
import torch
from report_rows import ROW

from float8.numerics.rows import (
    Histogram,
    Sums,
    decoded,
    encoded,
    kurtosis_of,
    merged,
    sqnr_of,
    worst_first,
)


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        replace(ROW, sqnr=math.inf, scale_max=math.inf),
        replace(ROW, sqnr=-math.inf, sums=Sums(0.0, 1.0, 0.0, 1.0, math.inf)),
        replace(ROW, flushed=None, saturated=None, sqnr=None, staleness=None, sums=None),
        replace(ROW, histogram=Histogram()),
    ],
)
def test_a_row_survives_strict_json(row):
    text = json.dumps(encoded(row.as_dict()), allow_nan=False)
    assert decoded(json.loads(text)) == row
    nan = replace(row, scale_min=math.nan)
    assert math.isnan(decoded(json.loads(json.dumps(encoded(nan.as_dict())))).scale_min)


def test_a_row_of_another_shape_is_refused():
    found = encoded(ROW.as_dict())
    with pytest.raises(ValueError, match=r"missing: \['amax'\]"):
        decoded({name: value for name, value in found.items() if name != "amax"})
    with pytest.raises(ValueError, match=r"unknown: \['colour'\]"):
        decoded(found | {"colour": "red"})


def test_the_range_is_that_of_the_format_under_the_scales():
    assert ROW.range == (2.0**-9 * 0.25, 448 * 0.5)


def test_worst_comes_first_and_nothing_known_last():
    found = [replace(ROW, sqnr=s) for s in (math.inf, None, 3.0, -math.inf, 20.0)]
    assert [row.sqnr for row in worst_first(found)] == [-math.inf, 3.0, 20.0, math.inf, None]
    broken = [replace(found[0], sqnr=None, nonfinite=9), replace(found[0], sqnr=31.0, nonfinite=1)]
    assert worst_first([*found, *broken])[1:3] == broken, "beside what left nothing finite"


def test_ratios_of_sums():
    x = torch.tensor([1.0, 2.0, -3.0, 5.0], dtype=torch.float64)
    sums = Sums(*(float((x**p).sum()) for p in (1, 2, 3, 4)), noise=0.39)
    assert sqnr_of(sums) == pytest.approx(10 * math.log10(39 / 0.39))
    central = x - x.mean()
    assert kurtosis_of(sums, 4) == pytest.approx(
        float((central**4).mean() / (central**2).mean() ** 2)
    )
    assert kurtosis_of(Sums(1.4, 0.98, 0.686, 0.4802, 0.0), 2) is None  # twice 0.7
    assert kurtosis_of(Sums(0.0, 0.0, 0.0, 0.0, 0.0), 0) is None
    assert sqnr_of(Sums(0.0, 0.0, 0.0, 0.0, 0.0)) is None


def test_merging_is_seeing_all_elements():
    other = replace(
        ROW, elements=30, calls=2, zeros=0, amax=5.0, scale_min=0.1, scale_max=0.4, flushed=0.3,
        saturated=0.0, staleness=0.5, histogram=Histogram(-4, (2, 2)), nonfinite=3,
        sums=Sums(1.0, 2.0, 3.0, 4.0, 0.02),
    )  # fmt: skip
    (found,) = merged([ROW, other])
    assert (found.elements, found.calls, found.zeros, found.nonfinite) == (40, 3, 1, 3)
    assert (found.amax, found.scale_min, found.scale_max, found.staleness) == (5.0, 0.1, 0.5, 0.5)
    assert found.flushed == pytest.approx((0.1 * 10 + 0.3 * 30) / 40)
    assert found.saturated == pytest.approx(0.2 * 10 / 40)
    assert found.histogram == Histogram(-4, (2, 2, 1, 0, 8))
    assert found.sums == Sums(2.0, 22.0, 6.0, 64.0, 0.04)
    assert found.sqnr == pytest.approx(10 * math.log10(22 / 0.04))
    assert found.kurtosis == kurtosis_of(found.sums, 37)


def test_rows_of_other_casts_stay_apart_or_are_refused():
    weight = replace(ROW, operand="weight")
    assert merged([ROW, weight]) == [ROW, weight]
    with pytest.raises(ValueError, match="format is 'e4m3' in one report and 'e5m2' in the other"):
        merged([ROW, replace(ROW, format="e5m2")])
    given = replace(ROW, scaling="float8", sqnr=None)
    assert [row.calls for row in merged([ROW, given, ROW, given])] == [2 * ROW.calls] * 2
    with pytest.raises(ValueError, match="cannot be merged"):
        merged([ROW, replace(ROW, sums=None)])
