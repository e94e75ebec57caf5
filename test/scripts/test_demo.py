"""The demo trains every recipe in turns, resumes an interrupted run, and reports it."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")

from benchmarks.models import text as texts
from scripts import demo, train_gpt
from scripts.training import curves

TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "2"]
TINY += ["--device", "cpu", "--eval-batches", "2", "--eval-interval", "2"]


def stop_after(steps: int) -> Callable[[], bool]:
    answers = iter([False] * steps + [True])
    return lambda: next(answers)


def test_an_interrupted_demo_resumes_every_recipe_and_reports_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*TINY, "--data", str(data), "--steps", "5"]
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
    capsys.readouterr()
    assert demo.main(whole) == 0
    resumed, report = (
        json.loads((tmp_path / name / "demo.json").read_text()) for name in ("parts", "whole")
    )
    assert [r["train_loss"] for r in resumed["runs"]] == [r["train_loss"] for r in report["runs"]]

    table, progress = capsys.readouterr()
    assert f"{5 * everyone}/{5 * everyone}" in progress
    assert progress.count(" 0%|") == 1  # one bar, which starts once
    assert [line.partition(":")[0] for line in table.splitlines()[-3:]] == [
        "naive",
        "noise",
        "next",
    ]
    assert [run["recipe"] for run in report["runs"]] == list(demo.RECIPES)
    assert {"command", "seed", "git_commit", "torch", "machine", "options"} <= report.keys()
    told = {name: report["options"][name] for name in ("device", "compile", "width", "steps")}
    assert told == {"device": "cpu", "compile": False, "width": 32, "steps": 5}
    assert {run["text"] for run in report["runs"]} == {texts.load(data).digest}
    for run in report["runs"]:
        assert [step for step, _ in run["val_loss"]] == [2, 4, 5]
        row = next(line for line in table.splitlines() if line.split()[:1] == [run["recipe"]])
        cells = [f"{run['final_val_loss']:.4f}", f"{run['gap_to_bf16_percent']:+.2f}"]
        assert row.split()[1:3] == cells
    assert (tmp_path / "whole" / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("step_s", "steps"), [(5.0, 16), (10.0, 8), (1000.0, 1)])
def test_it_takes_as_long_on_any_machine(
    step_s: float, steps: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Two recipes, and validations of 2 / 3 of a step after every second one, in 220 seconds."""
    ticks = itertools.count(0.0, step_s)  # the clock is read before and after each step
    monkeypatch.setattr(train_gpt, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    arguments = [*TINY, "--data", str(data), "--out-dir", str(tmp_path)]
    arguments += ["--recipes", "bf16", "tensorwise"]
    assert demo.main(arguments) == 0
    report = json.loads((tmp_path / "demo.json").read_text())
    assert [len(run["train_loss"]) for run in report["runs"]] == [steps, steps]
    assert report["options"]["steps"] == steps
    assert f"{steps} steps of each recipe" in capsys.readouterr().out
    monkeypatch.setattr(demo.CtrlC, "__call__", lambda _: True)
    assert demo.main(arguments) == 130
    assert f"same command and --resume --steps {steps}\n" in capsys.readouterr().out


LOSSES = {
    ("bf16", 1): 2.0,
    ("unit", 1): 2.1,
    ("naive", 1): 3.0,
    ("bf16", 2): 2.2,
    ("unit", 2): 2.31,
}
RUNS = [
    {
        "recipe": recipe, "processes": processes, "seed": seed, "final_val_loss": loss + seed,
        "train_loss": [4.0, 3.0, loss], "val_loss": [(2, loss + 1), (3, loss + seed)],
        "tokens_per_second": 1.0, "saved_for_backward_mib": 1.0, "optimizer_mib": 1,
    }
    for (recipe, processes), loss in {**LOSSES, ("unit_bf16", 1): 2.0}.items()
    for seed in (0, 1)
]  # fmt: skip


def test_gaps_are_to_runs_of_the_same_seed_and_of_as_many_processes() -> None:
    demo.add_gaps(RUNS)
    gaps = {
        (run["recipe"], run["processes"]): [
            run[f"gap_to_{name}_percent"] for name in ("bf16", "base", "alone")
        ]
        for run in RUNS
        if run["seed"] == 0
    }
    assert gaps["unit", 1] == [pytest.approx(5), pytest.approx(5), None]
    assert gaps["unit", 2] == [pytest.approx(5), None, pytest.approx(10)]  # no unit_bf16 x2
    assert "gap to 1 process" not in demo.table(RUNS[:4], "cpu")
    header, _, *rows = demo.table(RUNS, "cpu").splitlines()
    assert "gap to 1 process" in header
    assert "tokens/s" not in header  # of emulated products
    assert "tokens/s" in demo.table(RUNS, "cuda:0")
    names = [*("bf16", "unit", "naive", "bf16 x2", "unit x2", "unit_bf16")]
    assert [line.split("  ")[0] for line in rows] == names
    steps, (first, second) = curves.gaps_of(RUNS)["unit"]
    assert steps == [2, 3]
    assert first == pytest.approx([100 * (3.1 / 3 - 1), 5]) and len(second) == 2


def test_the_noise_is_the_mean_distance_of_the_control_from_bf16_over_the_seeds() -> None:
    losses = {("bf16", 0): 2.0, ("bf16_rounded", 0): 2.02, ("bf16", 1): 2.0}
    losses[("bf16_rounded", 1)] = 1.94
    runs: list[dict] = [
        {"recipe": recipe, "processes": 1, "seed": seed, "final_val_loss": loss}
        for (recipe, seed), loss in losses.items()
    ]
    demo.add_gaps(runs)
    noise, after = demo.remarks(runs).splitlines()
    assert "2.00 % from bf16 in the mean of 2 pairs" in noise
    assert demo.remarks(runs[:1]) == after  # without a control, and without naive


def test_every_run_has_a_line_and_what_ends_far_above_leaves_the_panel() -> None:
    left, right = curves.draw(RUNS).axes
    assert [line.get_label() for line in left.get_lines()] == list(curves.losses_of(RUNS))
    assert len(curves.draw(RUNS[:2]).axes) == 1  # no base, no gaps
    assert 5 < right.get_ylim()[1] < 20  # naive is 50 % above
    assert curves.smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
