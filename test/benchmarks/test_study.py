"""A study's file: it is continued, keeps what ended, and is not mixed with another."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from dataclasses import replace

import processes
import pytest
from quality_program import Run, train

from benchmarks.measuring import report
from benchmarks.quality import study

COLUMNS = {"layer": ("contender", "")}
GOOD = {"run": {"contender": "good", "seed": 0, "steps": 7}, "loss": 2.0}


def options(path, *more: str) -> argparse.Namespace:
    return study.parser("", 1).parse_args(
        ["--device", "cpu", "--jobs", "2", "-o", str(path), *more]
    )


def summary(rows):
    return [{"layer": row["run"]["contender"]} for row in rows], []


@pytest.fixture(autouse=True)
def fast_processes(monkeypatch):
    """Forked from a process that has imported torch, not spawned: a tenth of the time."""
    monkeypatch.setattr(study, "get_context", lambda _: processes.forkserver())


def make(path, runs, *more: str, summary=summary):
    return study.make("bench_x", [], options(path, *more), runs, train, summary, COLUMNS)


def test_failed_runs_leave_the_others_and_the_next_call_makes_them_again(tmp_path, capsys):
    path = tmp_path / "new" / "x.json"
    good = [Run("good", 0), Run("good", 1)]
    with pytest.raises(SystemExit, match="3 runs failed"):
        make(path, [good[0], Run("raises", 0), Run("dies", 0), Run("nan", 0), good[1]])
    said = capsys.readouterr().out
    for reason in ("RuntimeError: no such layer", "its process died", "not JSON compliant"):
        assert reason in said
    rows = json.loads(path.read_text())["rows"]
    assert sorted(row["run"]["seed"] for row in rows) == [0, 1]
    assert all(row["run"]["contender"] == "good" and row["threads"] == 1 for row in rows)
    assert len({os.getpid(), *(row["process"] for row in rows)}) == 3

    rows = make(path, [*good, Run("good", 2)])
    assert "2 of 3 runs are there, 1 to make" in capsys.readouterr().out
    assert sorted(row["loss"] for row in rows) == [2.0, 3.0, 4.0]
    assert json.loads(path.read_text())["table"][2:] == ["good"] * 3


def test_rows_stand_in_the_order_of_the_runs_and_those_of_other_calls_before_them(tmp_path):
    path = tmp_path / "x.json"
    make(path, [Run("good", 9)])
    make(path, [Run("good", 2), Run("good", 3)])
    rows = make(path, [Run("good", 3), Run("good", 1), Run("good", 2)])
    assert [row["run"]["seed"] for row in rows] == [9, 3, 1, 2]
    assert json.loads(path.read_text())["rows"] == rows


def test_a_row_says_which_machine_made_it(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    for seed, machine in enumerate(("one", "another")):
        monkeypatch.setattr(report, "cpu_model", lambda machine=machine: machine)
        make(path, [Run("good", seed)])
    found = json.loads(path.read_text())
    assert [row["device"] for row in found["rows"]] == ["one", "another"]
    assert found["environment"]["device"] == "another"


def test_ctrl_c_ends_processes_and_keeps_what_was_written(tmp_path):
    path, calls = tmp_path / "x.json", []

    def interrupted_at_the_second(rows):
        calls.append(len(rows))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return summary(rows)

    runs = [Run("good", 0), Run("sleeps", 0), Run("good", 1)]
    with pytest.raises(SystemExit, match="interrupted"):
        make(path, runs, summary=interrupted_at_the_second)
    assert [row["loss"] for row in json.loads(path.read_text())["rows"]] == [2.0]
    for process in multiprocessing.active_children():
        process.join(10)
        assert process.exitcode is not None  # it slept, and was ended


def test_no_run_begins_when_it_is_late(tmp_path, monkeypatch):
    monkeypatch.setattr(study.harness, "countdown", lambda seconds: lambda: True)
    assert make(tmp_path / "x.json", [Run("good", 0)], "--stop-after", "1") == []


def test_a_changed_field_is_another_run_and_equal_ones_are_made_once():
    run = Run("a", 0)
    rows = [{"run": {"steps": 7, "seed": 0, "contender": "a"}, "loss": 1.0}]  # in another order
    assert study.missing([run, run], rows) == []
    changed = [replace(run, steps=8), replace(run, seed=1), replace(run, contender="b")]
    assert study.missing([run, *changed, changed[0]], rows) == changed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({"benchmark": "bench_y", "options": {}}, "is a file of bench_y"),
        ({"benchmark": "bench_x", "options": {"data": "/other"}}, "--data /other, not None"),
        ({"benchmark": "bench_x", "options": {"device": "cuda"}}, "--device cuda, not cpu"),
        ('{"benchmark": ', "is no JSON"),
        ('{"benchmark": "bench_x"}', "has no list of rows"),
        ({"benchmark": "bench_x", "rows": [GOOD, {"loss": 1.0}]}, r"rows\[1\] of .* lacks its run"),
        ({"benchmark": "bench_x", "rows": [1]}, r"rows\[0\] of .* lacks its run"),
        ({"benchmark": "bench_x", "rows": [{"run": {}}]}, r"rows\[0\] of .* both loss and error"),
        (
            {"benchmark": "bench_x", "rows": [{"run": {"seed": 0}, "loss": 1.0}]},
            r"rows\[0\] of .*x.json has the run \{'seed': 0\}, whose fields are not those of",
        ),
    ],
)
def test_a_file_that_is_not_this_study_s_is_refused_and_kept(tmp_path, text, reason):
    path = tmp_path / "x.json"
    path.write_text(text if isinstance(text, str) else json.dumps({"rows": []} | text))
    before = path.read_text()
    with pytest.raises(SystemExit, match=reason):
        make(path, [Run("good", 0)])
    assert path.read_text() == before


def test_quick_changes_defaults_and_leaves_what_is_given():
    def parsed(*argv):
        parser = study.parser("", 1)
        study.add_numbers(parser, steps=(90, "of a run"), held_out=(80, "bytes"))
        return study.parse(parser, argv, {"steps": 2, "held_out": 3})

    assert (parsed().steps, parsed().held_out) == (90, 80)
    assert (parsed("--quick").steps, parsed("--quick").held_out) == (2, 3)
    assert (parsed("--quick", "--held-out", "7").held_out, parsed("--quick").steps) == (7, 2)
