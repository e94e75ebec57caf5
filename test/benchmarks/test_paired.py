"""Intervals of paired differences and of least squares, against formulas written out here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.quality.paired import QUANTILES, Difference, difference, fit, quantile, settings


def rows(losses: dict[int, float], key: str = "loss", **run) -> list[dict]:
    return [{"run": {"contender": "x", "seed": s, **run}, key: loss} for s, loss in losses.items()]


def probability_below(t: float, freedom: int) -> float:
    """Of Student's distribution, by Simpson's rule over its density."""
    x = np.linspace(0, t, 20_001)
    density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    factor = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    weights = np.where(np.arange(x.size) % 2, 4.0, 2.0)
    weights[[0, -1]] = 1.0
    area = (density * weights).sum() * (x[1] - x[0]) / 3
    return 0.5 + factor / math.sqrt(freedom * math.pi) * area


@pytest.mark.parametrize("freedom", range(1, len(QUANTILES) + 1))
def test_quantiles_are_those_of_student_s_distribution(freedom):
    assert probability_below(quantile(freedom), freedom) == pytest.approx(0.975, abs=4e-5)


def test_beyond_the_table_intervals_are_too_wide_rather_than_too_narrow():
    assert quantile(31) == quantile(10_000) == QUANTILES[-1] >= 1.96
    assert quantile(0) == math.inf


def test_a_difference_is_the_formula_in_float64():
    base = {0: 1.5, 1: 1.61, 2: 1.43, 3: 1.58}
    own = {3: 1.6, 0: 1.51, 1: 1.60, 2: 1.45}
    found = difference(rows(own), rows(base))
    d = np.array([100 * (own[seed] - base[seed]) / base[seed] for seed in range(4)])
    assert found.values == pytest.approx(d)
    assert found.mean == pytest.approx(d.mean())
    assert found.half_width == pytest.approx(3.182 * d.std(ddof=1) / 2)


def test_seeds_that_one_of_the_two_lacks_do_not_count_and_diverged_runs_are_counted():
    broken = [{"run": {"contender": "x", "seed": 2}, "error": "diverged"}]
    found = difference([*rows({0: 1.1, 5: 9.0}), *broken], rows({0: 1.0, 2: 1.0}))
    assert (found.values, found.diverged) == (pytest.approx((10.0,)), 1)
    assert found.half_width == math.inf and not found.within(100)
    assert str(found) == "+10.00 %"
    nothing = difference([], rows({0: 1.0}))
    assert nothing.values == () and math.isnan(nothing.mean)


def test_the_whole_interval_must_be_within_and_no_run_diverged():
    values = (0.1, 0.1, 0.1)
    assert Difference(values).within(0.1001) and not Difference(values).within(0.09)
    assert not Difference(values, diverged=1).within(1)
    assert not Difference((-0.2, 0.2)).within(1.0)  # 12.7 * 0.28 / 1.4 is wider
    assert not Difference((-3.0, -3.0)).within(1.0)


def test_another_key_is_compared_with_the_base_s_loss():
    found = difference(rows({0: 1.2}, "bf16_loss"), rows({0: 1.0}), "bf16_loss")
    assert found.values == pytest.approx((20.0,))


def test_runs_of_two_settings_are_not_paired_by_accident():
    both = rows({0: 1.0}, steps=5) + rows({0: 2.0}, steps=6)
    with pytest.raises(ValueError, match=r"differ by their seeds, got \[0, 0\]"):
        difference(both, rows({0: 1.0}))
    with pytest.raises(ValueError, match="differ by their seeds"):
        difference(rows({0: 1.0}), both)
    assert list(settings(both, "contender", "seed").values()) == [both[:1], both[1:]]
    assert len(settings(both, "contender", "seed", "steps")) == 1


def test_a_fit_of_one_constant_is_the_mean_and_its_interval():
    values = (0.3, -0.1, 0.25, 0.4)
    found = fit([({"mean": 1.0}, value) for value in values])
    mean, half_width = found.combined({"mean": 1.0})
    assert (mean, half_width) == pytest.approx(
        (Difference(values).mean, Difference(values).half_width)
    )


def test_a_fit_is_the_formula_of_a_straight_line():
    generator = np.random.default_rng(0)
    x, noise = generator.normal(size=12), generator.normal(size=12)
    y = 0.7 - 2.0 * x + 0.1 * noise
    found = fit([({"one": 1.0, "slope": float(a)}, float(b)) for a, b in zip(x, y, strict=True)])
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    rest = y - y.mean() - slope * (x - x.mean())
    error = math.sqrt((rest**2).sum() / 10 / ((x - x.mean()) ** 2).sum())
    assert found.combined({"slope": 1.0}) == pytest.approx((slope, 2.228 * error))
    at_mean = found.combined({"one": 1.0, "slope": float(x.mean())})
    assert at_mean == pytest.approx((y.mean(), 2.228 * math.sqrt((rest**2).sum() / 10 / 12)))


def test_what_observations_do_not_tell_has_no_fit():
    assert fit([]) is None
    assert fit([({"a": 1.0}, 1.0)]) is None  # no degree of freedom
    assert fit([({"a": 1.0, "b": 1.0}, float(i)) for i in range(5)]) is None  # a and b as one
