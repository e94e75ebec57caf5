"""`bench_other_models`: which runs it makes, what it compares with what, and runs of four steps."""

from __future__ import annotations

import json

import pytest
import studies
import torch

from benchmarks import bench_other_models as bench
from benchmarks.quality import other_models
from benchmarks.quality.other_models import Run, train
from float8.config import RECIPES
from float8.linear.delayed import DelayedCast
from scripts.training import corpus

SMALL = {"steps": 4, "layers": 1, "width": 32, "batch": 3, "held_out": 5, "learning_rate": 1e-3}


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    """Some text; to read torch's own takes seconds."""
    text = torch.randint(256, (5000,), dtype=torch.uint8)
    known = corpus.Corpus(text[:4000], text[4000:], (), ())
    monkeypatch.setattr(corpus, "torch_sources", lambda: known)


def row_of(contender, seed, loss, overflow=False, half="fp16", **rest):
    run = {"contender": contender, "seed": seed, "overflow": overflow, "half": half}
    return {"run": run, "loss": loss, "accuracy": 10 * loss, **rest}


def test_every_scaled_recipe_is_in_every_study():
    assert set(bench.RECIPES) == set(RECIPES) - {"unit"}
    for name in bench.STUDIES:
        made = bench.runs(bench.parse(["--study", name]))
        assert {run.contender for run in made} == set(bench.CONTENDERS)
        assert len(made) == len(set(made)) == 5 * (8 + 7 * (name == "fp16"))


def test_a_run_is_compared_with_its_base_and_one_with_overflows_with_itself_without():
    losses = {"plain": 2.0, "delayed": 2.02}
    rows = [row_of(name, seed, loss) for name, loss in losses.items() for seed in (0, 1)]
    rows += [row_of("delayed", seed, 2.02 * (1.1 + seed / 10), overflow=True) for seed in (0, 1)]
    rows += [row_of("plain", 0, 2.0, overflow=True)]
    lines, targets = bench.summary(rows)
    found = {line["layer"]: line for line in lines}
    assert "gap" not in found["fp16"]
    assert found["fp16 delayed"]["gap"] == "+1.00 ± 0.00 %"
    assert found["fp16 delayed"]["points"] == "+0.20 ± 0.00"
    assert found["fp16 delayed + overflow"]["gap"].startswith("+15.00 ±")
    assert found["fp16 + overflow"]["gap"] == "+0.00 %"
    # An interval of one seed is infinite and has no target.
    assert {target["layer"]: target["against"] for target in targets} == {
        "fp16 delayed": "fp16",
        "fp16 delayed + overflow": "fp16 delayed",
    }


@pytest.mark.parametrize(
    ("accuracies", "met"),
    [
        ((50.2, 50.3), True),
        ((52.0, 52.1), False),  # better by so much is a fault as well
        ((51.0, 49.0), False),  # not certain: 0 +- 13
        ((50.2, 50.3, None), False),  # a run failed
        ((None,), False),  # all did
    ],
)
def test_the_target_is_an_interval_within_the_limit(accuracies, met):
    rows = [row_of("plain", seed, 2.0) | {"accuracy": 50.0} for seed in range(3)]
    for seed, accuracy in enumerate(accuracies):
        row = row_of("mxfp8", seed, 2.0) | {"accuracy": accuracy}
        rows.append({"run": row["run"], "error": "diverged"} if accuracy is None else row)
    (target,) = bench.summary(rows)[1]
    assert target["met"] is met


def test_the_command_trains_compares_and_continues(tmp_path, capsys, monkeypatch):
    # A process for each run takes seconds to start; the studies' own tests have that.
    studies.made_here(monkeypatch)
    file = tmp_path / "out.json"
    arguments = ["--study", "vit", "--quick", "--seeds", "0", "--contenders", "plain", "mxfp8"]
    assert bench.main([*arguments, "--device", "cpu", "-o", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["run"]["contender"] for row in rows} == {"plain", "mxfp8"}
    assert rows[0]["loss"] != rows[1]["loss"]
    assert bench.main([*arguments, "--device", "cpu", "-o", str(file)]) == 0
    assert "2 of 2 runs are there" in capsys.readouterr().out


def test_text_that_no_study_reads_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--study", "vit", "--data", "."])
    assert "--data has no effect here" in capsys.readouterr().err


# --- runs


def run_of(**fields):
    return Run(**({"task": "encoder", "half": "fp16", "seed": 0} | SMALL | fields))


@pytest.mark.parametrize("task", ["vit", "encoder"])
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_contenders_start_alike_and_end_apart(task, half):
    rows = [
        train(run_of(task=task, half=half, contender=name))
        for name in ("plain", "rounded", "tensorwise")
    ]
    losses = [row["loss"] for row in rows]
    assert len(set(losses)) == 3
    assert losses == pytest.approx([losses[0]] * 3, rel=0.02)
    assert all(("loss_scale" in row) is (half == "fp16") for row in rows)


@pytest.mark.parametrize("recipe", ["plain", "delayed"])
def test_an_overflow_is_skipped_until_gradients_are_finite_again(recipe):
    without = train(run_of(contender=recipe))
    after = train(run_of(contender=recipe, overflow=True))
    assert without["skipped"] == 0
    assert after["skipped"] > 20
    assert after["loss"] == pytest.approx(without["loss"], rel=1e-3)


def test_a_run_that_always_overflows_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(other_models, "MOST_SKIPPED", 5)
    row = train(run_of(contender="plain", overflow=True))
    assert row == {"error": "the scaler skipped 6 steps until step 0", "skipped": 6}


def test_a_scale_that_is_not_finite_ends_the_run(monkeypatch):
    """Planted: delayed scales that follow an infinite amax."""

    def infinite(model):
        for module in model.modules():
            if isinstance(module, DelayedCast):
                module.scale.fill_(torch.inf)

    monkeypatch.setattr(other_models, "after_step", infinite)
    row = train(run_of(contender="delayed", overflow=True))
    assert "scale is not finite at step 0" in row["error"]
