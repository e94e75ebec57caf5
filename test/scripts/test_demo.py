"""The demo trains every recipe in turns, resumes an interrupted run, and reports it."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import demo
from scripts.training import corpus

TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "2"]
TINY += ["--device", "cpu", "--eval-batches", "2"]


def stop_after(steps: int) -> Callable[[], bool]:
    answers = iter([False] * steps + [True])
    return lambda: next(answers)


def test_the_demo_reports_every_recipe(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*TINY, "--data", str(data), "--steps", "5", "--eval-interval", "2"]
    arguments += ["--out-dir", str(tmp_path)]
    assert demo.main(arguments) == 0
    table = capsys.readouterr().out
    report = json.loads((tmp_path / "demo.json").read_text())
    assert [run["recipe"] for run in report["runs"]] == list(demo.RECIPES)
    for key in ("command", "seed", "git_commit", "torch", "machine", "options"):
        assert key in report
    told = {name: report["options"][name] for name in ("device", "compile", "width", "steps")}
    assert told == {"device": "cpu", "compile": False, "width": 32, "steps": 5}
    assert {run["text"] for run in report["runs"]} == {corpus.load(data).digest}
    for run in report["runs"]:
        assert len(run["train_loss"]) == 5
        assert [step for step, _ in run["val_loss"]] == [2, 4, 5]
        cells = f"{run['final_val_loss']:.4f}", f"{run['gap_to_bf16_percent']:+.2f}"
        row = next(line for line in table.splitlines() if line.split()[:1] == [run["recipe"]])
        assert row.split()[1:3] == list(cells)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_demo_resumes_every_recipe(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*TINY, "--data", str(data), "--steps", "5", "--eval-interval", "2"]
    whole, parts = ([*arguments, "--out-dir", str(tmp_path / name)] for name in ("whole", "parts"))
    everyone = len(demo.RECIPES)
    done = 2 * everyone + 3  # two steps of each, two more of the first, one of the second
    stop = stop_after(done)
    monkeypatch.setattr(demo.CtrlC, "__call__", lambda _: stop())
    assert demo.main(parts) == 130
    assert not (tmp_path / "parts" / "demo.json").exists()
    stop = stop_after(5 * everyone - done)  # stops a run that repeats a step
    assert demo.main([*parts, "--resume"]) == 0
    stop = stop_after(5 * everyone)
    assert demo.main(whole) == 0
    reports = [json.loads((tmp_path / d / "demo.json").read_text()) for d in ("parts", "whole")]
    resumed, straight = ([run["train_loss"] for run in report["runs"]] for report in reports)
    assert resumed == straight


def test_over_seeds_the_demo_reports_means_and_spreads(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*TINY, "--data", str(data), "--steps", "2", "--out-dir", str(tmp_path)]
    arguments += ["--recipes", "bf16", "unit_bf16", "unit", "unit", "--seeds", "0", "5", "0"]
    arguments.insert(-4, "bf16+float8_adamw")
    assert demo.main(arguments) == 0
    table = capsys.readouterr().out
    runs = json.loads((tmp_path / "demo.json").read_text())["runs"]
    assert [(run["seed"], run["recipe"]) for run in runs] == [
        (seed, recipe)
        for seed in (0, 5)
        for recipe in ("bf16", "unit_bf16", "unit", "bf16+float8_adamw")
    ]
    losses = {(run["seed"], run["recipe"]): run["final_val_loss"] for run in runs}
    gaps = [100 * (losses[seed, "unit"] / losses[seed, "unit_bf16"] - 1) for seed in (0, 5)]
    assert gaps == pytest.approx([r["gap_to_base_percent"] for r in runs if r["recipe"] == "unit"])
    cell = f"{statistics.mean(gaps):+.2f} ± {statistics.stdev(gaps):.2f}"
    assert cell in next(line for line in table.splitlines() if line.startswith("unit "))
    small, plain = (
        next(run["optimizer_mib"] for run in runs if run["recipe"] == recipe)
        for recipe in ("bf16+float8_adamw", "bf16")
    )
    assert small < 0.5 * plain


def test_a_gap_without_its_base_is_left_open() -> None:
    runs: list[dict] = [{"seed": 0, "processes": 1, "recipe": "unit", "final_val_loss": 2.0}]
    demo.add_gaps(runs)
    assert runs[0]["gap_to_bf16_percent"] is runs[0]["gap_to_base_percent"] is None
    assert runs[0]["gap_to_alone_percent"] is None
    assert demo.cell([None], "{:.2f}", spread=True) == ""
    assert demo.cell([1.0, 2.0], "{:.1f}", spread=False) == "1.5"


def test_runs_of_several_processes_compare_with_each_other_and_with_one_process() -> None:
    losses = {("bf16", 1): 2.0, ("unit", 1): 2.1, ("bf16", 2): 2.2, ("unit", 2): 2.31}
    runs: list[dict] = [
        {"seed": 0, "processes": processes, "recipe": recipe, "final_val_loss": loss}
        for (recipe, processes), loss in losses.items()
    ]
    demo.add_gaps(runs)
    assert [run["gap_to_bf16_percent"] for run in runs] == pytest.approx([0, 5, 0, 5])
    assert [run["gap_to_alone_percent"] for run in runs[:2]] == [None, None]
    assert [run["gap_to_alone_percent"] for run in runs[2:]] == pytest.approx([10, 10])
    for run in runs:
        run |= {"tokens_per_second": 1.0, "saved_for_backward_mib": 1.0, "optimizer_mib": 1}
    assert "gap to 1 process" not in demo.table(runs[:2])
    lines = demo.table(runs).splitlines()
    assert "gap to 1 process" in lines[0]
    assert [line.split("  ")[0] for line in lines[2:]] == ["bf16", "unit", "bf16 x2", "unit x2"]
