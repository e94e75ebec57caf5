"""`bench_bert`: how gaps are computed, and a run of two steps."""

from __future__ import annotations

import json

import pytest

from benchmarks import bench_bert as bench
from benchmarks.models import bert


def rows_of(losses: dict[tuple[str, str], float]) -> list[dict]:
    return [{"layer": kind, "mode": fmt, "val_loss": loss} for (kind, fmt), loss in losses.items()]


def test_a_gap_is_in_per_cent_of_the_same_model_in_float32():
    rows = rows_of({("base", "fp32"): 2.0, ("unit", "fp32"): 1.9, ("unit", "fp8"): 1.938})
    targets = bench.compare(rows)
    assert "gap_percent" not in rows[0]
    assert rows[1]["base_gap_percent"] == pytest.approx(-5)
    assert rows[2]["gap_percent"] == pytest.approx(2)
    assert rows[2]["base_gap_percent"] == pytest.approx(-3.1)
    assert [(t["mode"], t["met"]) for t in targets] == [("fp8", False)]


def test_a_lower_loss_than_in_float32_meets_the_target():
    rows = rows_of({("unit", "fp32"): 2.0, ("unit", "fp16"): 1.9, ("unit", "fp8"): 2.019})
    assert [(t["mode"], t["met"]) for t in bench.compare(rows)] == [("fp16", True), ("fp8", True)]


def test_a_run_that_diverged_does_not_meet_the_target():
    rows = rows_of({("unit", "fp32"): 2.0})
    rows.append({"layer": "unit", "mode": "fp8", "error": "diverged"})
    (target,) = bench.compare(rows)
    assert not target["met"]
    assert "measured" not in target


def test_without_float32_to_compare_with_there_is_no_target():
    assert bench.compare(rows_of({("unit", "fp8"): 1.9, ("base", "fp32"): 2.0})) == []


def test_every_model_is_trained_in_every_format(tmp_path):
    file = tmp_path / "out.json"
    assert bench.main(["--device", "cpu", "--quick", "-o", str(file)]) == 0
    written = json.loads(file.read_text())
    rows = {(row["layer"], row["mode"]): row for row in written["rows"]}
    assert set(rows) == {(kind, fmt) for kind in bert.KINDS for fmt in bert.FORMATS}
    assert all(len(row["train_loss"]) == bench.QUICK["steps"] for row in rows.values())
    for kind in bert.KINDS:  # the first loss differs by the format's rounding alone
        first = [rows[kind, fmt]["train_loss"][0] for fmt in bert.FORMATS]
        assert first == pytest.approx([first[0]] * 3, rel=0.02)
        assert len(set(first)) == 3, "a format changed nothing"
    assert {target["mode"] for target in written["targets"]} == {"fp16", "fp8"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "48"], "--width must be a multiple of 32"),
        (["--batch", "3", "--context", "10"], "must be a multiple of 16"),
    ],
)
def test_sizes_that_cannot_run_are_refused_before_anything_is_trained(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err
