"""Intervals of paired differences, of least squares and of the study of recipes, by formulas
here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import bench_quality
from benchmarks.quality.contenders import BASE, NOISE, UNIT_BASE, UNIT_NOISE
from benchmarks.quality.intervals import QUANTILES, Difference, difference, fit, quantile

GAPS = {f"recipe {i}": 0.1 * i for i in range(8)}  # per cent
STUDIES = 300


def rows(losses: dict[int, float], key: str = "loss", **run) -> list[dict]:
    return [{"run": {"contender": "x", "seed": s, **run}, key: loss} for s, loss in losses.items()]


@pytest.mark.parametrize("freedom", [1, 2, 4, 10, 30])
def test_quantiles_are_those_of_student_s_distribution(freedom):
    """By Simpson's rule over its density."""
    x = np.linspace(0, quantile(freedom), 20_001)
    density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    factor = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    weights = np.where(np.arange(x.size) % 2, 4.0, 2.0)
    weights[[0, -1]] = 1.0
    area = (density * weights).sum() * (x[1] - x[0]) / 3
    assert 0.5 + factor / math.sqrt(freedom * math.pi) * area == pytest.approx(0.975, abs=4e-5)
    assert quantile(31) == QUANTILES[-1] >= 1.96 and quantile(0) == math.inf


def test_a_difference_is_the_formula_in_float64():
    base = {0: 1.5, 1: 1.61, 2: 1.43, 3: 1.58}
    own = {3: 1.6, 0: 1.51, 1: 1.60, 2: 1.45}
    found = difference(rows(own, "bf16_loss"), rows(base), "bf16_loss")
    d = np.array([100 * (own[seed] - base[seed]) / base[seed] for seed in range(4)])
    assert found.values == pytest.approx(d)
    assert (found.mean, found.half_width) == pytest.approx((d.mean(), 3.182 * d.std(ddof=1) / 2))


def test_seeds_that_one_of_the_two_lacks_do_not_count_and_diverged_runs_are_counted():
    broken = [{"run": {"contender": "x", "seed": 2}, "error": "diverged"}]
    found = difference([*rows({0: 1.1, 5: 9.0}), *broken], rows({0: 1.0, 2: 1.0}))
    assert (found.values, found.diverged) == (pytest.approx((10.0,)), 1)
    assert found.target(100) == {"target": 100, "met": False}
    assert str(found) == "+10.00 %"
    assert difference([], rows({0: 1.0})).values == ()


def test_the_whole_interval_must_be_within_and_no_run_diverged():
    values = (0.1, 0.1, 0.1)
    assert Difference(values).target(0.1001)["met"] and not Difference(values).target(0.09)["met"]
    assert not Difference(values, diverged=1).target(1)["met"]
    assert not Difference((-0.2, 0.2)).target(1.0)["met"]  # 12.7 * 0.28 / 1.4 is wider


def test_a_fit_is_the_formula_of_a_straight_line():
    generator = np.random.default_rng(0)
    x, noise = generator.normal(size=12), generator.normal(size=12)
    y = 0.7 - 2.0 * x + 0.1 * noise
    found = fit([({"one": 1.0, "slope": float(a)}, float(b)) for a, b in zip(x, y, strict=True)])
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    rest = y - y.mean() - slope * (x - x.mean())
    error = math.sqrt((rest**2).sum() / 10 / ((x - x.mean()) ** 2).sum())
    assert found({"slope": 1.0}) == pytest.approx((slope, 2.228 * error))
    at_mean = found({"one": 1.0, "slope": float(x.mean())})
    assert at_mean == pytest.approx((y.mean(), 2.228 * math.sqrt((rest**2).sum() / 10 / 12)))
    assert fit([]) is None
    assert fit([({"a": 1.0, "b": 1.0}, float(i)) for i in range(5)]) is None  # a and b as one


# --- gaps to a base that has a control


def study(generator, seeds: int, errors: dict[str, float]) -> dict[str, list[dict]]:
    """Losses of seeds that differ by 5 %, with errors of 0.3 % of each run, or others."""
    of_seed = 2 * np.exp(0.05 * generator.normal(size=seeds))
    found = {}
    for name in (BASE, NOISE, *GAPS):
        error = errors.get(name, 0.3) * generator.normal(size=seeds)
        losses = of_seed * np.exp(error / 100) * (1 + GAPS.get(name, 0.0) / 100)
        found[name] = [
            {"run": {"contender": name, "seed": seed}, "loss": float(loss)}
            for seed, loss in enumerate(losses)
        ]
    return found


def test_intervals_have_the_true_gap_in_19_of_20_studies():
    """In 0.955: t of more than 30 degrees of freedom is taken as that of 30."""
    generator = np.random.default_rng(0)
    hits, widths, of_student = [], [], []
    for _ in range(STUDIES):
        losses = study(generator, 5, {})
        found = bench_quality.gaps(losses)
        hits += [abs(found[n].mean - gap) <= found[n].half_width for n, gap in GAPS.items()]
        widths.append(found["recipe 0"].half_width)
        of_student.append(difference(losses["recipe 0"], losses[BASE]).half_width)
    assert sum(hits) / len(hits) == pytest.approx(0.955, abs=0.02)
    assert sum(widths) / sum(of_student) == pytest.approx(0.68, abs=0.03)


def test_the_interval_is_the_formula():
    losses = study(np.random.default_rng(1), 4, {})
    y = {name: 100 * np.log([row["loss"] for row in own]) for name, own in losses.items()}
    pairs = {name: y[name] - (y[BASE] + y[NOISE]) / 2 for name in GAPS}
    # The runs of a seed, each less its contender's mean, around their own mean: the residuals.
    control = np.concatenate([y[BASE], y[NOISE]]).mean()
    means = {name: (control if name in (BASE, NOISE) else y[name].mean()) for name in y}
    rest = np.stack([y[name] - means[name] for name in y])
    s = math.sqrt(((rest - rest.mean(0)) ** 2).sum() / (8 * 3 + 4))
    found = bench_quality.gaps(losses)
    for name in GAPS:
        grown = math.exp(pairs[name].mean() / 100)
        assert found[name].mean == pytest.approx(100 * (grown - 1))
        assert found[name].half_width == pytest.approx(grown * 2.048 * s * math.sqrt(1.5 / 4))
    assert found[NOISE] == difference(losses[NOISE], losses[BASE])


def test_each_base_has_a_fit_of_its_own_and_without_a_control_student_s_interval():
    generator = np.random.default_rng(5)
    losses, unit = study(generator, 5, {}), study(generator, 5, {"recipe 1": 3.0})
    own = {UNIT_BASE: unit[BASE], UNIT_NOISE: unit[NOISE], "unit": unit["recipe 1"]}
    for name, of_name in own.items():
        for row in of_name:
            row["run"]["contender"] = name
    found, alone = bench_quality.gaps(losses | own), bench_quality.gaps(losses)
    assert {name: found[name] for name in GAPS} == {name: alone[name] for name in GAPS}
    assert found["unit"].half_width > 2 * found["recipe 1"].half_width
    del losses[NOISE]
    expected = {name: difference(losses[name], losses[BASE]) for name in GAPS}
    assert bench_quality.gaps(losses) == expected
