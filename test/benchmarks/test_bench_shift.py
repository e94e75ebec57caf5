"""`bench_shift`: what is planted, what is measured around it, and what the table says."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import studies
import torch
from torch import nn

from benchmarks import bench_shift as bench
from benchmarks.quality import configs, shifts
from benchmarks.quality import run as quality_run
from benchmarks.quality.configs import CONFIGS, DEFAULT, GRADIENTS, GRID, name_of
from benchmarks.quality.contenders import contender
from benchmarks.quality.shifted_run import ShiftedRun, train
from float8 import DelayedScalingConfig, ScalingType
from float8.config import RECIPES
from float8.linear.delayed import DelayedCast
from scripts.train_gpt import BETAS, CLIP, WEIGHT_DECAY
from scripts.training import corpus, gpt

SMALL = {key: value for key, value in bench.QUICK.items() if key != "held_out"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return studies.write_text(tmp_path_factory.mktemp("text"))


def small_model(seed: int = 0) -> gpt.GPT:
    torch.manual_seed(seed)
    return gpt.GPT(gpt.Sizes(1, 32, 1, 16))


def small_run(**fields) -> ShiftedRun:
    known = {"contender": DEFAULT, "shift": shifts.GROWN, "seed": 0, "before": 5, "after": 4}
    return ShiftedRun(**{**bench.QUICK, **known, **fields})


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    pair = torch.randint(256, (2, 3, 16), generator=torch.Generator().manual_seed(seed))
    return pair[0], pair[1]


def gradients(model: nn.Module, pair) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*pair)
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters()]


# --- the changes


def test_a_restart_jumps_from_near_zero_above_the_peak():
    rates = [shifts.rate(shifts.RESTARTED, step, 56, 80) for step in range(80)]
    assert rates[:8] == [(step + 1) / 8 for step in range(8)]
    assert rates[55] == pytest.approx(1 / 48)  # of 48 steps after the warm-up
    assert rates[56:] == [4.0] * 24


@pytest.mark.parametrize("shift", [shifts.START, shifts.ALPHABET, shifts.GROWN])
def test_other_changes_leave_the_rate_at_its_peak(shift):
    assert [shifts.rate(shift, step, 10, 20) for step in (0, 7, 9, 10, 19)] == [1 / 8, 1, 1, 1, 1]


def test_without_a_change_the_rate_falls_to_zero():
    for step in (0, 3, 99, 159):
        assert shifts.rate(shifts.NONE, step, 0, 160) == quality_run.schedule(step, 160)


def test_the_other_alphabet_shares_no_byte_with_the_text():
    text = torch.arange(128)
    tokens, targets = shifts.text_of(shifts.ALPHABET, True, (text, text + 128))
    assert tokens.tolist() == list(range(128, 256))
    assert targets.tolist() == list(range(128))
    for shift, changed in ((shifts.ALPHABET, False), (shifts.GROWN, True)):
        assert shifts.text_of(shift, changed, (text, text)) == (text, text)


@pytest.mark.parametrize("name", ["bf16", "tensorwise"])
def test_growth_changes_no_bit_of_bf16_and_of_dynamic_scales(name):
    plain, grown = (contender(name, small_model()).model for _ in range(2))
    factor = shifts.factor_in(shifts.GROWN, grown)
    factor.value = shifts.GROWTH
    seen = []
    grown.blocks[0].attention.qkv.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    loss, expected = gradients(plain, batch())
    same, found = gradients(grown, batch())
    assert loss == same
    for (parameter, _), a, b in zip(plain.named_parameters(), expected, found, strict=True):
        assert torch.equal(a, b), parameter
    with torch.autocast("cpu", torch.bfloat16):
        norm = grown.blocks[0].attention_norm(grown.embedding(batch()[0]))
    assert torch.equal(seen[0], shifts.GROWTH * norm)  # what the layer reads did grow


def test_a_growth_that_is_no_power_of_two_would_change_bits():
    """Or the test above could not see a change."""
    plain, grown = small_model(), small_model()
    shifts.factor_in(shifts.GROWN, grown).value = 3.0
    assert gradients(plain, batch())[0] != gradients(grown, batch())[0]


def test_only_growth_adds_hooks():
    for shift in (*shifts.SHIFTS, shifts.NONE):
        model = small_model()
        assert (shifts.factor_in(shift, model) is not None) == (shift == shifts.GROWN)
        assert not model.head._forward_pre_hooks


# --- the contenders


def test_variants_are_the_recipe_with_one_setting_changed():
    recipe = RECIPES["delayed"]
    of_all = {name: down for name, (down, others) in CONFIGS.items() if down == others}
    assert of_all[DEFAULT] == recipe
    for name in GRID:
        assert replace(of_all[name], delayed_scaling=DelayedScalingConfig()) == recipe
    settings = [of_all[name].delayed_scaling for name in GRID]
    assert [(each.history_len, each.margin) for each in settings] == [
        (history, margin) for history in (1, 16, 1024) for margin in (0, 1, 2)
    ]
    kinds = [cast.scaling_type for cast in of_all[GRADIENTS].operand_casts]
    assert kinds == [ScalingType.DELAYED, ScalingType.DELAYED, ScalingType.DYNAMIC]
    assert of_all["margin 4"].delayed_scaling == DelayedScalingConfig(margin=4)


def test_late_scales_stay_dynamic_for_so_many_steps(monkeypatch):
    monkeypatch.setattr(configs, "LATE", 3)
    what = contender("late", small_model())
    casts = [module for module in what.model.modules() if isinstance(module, DelayedCast)]
    for _ in range(3):
        assert not any(cast.history_ready for cast in casts)
        gradients(what.model, batch())
        what.after_step()
    gradients(what.model, batch())
    what.after_step()
    assert all(cast.history_ready for cast in casts)


# --- what is measured


def by_hand(run: ShiftedRun, folder: Path, watched: int) -> tuple[list[float], float, float]:
    """Losses of a plain training loop; loss and gradient error of one of its steps, from copies."""
    text = corpus.load(folder)
    what = contender(run.contender, small_model(run.seed))
    matrices = [p for p in what.model.parameters() if p.ndim >= 2]
    others = [p for p in what.model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 2e-3, BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    losses = []
    for step in range(run.before + run.after):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 8)
        pair = text.batch(step, seed=run.seed, batch=run.batch, context=run.context)
        plain = small_model()
        plain.load_state_dict(copy.deepcopy(what.model.state_dict()), strict=False)
        loss, own = gradients(what.model, pair)
        if step == watched:
            in_bf16, expected = gradients(plain, pair)
            of_blocks = ["blocks" in n and p.ndim >= 2 for n, p in plain.named_parameters()]
            a, b = (
                torch.cat([g.flatten() for g, used in zip(part, of_blocks, strict=True) if used])
                for part in (own, expected)
            )
            errors = 100 * (loss / in_bf16 - 1), 100 * ((a - b).norm() / b.norm()).item()
        losses.append(loss)
        nn.utils.clip_grad_norm_(what.model.parameters(), CLIP)
        optimizer.step()
        what.after_step()
    return losses, *errors


@pytest.mark.parametrize("name", ["history 1", "tensorwise"])
def test_a_watched_training_is_the_plain_one_and_its_errors_are_those_by_hand(name, folder):
    run = small_run(contender=name, shift=shifts.START, before=0, after=7)
    found = train(run, folder)["steps"]
    losses, loss_error, gradient_error = by_hand(run, folder, watched=4)
    assert [step["loss"] for step in found] == losses
    assert found[4]["loss_error"] == pytest.approx(loss_error)
    assert found[4]["gradient_error"] == pytest.approx(gradient_error, rel=1e-4)
    assert found[4]["gradient_error"] > 1


def test_growth_saturates_the_first_step_and_a_margin_of_its_size_prevents_it(folder):
    rows = {
        name: train(small_run(contender=name), folder)["steps"]
        for name in (DEFAULT, name_of(16, 2), "tensorwise")
    }
    before, first = (next(s for s in rows[DEFAULT] if s["step"] == step) for step in (-1, 0))
    assert before["saturated"]["input"] < 0.01
    assert first["saturated"]["input"] > 0.2
    assert first["problems"].keys() >= {"saturates", "has a stale scale"}
    assert 1.5 < first["stale"][1] < 2.5  # octaves
    assert first["gradient_error"] > 2 * before["gradient_error"]
    for name in (name_of(16, 2), "tensorwise"):
        assert all(step["saturated"]["input"] < 0.001 for step in rows[name]), name
    assert [step["step"] for step in rows[DEFAULT]] == list(range(-4, 4))


def test_a_loss_that_is_not_finite_ends_a_run(monkeypatch, folder):
    monkeypatch.setattr(shifts, "rate", lambda *_: float("nan"))
    assert "at step -4" in train(small_run(contender="bf16"), folder)["error"]


# --- the table


def row_of(contender: str, losses: list[float], seed: int = 0, **step) -> dict:
    steps = [{"step": i - 1, "loss": loss, **step} for i, loss in enumerate([9.0, *losses])]
    fields = {"contender": contender, "shift": shifts.GROWN, "seed": seed}
    return {"run": fields, "steps": steps, "loss": 1.0}


def test_lines_count_saturated_steps_from_the_change_on():
    quiet = {"saturated": {"input": 1e-4, "weight": 0.0}, "problems": {}, "gradient_error": 5.0}
    row = row_of("history 1", [2.0] * 10, **quiet, loss_error=0.0)
    for step in row["steps"][:4]:  # one of them before the change
        step |= {"problems": {"saturates": 2}, "gradient_error": 21.0, "loss_error": 3.0}
        step["saturated"] = {"input": 0.5, "weight": 0.0}
    other = row_of("history 1", [2.0] * 10, seed=1, **quiet, loss_error=0.0)
    (line,) = bench.lines([row, other])
    assert (line["seeds"], line["saturated_steps"], line["last_saturated"]) == (2, 1.5, 2)
    assert line["worst"] == "input 25 %"
    assert line["problems"] == "saturates"
    assert line["loss_error"] == 1.5
    assert line["gradient_error"] == pytest.approx((21**3 * 5**13) ** (1 / 16))
    assert line["later_error"] == pytest.approx(5.0)


def test_bumps_are_paired_differences_to_bf16():
    rows = [row_of("bf16", [2.0] * 8 + [1.0] * 2, seed) for seed in (0, 1)]
    rows += [
        row_of("bf16 rounded", [2.1] * 8 + [1.0] * 2, 0),
        row_of("bf16 rounded", [2.3] * 8 + [1.01] * 2, 1),
    ]
    base, noise = bench.lines(rows)
    assert "bump" not in base
    assert noise["bump_percent"] == pytest.approx(10)
    assert noise["bump_half_width"] == pytest.approx(12.706 * 5)
    assert noise["later_percent"] == pytest.approx(0.5)


def test_a_run_that_diverged_is_counted():
    rows = [row_of("bf16", [2.0] * 3), row_of("history 1", [2.0] * 3)]
    del rows[1]["loss"]
    assert [line["diverged"] for line in bench.lines(rows)] == [0, 1]


def test_the_study_has_every_history_with_every_margin():
    runs = bench.runs_of(bench.parse([]))
    assert len(runs) == len(set(runs)) == 3 * 4 * len(bench.AROUND)
    assert {run.contender for run in runs} >= {*GRID, "bf16", "bf16 rounded", "tensorwise"}
    ends = bench.runs_of(bench.parse(["--shifts", "none", "--seeds", "7"]))
    assert [run.contender for run in ends] == list(bench.ENDS)
    assert {(run.before, run.after, run.seed) for run in ends} == {(0, 160, 7)}


def test_the_gaps_of_whole_trainings_are_paired_by_seed():
    rows = [
        {"run": {"contender": name, "shift": shifts.NONE, "seed": seed}, "loss": loss, **more}
        for name, seed, loss, more in (
            *(("bf16", 0, 2.0, {}), ("bf16", 1, 4.0, {})),
            *(("late", 0, 2.02, {"bf16_loss": 2.0}), ("late", 1, 4.12, {"bf16_loss": 4.08})),
        )
    ]
    base, late = bench.lines(rows)
    assert "gap" not in base
    assert late["gap_percent"] == pytest.approx(2)
    assert late["bf16_gap_percent"] == pytest.approx(1)
    assert late["gap_half_width"] == pytest.approx(12.706)


def test_the_command_writes_a_file_that_it_continues(tmp_path, folder, capsys):
    file = tmp_path / "shift.json"
    argv = ["--quick", "--device", "cpu", "--seeds", "0", "--jobs", "1", "--data", str(folder)]
    argv += ["--shifts", "none", "--contenders", DEFAULT, "-o", str(file)]
    assert bench.main(argv) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["run"]["contender"] == DEFAULT
    assert row["loss"] > 0
    assert row["bf16_loss"] > 0
    assert bench.main(argv) == 0
    assert "1 of 1 runs are there" in capsys.readouterr().out
