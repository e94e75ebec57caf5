"""`quality/recipes.py`: gaps to a base that has a control, against a simulation and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.quality import recipes
from benchmarks.quality.contenders import BASE, NOISE, UNIT_BASE, UNIT_NOISE
from benchmarks.quality.paired import difference

GAPS = {f"recipe {i}": 0.1 * i for i in range(8)}  # per cent
STUDIES = 600


def study(
    generator: np.random.Generator, seeds: int, errors: dict[str, float]
) -> dict[str, list[dict]]:
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


def covered(seeds: int, errors: dict[str, float]) -> tuple[dict[str, float], float]:
    """How often an interval has the true gap; the mean width, that of Student's being 1."""
    generator = np.random.default_rng(0)
    hits, widths, of_student = dict.fromkeys(GAPS, 0), [], []
    for _ in range(STUDIES):
        rows = study(generator, seeds, errors)
        found = recipes.gaps(rows)
        for name, gap in GAPS.items():
            hits[name] += abs(found[name].mean - gap) <= found[name].half_width
        widths.append(found["recipe 0"].half_width)
        of_student.append(difference(rows["recipe 0"], rows[BASE]).half_width)
    return {name: hit / STUDIES for name, hit in hits.items()}, sum(widths) / sum(of_student)


@pytest.mark.parametrize(("seeds", "width"), [(5, 0.68), (8, 0.77)])
def test_intervals_have_the_true_gap_in_19_of_20_studies(seeds, width):
    """In 0.955: t of more than 30 degrees of freedom is taken as that of 30."""
    shares, found = covered(seeds, {})
    assert sum(shares.values()) / len(shares) == pytest.approx(0.955, abs=0.012)
    assert min(shares.values()) > 0.93
    assert found == pytest.approx(width, abs=0.02)


def test_a_contender_with_errors_twice_as_large_is_covered_less_often():
    """What column ``std`` is there for."""
    shares, _ = covered(5, {"recipe 3": 0.6})
    assert shares.pop("recipe 3") == pytest.approx(0.8, abs=0.03)
    assert min(shares.values()) > 0.95


def test_the_interval_is_the_formula():
    rows = study(np.random.default_rng(1), 4, {})
    y = {name: 100 * np.log([row["loss"] for row in own]) for name, own in rows.items()}
    pairs = {name: y[name] - (y[BASE] + y[NOISE]) / 2 for name in GAPS}
    # The runs of a seed, each less its contender's mean, around their own mean: the residuals.
    control = np.concatenate([y[BASE], y[NOISE]]).mean()
    means = {name: (control if name in (BASE, NOISE) else y[name].mean()) for name in y}
    rest = np.stack([y[name] - means[name] for name in y])
    s = math.sqrt(((rest - rest.mean(0)) ** 2).sum() / (8 * 3 + 4))
    for name, found in recipes.gaps(rows).items():
        if name != NOISE:
            grown = math.exp(pairs[name].mean() / 100)
            assert found.mean == pytest.approx(100 * (grown - 1))
            assert found.half_width == pytest.approx(grown * 2.048 * s * math.sqrt(1.5 / 4))


def test_the_control_and_gaps_without_one_keep_student_s_interval():
    rows = study(np.random.default_rng(2), 5, {})
    assert recipes.gaps(rows)[NOISE] == difference(rows[NOISE], rows[BASE])
    del rows[NOISE]
    assert recipes.gaps(rows) == {name: difference(rows[name], rows[BASE]) for name in GAPS}
    own = {"unit_bf16": rows[BASE], "unit": rows["recipe 1"]}
    assert recipes.gaps(own)["unit"] == difference(rows["recipe 1"], rows[BASE])


def test_each_base_has_a_fit_of_its_own():
    generator = np.random.default_rng(5)
    rows, unit = study(generator, 5, {}), study(generator, 5, {"recipe 1": 3.0})
    own = {UNIT_BASE: unit[BASE], UNIT_NOISE: unit[NOISE], "unit": unit["recipe 1"]}
    for name, of_name in own.items():
        for row in of_name:
            row["run"]["contender"] = name
    found = recipes.gaps(rows | own)
    assert {name: found[name] for name in GAPS} == {n: recipes.gaps(rows)[n] for n in GAPS}
    assert found["unit"].half_width > 2 * found["recipe 1"].half_width
    assert found[UNIT_NOISE] == difference(own[UNIT_NOISE], own[UNIT_BASE])


def test_runs_that_lack_make_an_interval_wider():
    rows = study(np.random.default_rng(3), 5, {})
    whole = recipes.gaps(rows)
    del rows["recipe 0"][4], rows[BASE][2]
    part = recipes.gaps(rows)
    assert len(part["recipe 0"].values) == 4
    assert part["recipe 0"].half_width > part["recipe 1"].half_width > 0
    assert all(abs(part[name].mean - whole[name].mean) < whole[name].half_width for name in GAPS)


def test_one_seed_has_the_difference_of_base_and_control():
    rows = study(np.random.default_rng(4), 1, {})
    s = 100 * abs(math.log(rows[BASE][0]["loss"] / rows[NOISE][0]["loss"])) / math.sqrt(2)
    found = recipes.gaps(rows)["recipe 0"]
    assert found.half_width == pytest.approx(12.706 * s * math.sqrt(1.5), rel=0.02)


def test_a_contender_of_which_every_run_diverged_misses_the_target():
    runs = {name: {"contender": name, "seed": 0, "steps": 1} for name in (BASE, "mxfp8")}
    rows = [{"run": runs[BASE], "loss": 1.0}, {"run": runs["mxfp8"], "error": "diverged"}]
    _, (target,) = recipes.summary(rows)
    assert (target["layer"], target["met"], "measured" in target) == ("mxfp8", False, False)
