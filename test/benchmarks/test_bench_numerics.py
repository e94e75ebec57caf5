"""`bench_numerics`: its command line, on a small model."""

from __future__ import annotations

import json
from statistics import median

from benchmarks import bench_numerics

TINY = {"layers": 1, "width": 32, "heads": 2, "context": 16, "batch": 2, "steps": 1}


def test_watched_trainings_take_turns_with_one_that_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench_numerics.SIZES, "tiny", TINY)
    monkeypatch.setattr("benchmarks.measuring.harness.TARGET_S", 1e-4)
    file = tmp_path / "out.json"
    options = ["--recipes", "delayed", "--size", "tiny", "-n", "2", "--repeats", "3"]
    assert bench_numerics.main([*options, "--device", "cpu", "-o", str(file)]) == 0
    found = json.loads(file.read_text())
    assert (found["options"]["batch"], found["options"]["n"]) == ("8", "2")
    rows = {row["watched"]: row for row in found["rows"]}
    assert list(rows) == ["none", "every 2", "each step"]
    for row in rows.values():
        both = zip(row["samples_s"], rows["none"]["samples_s"], strict=True)
        assert row["ratio"] == median(mine / other for mine, other in both)
    # Four linear layers of a block (q, k and v are one, gate and up too), three operands each.
    assert rows["each step"]["casts"] == rows["every 2"]["casts"] == 12
    (target,) = found["targets"]
    assert target["measured"] == rows["every 2"]["ratio"]
    assert target["met"] == (target["measured"] <= 1.05)
    assert "each step" in capsys.readouterr().out
