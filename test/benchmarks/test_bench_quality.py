"""`bench_quality`: a run is its fields, and each study says what its rows say."""

from __future__ import annotations

import itertools
import json
import math
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial

import processes
import pytest
import torch
from meter import saved_bytes

from benchmarks import bench_quality as bench
from benchmarks import plots
from benchmarks.quality import operands, pictures, rates, recipes, scaling, study
from benchmarks.quality import run as run_module
from benchmarks.quality.contenders import (
    NOISE,
    SAVING,
    UNIT_DYNAMIC,
    UNIT_NOISE,
    Contender,
    contender,
)
from benchmarks.quality.paired import by_contender
from benchmarks.quality.probe import Probe
from benchmarks.quality.run import (
    Run,
    evaluate,
    evaluation_steps,
    fit,
    optimizer_of,
    schedule,
    text_of,
    train,
    usual_rate,
)
from float8 import (
    CastConfig,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_training,
    high_precision,
)
from float8.optim import Moment
from scripts.training import corpus, gpt

TINY = Run(
    contender="bf16", seed=3, steps=6, learning_rate=1e-2, layers=1, width=32, heads=1, context=16,
    batch=4, held_out=512,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for name in "abcdefghijk":
        (folder / f"{name}.txt").write_text(f"this is a line of file {name}\n" * 60)
    return folder


def options_of(*argv: str):
    return bench.parse(["--device", "cpu", *argv])


# --- one run


def test_a_run_gives_the_same_bits_again_and_its_row_goes_into_json(folder):
    row, again = (train(TINY, folder) for _ in range(2))
    del row["seconds"], again["seconds"]
    assert row == again
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert [step for step, _ in row["curve"]] == [1, 3, 6]
    assert row["loss"] == row["curve"][-1][1] < row["curve"][0][1]
    other = train(replace(TINY, seed=4), folder)
    assert other["loss"] != row["loss"] and other["text"] == row["text"]


def test_a_run_in_float8_is_evaluated_in_float8_and_in_bf16(folder):
    row = train(replace(TINY, contender="tensorwise"), folder)
    assert row["loss"] != row["bf16_loss"] == pytest.approx(row["loss"], rel=0.01)
    assert "bf16_loss" not in train(replace(TINY, contender="only weight"), folder)


def test_alarms_of_float8_models_are_in_the_row_and_change_nothing(folder, monkeypatch):
    monkeypatch.setattr(run_module, "WATCHED", 2)
    watched = train(replace(TINY, contender="delayed"), folder)
    with monkeypatch.context() as unwatched:
        unwatched.setattr(run_module, "_monitor", lambda *_: nullcontext())
        plain = train(replace(TINY, contender="delayed"), folder)
    assert watched["alarms"] == [] and "alarms" not in plain
    assert (watched["curve"], watched["bf16_loss"]) == (plain["curve"], plain["bf16_loss"])
    for name in ("bf16", "unit_bf16", "torchao tensorwise"):
        assert "alarms" not in train(replace(TINY, contender=name), folder)
    small = CastConfig(ScalingType.STATIC, static_scale=2.0**-12)
    config = Float8LinearConfig(cast_config_input=small)
    model = convert_to_float8_training(TINY.new_model(), config=config)
    saturating = Contender(model, in_bf16=lambda: high_precision(model))
    alarms = fit(saturating, TINY, text_of(folder))["alarms"]
    assert {(alarm["first"], alarm["step"]) for alarm in alarms} == {(0, 0), (0, 4)}
    assert any(alarm["text"].startswith("saturation: ") for alarm in alarms)


@pytest.mark.parametrize("name", ["bf16", "tensorwise"])
def test_a_run_that_diverges_stops_and_its_row_says_so(folder, name):
    row = train(replace(TINY, contender=name, learning_rate=1e30, steps=40), folder)
    assert row["error"].startswith("diverged: loss not finite at step ")
    assert "loss" not in row and json.dumps(row, allow_nan=False)
    assert int(row["error"].split()[-1]) < 40


def test_the_control_differs_from_the_base_by_one_rounding():
    torch.manual_seed(0)
    model = gpt.GPT(TINY.sizes)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    contender(NOISE, model)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name].to(torch.bfloat16).float()), name
        assert torch.equal(p, before[name]) == (p.ndim == 1), name  # norms start as ones


def test_inputs_of_a_unit_scaled_model_can_have_dynamic_scales():
    """Tokens whose values lie far above E4M3's range are cut by recipe ``unit`` alone."""
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    errors = {}
    for name in ("unit", UNIT_DYNAMIC):
        torch.manual_seed(0)
        found = contender(name, gpt.GPT(TINY.sizes))
        with torch.no_grad():
            for block in found.model.blocks:
                block.feed_forward.gate_up.weight *= 2.0**6  # a product of two follows
                block.feed_forward.down.weight *= 2.0**-6
        assert found.unit_scaled
        with torch.no_grad(), found.in_bf16():
            in_bf16 = found.model(tokens, tokens).item()
        errors[name] = abs(found.model(tokens, tokens).item() - in_bf16)
    assert errors["unit"] > 4 * errors[UNIT_DYNAMIC]


def test_one_contender_has_float8_in_the_optimizer_and_in_saved_activations_too():
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    saved, losses, states = {}, {}, {}
    for name in ("tensorwise", SAVING):
        torch.manual_seed(0)
        found = contender(name, gpt.GPT(TINY.sizes))
        optimizer = optimizer_of(found, 1e-3)
        assert [group["initial_lr"] for group in optimizer.param_groups] == [1e-3, 1e-3]
        saved[name] = saved_bytes(partial(found.model, tokens, tokens), found.model)
        loss = found.model(tokens, tokens)
        losses[name] = loss.item()
        loss.backward()
        optimizer.step()
        weight = found.model.blocks[0].feed_forward.gate_up.weight
        states[name] = type(optimizer.state[weight]["exp_avg"])
    assert losses[SAVING] == losses["tensorwise"]  # the forward pass is the same
    assert saved[SAVING] < 0.8 * saved["tensorwise"]
    assert states == {"tensorwise": torch.Tensor, SAVING: Moment}


def test_the_control_of_unit_scaled_models_is_rounded_after_their_initialization():
    torch.manual_seed(0)
    found = contender(UNIT_NOISE, gpt.GPT(TINY.sizes))
    assert found.unit_scaled and found.in_bf16 is None
    for name, p in found.model.named_parameters():
        assert torch.equal(p, p.to(torch.bfloat16).float()), name


def test_the_schedule_warms_up_and_falls_to_zero():
    factors = [schedule(step, 40) for step in range(40)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors[-1] == pytest.approx(1 / 38)
    assert all(a >= b for a, b in itertools.pairwise(factors[2:]))
    assert schedule(0, 1) == 1.0
    assert evaluation_steps(2000) == [125, 250, 500, 1000, 2000]
    assert evaluation_steps(1) == [1]


def test_evaluation_is_the_mean_over_held_out_windows_and_changes_nothing(folder):
    text = corpus.load(folder)
    torch.manual_seed(0)
    model = gpt.GPT(TINY.sizes).train()
    found = evaluate(model, TINY.context, text, 10**5)
    assert model.training
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        count = 10**5 // 4096  # windows of 16 bytes, 256 of them in a pass
        pairs = text.val_batches(count, batch=256, context=16)
        losses = [model(*pair).item() for pair in pairs]
    assert found == pytest.approx(sum(losses) / count, rel=1e-6)


# --- the command


def test_a_file_of_version_0_12_goes_on(tmp_path):
    """The rows of a study that began before other studies existed are those of its runs."""
    sizes = {"steps": 2000, "layers": 2, "width": 128, "heads": 2, "context": 64, "batch": 16}
    sizes["held_out"] = 2**20
    known = [
        {"run": {"contender": name, "seed": 0, "learning_rate": lr, **sizes}, "loss": 1.0}
        for name, lr in (("bf16", 0.002), ("torchao rowwise", 0.002), ("unit", 0.25))
    ]
    missing = study.missing(recipes.runs(options_of("--seeds", "0")), known)
    assert [run.contender for run in missing] == [
        name for name in recipes.CONTENDERS if name not in ("bf16", "torchao rowwise", "unit")
    ]
    path = tmp_path / "q.json"
    path.write_text(json.dumps({"benchmark": "x", "options": {"data": "None"}, "rows": known}))
    assert study.known_rows(path, "x", options_of("--study", "recipes")) == known


def test_the_command_trains_pairs_and_continues_its_file(tmp_path, folder, monkeypatch, capsys):
    monkeypatch.setattr(study, "get_context", lambda _: processes.forkserver())
    file, picture = tmp_path / "q.json", tmp_path / "q.png"
    command = ["--device", "cpu", "--quick", "--data", str(folder), "--jobs", "1", "-o", str(file)]
    command += ["--contenders", "bf16", "tensorwise", "--seeds", "0"]
    assert bench.main(command) == 0  # one seed has no interval, so no target
    written = json.loads(file.read_text())
    assert [row["run"]["contender"] for row in written["rows"]] == ["bf16", "tensorwise"]
    assert written["rows"][0]["run"]["steps"] == bench.QUICK["steps"]
    assert "tensorwise" in written["table"][3] and "%" in written["table"][3]
    assert bench.main(command) == 0
    assert "2 of 2 runs are there, 0 to make" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--study recipes, not rates"):
        bench.main([*command, "--study", "rates"])
    assert plots.main([str(file), "-o", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", bench.STUDIES)
def test_runs_of_a_study_are_different_ones_and_pairs_come_early(name):
    options = options_of("--study", name, "--seeds", "0", "1")
    runs = bench.STUDIES[name].runs(options)
    assert len(set(runs)) == len(runs)
    assert {run.seed for run in runs[: len(runs) // 2]} == {0}
    assert {run.contender for run in runs} == set(bench.STUDIES[name].contenders)
    settings = {replace(run, contender="", seed=0, learning_rate=0) for run in runs}
    assert len(settings) == {"scaling": 9, "operands": 2}.get(name, 1)  # a probe is no training


def test_options_of_a_study_can_be_given():
    options = options_of("--study", "scaling", "--width", "32", "--contenders", "bf16", "mxfp8")
    assert options.sizes["width"] == 32 and options.sizes["steps"] == 600
    assert {run.contender for run in scaling.runs(options)} == {"bf16", "mxfp8"}
    assert options_of("--quick").sizes == bench.QUICK
    assert options_of("--quick", "--steps", "9").sizes["steps"] == 9
    with pytest.raises(SystemExit):
        options_of("--contenders", "float9")


# --- what rows say


def row(run: Run, loss: float | None, **more) -> dict:
    found = {"loss": loss, "curve": [[3, loss * 2], [6, loss]]} if loss else {"error": "diverged"}
    return {"run": asdict(run), "parameters": 100 * run.width**2 + 512 * run.width, **found, **more}


def test_recipes_have_their_own_bases_and_a_target():
    runs = {name: replace(TINY, contender=name) for name in ("bf16", "mxfp8")}
    unit = {n: replace(TINY, contender=n, learning_rate=0.25) for n in ("unit_bf16", "unit")}
    rows = []
    for seed in (0, 1):
        of = {n: replace(r, seed=seed) for n, r in (runs | unit).items()}
        rows += [row(of["bf16"], 1.0), row(of["mxfp8"], 1.001 + 0.0001 * seed, bf16_loss=1.0)]
        rows += [row(of["unit_bf16"], 2.0), row(of["unit"], None if seed else 2.0)]
        rows[-1]["alarms"] = [{"step": 3}] if seed else []
    found, targets = recipes.summary(rows)
    lines = {line["layer"]: line for line in found}
    assert lines["mxfp8"]["gap_percent"] == pytest.approx(0.105)
    assert lines["mxfp8"]["bf16_gap"] == "+0.00 ± 0.00 %"
    assert lines["unit"]["gap"] == "+0.00 %" and lines["unit"]["diverged"] == 1
    assert lines["unit"]["alarmed"] == "1 of 2" and "alarmed" not in lines["mxfp8"]
    assert "gap" not in lines["bf16"] and not any("setting" in line for line in found)
    target, of_unit = targets
    assert target["met"] and target["layer"] == "mxfp8"
    assert not of_unit["met"] and "measured" not in of_unit
    assert target["measured"] == pytest.approx(0.105 + 12.706 * 0.005)


def test_unit_scaled_contenders_have_a_fit_each():
    def gaps_of(*unit: float):
        losses = {"unit_bf16": [2.0, 2.0], UNIT_NOISE: [2.001, 1.999]}
        losses |= {UNIT_DYNAMIC: [2.01, 2.02], "unit": unit}
        losses |= {"bf16": [1.0, 1.0], NOISE: [1.001, 0.999], "delayed": [1.01, 1.02]}
        losses["tensorwise"] = [each / 2 for each in unit]
        run_of = {name: replace(TINY, contender=name) for name in losses}
        rows = [
            row(replace(run_of[name], seed=seed), loss)
            for name, own in losses.items()
            for seed, loss in enumerate(own)
        ]
        return recipes.gaps(by_contender(rows))

    calm, failed = gaps_of(2.0, 2.01), gaps_of(2.0, 2.5)
    both = calm["delayed"].values, calm["tensorwise"].values
    assert calm[recipes.MEAN].values == pytest.approx(
        [(a + b) / 2 for a, b in zip(*both, strict=True)]
    )
    assert calm[recipes.MEAN].mean == pytest.approx(0.875, abs=0.01)
    # sqrt(1/2 + 1/2) and sqrt(1 + 1/2) standard deviations of a mean over seeds
    ratio = calm[recipes.MEAN].half_width / calm["delayed"].half_width
    assert ratio == pytest.approx(math.sqrt(1 / 1.5), rel=0.02)
    assert failed[UNIT_DYNAMIC].half_width == calm[UNIT_DYNAMIC].half_width
    assert failed["delayed"].half_width > 5 * calm["delayed"].half_width  # one variance for all


def test_lines_of_several_settings_are_kept_apart():
    rows = [row(replace(TINY, contender=name, steps=steps), 1.0 + 0.01 * steps * (name != "bf16"))
            for steps in (5, 7) for name in ("bf16", "tensorwise")]  # fmt: skip
    found, _ = recipes.summary(rows)
    assert [(line["setting"], line.get("gap")) for line in found] == [
        ("steps 5", None), ("steps 5", "+5.00 %"), ("steps 7", None), ("steps 7", "+7.00 %")
    ]  # fmt: skip


def test_the_fit_of_operands_finds_planted_effects():
    planted = dict(zip(operands.CASTS, (0.3, 0.2, 0.0, -0.1, 0.05, 0.4), strict=True))
    rows = []
    for seed in (0, 1):
        for i, name in enumerate(operands.CONTENDERS):
            noise = 1e-3 * math.sin(37 * i + seed)
            percent = sum(planted[cast] for cast in operands.casts_on(name)) + noise
            run = replace(TINY, contender=name, seed=seed)
            rows.append(row(run, (1.5 + seed) * math.exp(percent / 100)))
    measures = {"error": 0.05, "mean_error": 0.01, "loss_change": 0.5}
    names = (*operands.ABLATIONS, operands.ALL, operands.FLOAT32)
    probe = asdict(Probe(**asdict(TINY), batches=2))
    rows.insert(0, {"run": probe, "loss": 1.0, "casts": dict.fromkeys(names, measures)})
    found, targets = operands.summary(rows)
    lines = {line["layer"]: line for line in found}
    assert targets == []
    for part in operands.PARTS:
        expected = sum(planted[cast] for cast in operands.casts_of(part))
        line = lines[part]
        assert abs(line["effect_percent"] - expected) < line["effect_half_width"] < 2e-3, part
        assert (line["error"], line["error_without"], line["loss_change"]) == (5, 5, 0.5)
    assert lines["all six"]["effect_percent"] == pytest.approx(0.85, abs=1e-3)
    assert lines["input"]["only"] == "+0.70 ± 0.00 %"
    assert lines["none: rounding of bf16"]["only"].startswith(("+0.00", "-0.00"))


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_file_of_few_rows_has_a_table(count):
    for name, chosen in bench.STUDIES.items():
        runs = chosen.runs(options_of("--study", name))
        rows = [row(run, 1.0) for run in runs if not isinstance(run, Probe)][:count]
        lines, _ = chosen.summary(rows)
        assert bool(lines) or count == 0
        report = {"options": {"study": name}, "rows": rows}
        if name in pictures.DRAWN:
            pictures.draw(report)
        else:
            with pytest.raises(ValueError, match="has no figure; these have: recipes"):
                pictures.draw(report)


def test_rates_have_an_optimum_an_edge_and_a_gap_of_the_best():
    def losses(name, octave, seed):
        distance = octave - (1.25 if name == "bf16" else 0.75)
        if name != "bf16" and octave > 3:
            return None
        return (2 + 0.01 * distance**2) * (1 if name == "bf16" else 1.001)

    options = options_of("--study", "rates", "--contenders", "bf16", "mxfp8", "--seeds", "0", "1")
    rows = [
        row(run, losses(run.contender, round(math.log2(run.learning_rate / 4e-3)), run.seed))
        for run in rates.runs(options)
    ]
    lines = {line["layer"]: line for line in rates.summary(rows)[0]}
    assert math.log2(lines["bf16"]["optimum"]) == pytest.approx(1.25)
    assert math.log2(lines["mxfp8"]["optimum"]) == pytest.approx(0.75)
    # 3 % of 2.0 is 0.06: distances up to 2.45, 3.70 and 3.18
    assert (lines["bf16"]["edge"], lines["mxfp8"]["edge"]) == (8.0, 8.0)
    assert lines["mxfp8"]["diverged"] == 2 and "x32" not in lines["mxfp8"]
    assert lines["mxfp8"]["gap"] == "+0.10 ± 0.00 %"
    panel = pictures.draw({"options": {"study": "rates"}, "rows": rows}).axes[0]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["bf16", "mxfp8"]


def test_rates_of_unit_scaled_models_are_of_their_own_usual_one():
    assert usual_rate("unit", 64) == usual_rate("unit_bf16", 128) == 2**-2
    assert usual_rate("bf16", 64) == 2 * usual_rate("tensorwise", 128) == 4e-3


def law(N: float, D: float, kept: float = 1.0) -> float:
    return 20 * (kept * N) ** -0.3 + 30 * D**-0.4 + 0.5


def scaling_rows(kept: float) -> list[dict]:
    options = options_of("--study", "scaling", "--contenders", "bf16", "rowwise")
    found = []
    for run in scaling.runs(options):
        N, D = 100 * run.width**2, run.steps * run.batch * run.context
        loss = law(N, D, kept if run.contender == "rowwise" else 1.0)
        noise = 1 + 1e-5 * math.sin(run.seed + N + D)
        found.append(row(run, loss * noise))
    return found


@pytest.mark.parametrize("kept", [0.99, 0.924])
def test_scaling_finds_the_part_of_the_parameters_that_a_recipe_keeps(kept):
    lines, _ = scaling.summary(scaling_rows(kept))
    whole = next(line for line in lines if line["layer"] == "rowwise, all sizes")
    middle, low, high = whole["kept_ends"]
    assert middle == pytest.approx(kept, rel=5e-3)  # the slope is a parabola's
    assert low <= middle <= high < middle + 0.01
    cells = [line for line in lines if line["layer"] == "rowwise"]
    sizes = {(100 * w**2, 1024 * steps) for w in (32, 64, 128) for steps in (300, 600, 1200)}
    assert {(line["N"], line["D"]) for line in cells} == sizes
    for line in cells:
        exact = 100 * (law(line["N"], line["D"], 0.924) / law(line["N"], line["D"]) - 1)
        assert line["predicted"] == pytest.approx(exact, rel=0.1)
    # A greater N has a smaller part of its loss in the term that f changes, a greater D a greater.
    assert whole["per_N_percent"][0] < 0 < whole["per_D_percent"][0]


def test_the_constants_are_those_of_the_paper():
    assert pytest.approx(0.9243, abs=1e-4) == scaling.PREDICTED
    assert pytest.approx(0.8300, abs=1e-3) == scaling.PREDICTED_LOW


def test_the_slope_is_that_of_the_parabola():
    x = [1.0, 2.5, 3.0]
    y = [2 - 3 * each + 0.5 * each**2 for each in x]
    assert [scaling.slope(x, y, at) for at in (1.0, 2.7)] == pytest.approx([-2.0, -0.3])


def test_pictures_show_gaps_with_their_intervals():
    rows = []
    for seed in range(3):
        run = replace(TINY, seed=seed)
        rows += [row(run, 1.0), row(replace(run, contender=NOISE), 1.0 + 0.001 * (seed - 1))]
        rows.append(row(replace(run, contender="delayed"), 1.002 + 0.001 * seed))
    forest, curve, *others = pictures.draw({"options": {}, "rows": rows}).axes
    assert [label.get_text() for label in forest.get_yticklabels()] == [NOISE, "delayed"]
    drawn = [list(line.get_xdata()) for line in forest.get_lines() if len(line.get_xdata()) == 2]
    gap = recipes.gaps(by_contender(rows))["delayed"]
    assert gap.mean == pytest.approx(0.3, abs=1e-3)
    assert pytest.approx([gap.mean - gap.half_width, gap.mean + gap.half_width]) in drawn
    assert curve.get_title(loc="left") == "delayed"
    assert not any(axes.get_visible() for axes in others)
    _, line = curve.get_lines()
    assert list(line.get_xdata()) == [3, 6] and line.get_ydata() == pytest.approx(
        [0.3, 0.3], abs=1e-3
    )
    panels = pictures.draw({"options": {"study": "scaling"}, "rows": scaling_rows(0.924)}).axes
    assert [axes.get_title(loc="left") for axes in panels] == ["rowwise"]
