"""`bench_bert`: how gaps are computed, and runs of two steps."""

from __future__ import annotations

import json

import pytest
import studies

from benchmarks import bench_bert as bench
from benchmarks.measuring.report import ROOT
from benchmarks.models import bert


def rows_of(losses: dict[tuple[str, str], list[float | None]]) -> list[dict]:
    """A row for each seed; None is a run that diverged."""
    return [
        {"run": {"seed": seed}, "layer": kind, "mode": fmt}
        | ({"error": "diverged"} if loss is None else {"loss": loss})
        for (kind, fmt), own in losses.items()
        for seed, loss in enumerate(own)
    ]


def line_of(rows: list[dict], kind: str, fmt: str) -> dict:
    (line,) = (x for x in bench.lines(rows) if (x["layer"], x["mode"]) == (kind, fmt))
    return line


def test_a_gap_is_in_per_cent_of_the_same_model_and_seed_in_float32():
    rows = rows_of(
        {
            ("base", "fp32"): [2.0, 4.0],
            ("unit", "fp32"): [1.0, 3.0],
            ("unit", "fp8"): [1.01, 3.09],
        }
    )
    assert "gap" not in line_of(rows, "base", "fp32")
    line = line_of(rows[::-1], "unit", "fp8")
    assert line["loss"] == pytest.approx(2.05)
    assert line["gap_percent"] == pytest.approx(2)  # of 1 % and 3 %, not of the mean losses
    # Student's t of one degree of freedom, 12.706, times sqrt(2) / sqrt(2).
    assert line["gap_half_width"] == pytest.approx(12.706)
    assert line["base_gap_percent"] == pytest.approx((-49.5 - 22.75) / 2)
    assert line["gap"] == "+2.00 ± 12.71 %"


@pytest.mark.parametrize(
    ("losses", "met"),
    [([1.9], True), ([2.019], True), ([2.021], False), ([2.0, 2.02], False), ([2.0, None], False)],
)
def test_the_interval_must_end_within_the_target_and_no_run_diverge(losses, met):
    rows = rows_of({("unit", "fp32"): [2.0, 2.0], ("unit", "fp8"): losses})
    (target,) = bench.targets(bench.lines(rows))
    assert (target["mode"], target["met"]) == ("fp8", met)


def test_a_target_of_which_one_seed_has_its_base_is_a_number():
    rows = rows_of({("unit", "fp32"): [2.0], ("unit", "fp8"): [2.01, 2.0]})
    (target,) = bench.targets(bench.lines(rows))
    assert target["measured"] == pytest.approx(0.5) and target["met"]


def test_a_format_of_which_every_run_diverged_misses_the_target():
    rows = rows_of({("unit", "fp32"): [2.0], ("unit", "fp8"): [None]})
    (target,) = bench.targets(bench.lines(rows))
    assert not target["met"] and "measured" not in target


def test_without_float32_to_compare_with_there_is_no_target():
    rows = rows_of({("unit", "fp8"): [1.9], ("base", "fp32"): [2.0]})
    assert bench.targets(bench.lines(rows)) == []


def test_a_file_of_one_seed_is_read():
    rows = json.loads((ROOT / "benchmarks/results/cpu_bert.json").read_text())["rows"]
    of_one = [row for row in rows if row["run"]["seed"] == 0]
    losses = {(row["layer"], row["mode"]): row["loss"] for row in of_one}
    gap = 100 * (losses["base", "fp8"] / losses["base", "fp32"] - 1)
    assert line_of(of_one, "base", "fp8")["gap"] == f"{gap:+.2f} %"


def test_every_model_is_trained_in_every_format(tmp_path, monkeypatch):
    studies.made_here(monkeypatch)
    file, data = tmp_path / "out.json", ["--data", str(ROOT / "benchmarks")]
    quick = ["--device", "cpu", "--quick", "--jobs", "1", "--seeds", "3", *data, "-o", str(file)]
    assert bench.main(quick) == 0
    written = json.loads(file.read_text())
    rows = {(row["layer"], row["mode"]): row for row in written["rows"]}
    assert set(rows) == {(kind, fmt) for kind in bert.KINDS for fmt in bert.FORMATS}
    assert all(len(row["train_loss"]) == bench.QUICK["steps"] for row in rows.values())
    assert {row["run"]["seed"] for row in rows.values()} == {3}
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
