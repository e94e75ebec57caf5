"""`bench_alarms`: every planted fault is found in time, at small sizes; its table and targets."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import bench_alarms
from benchmarks.quality.watched import FAULTS, HEALTHY, Training, watch

AT_ONCE = {"saturates": 1, "outgrows": 1}  # more than 10 % saturate


def runs(*argv):
    return bench_alarms.runs_of(bench_alarms.parse(["--quick", *argv]))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_within_the_looks_of_its_rule(fault):
    (run,) = runs("--recipes", "--faults", fault)
    row = watch(run)
    (line,) = bench_alarms.lines([{"run": vars(run), **row}])
    assert line["false_alarms"] == 0
    assert (line["missed"], line["looks_until"]) == (0, AT_ONCE.get(fault, line["allowed"]))
    assert all(target["met"] for target in bench_alarms.targets([line]))


@pytest.mark.parametrize("recipe", ["delayed", "unit"])
def test_a_healthy_training_has_no_alarm(recipe):
    (run,) = runs("--faults", "--recipes", recipe)
    row = watch(run)
    assert (run.fault, row["alarms"], row["looks"]) == (HEALTHY, 0, 2)


def test_a_training_without_a_finite_loss_is_an_error_that_a_file_keeps(monkeypatch):
    monkeypatch.setattr(Training, "step", lambda *_: math.nan)
    (run,) = runs("--faults", "--recipes", "tensorwise")
    row = watch(run)
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert row["error"] == "no loss is finite"
    assert "loss" not in row


def test_false_and_missing_alarms_miss_the_target():
    (healthy,) = runs("--faults", "--recipes", "tensorwise")
    (faulty,) = runs("--recipes", "--faults", "inf")
    rows = [
        {"run": vars(healthy), "looks": 30, "alarms": 1},
        {"run": vars(faulty), "looks": 4, "alarms": 0, "early": 0},
        {"run": {**vars(faulty), "seed": 1}, "looks": 4, "alarms": 1, "early": 0, "looks_until": 1},
    ]
    found, targets = bench_alarms.summary(rows)
    assert [line["runs"] for line in found] == [1, 2]
    assert [line.get("missed") for line in found] == [None, 1]
    assert [target["met"] for target in targets] == [False, True, False]


def test_every_recipe_and_every_fault_is_a_run():
    options = bench_alarms.parse(["--seeds", "0", "1"])
    made = bench_alarms.runs_of(options)
    assert len(made) == len(set(made)) == 2 * (len(bench_alarms.RECIPES) + len(FAULTS))
    assert {run.steps for run in made if run.fault == HEALTHY} == {300}
