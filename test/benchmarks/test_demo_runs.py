"""The demo GPT in `bench_memory`: sizes as its process reports, gaps as a mean over seeds."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import bench_memory as bench
from benchmarks.measuring import demo_runs
from benchmarks.measuring.savers import ALL_TOGETHER


def test_sizes_come_from_a_training_of_that_way():
    row = demo_runs.sizes_of(ALL_TOGETHER, quick=True)
    assert "error" not in row
    assert row["parameters_mib"] == row["gradients_mib"] > 0.25
    assert 0.5 < row["optimizer_mib"] / row["parameters_mib"] < 0.56  # norms keep float32
    assert 0 < row["activations_mib"] < 1
    assert row["peak_rss_mib"] > 100  # an interpreter with torch in it


def test_a_training_that_fails_is_a_row_that_says_why(monkeypatch):
    asked = []

    def fail(command, **_):
        asked.append(command)
        return SimpleNamespace(returncode=1, stderr="Traceback\ntrain_gpt.py: no such thing\n")

    monkeypatch.setattr(subprocess, "run", fail)
    row = demo_runs.sizes_of("tensorwise+saved_activations+O3", quick=False)
    assert row["error"] == "train_gpt.py: no such thing"
    (command,) = asked
    asked_for = command[command.index("--recipe") :]
    assert asked_for[:5] == ["--recipe", "tensorwise", "--saved-activations", "--ms-amp", "O3"]


def test_quality_trains_every_way_from_every_seed(tmp_path):
    file = tmp_path / "out.json"
    argv = ["--quality", "--quick", "--seeds", "0", "5", "--ways", "bf16", "bf16+float8_adamw"]
    bench.main([*argv, "-o", str(file)])  # two steps decide nothing: the status may be either
    written = json.loads(file.read_text())
    assert [(row["layer"], row["seed"]) for row in written["rows"]] == [
        ("bf16", 0),
        ("bf16+float8_adamw", 0),
        ("bf16", 5),
        ("bf16+float8_adamw", 5),
    ]
    base, ours = (row["train_loss"] for row in written["rows"][:2])
    assert len(base) == len(ours) == demo_runs.TINY["steps"]
    assert base[0] == ours[0]  # the same weights and batch; the first update differs
    (target,) = written["targets"]
    gaps = [row["gap_percent"] for row in written["rows"] if "gap_percent" in row]
    assert target["measured"] == pytest.approx(sum(gaps) / 2)


def test_a_gap_is_between_equal_seeds_and_judged_by_its_mean():
    losses = {("bf16", 0): 2.0, ("bf16", 1): 2.2, ("tensorwise", 0): 2.03, ("tensorwise", 1): 2.2}
    losses |= {("rowwise", 0): 2.03, ("rowwise", 1): 2.24}
    rows = [{"layer": way, "seed": seed, "val_loss": x} for (way, seed), x in losses.items()]
    first, second = demo_runs.judge(rows)
    assert [row.get("gap_percent") for row in rows[:3]] == [None, None, pytest.approx(1.5)]
    assert (first["measured"], first["met"]) == (pytest.approx(0.75), "yes")
    assert (second["measured"], second["met"]) == (pytest.approx(1.659, abs=1e-3), "no")
    assert "± 1.06; bf16's seeds ± 6.73" in first["against"]
