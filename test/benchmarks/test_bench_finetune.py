"""`bench_finetune`: fine-tuning, adapters and conversion of a pretrained model, at tiny sizes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import oracle
import pytest
import studies
import torch
from assertions import assert_bitwise

from benchmarks import bench_finetune
from benchmarks.quality import finetuning, post_training, pretrained
from benchmarks.quality.finetuning import Tuning
from benchmarks.quality.run import Run, autocast, text_of
from float8.formats import E4M3, ScaleFormat
from float8.granularity import WHOLE
from float8.numerics.calibration import Calibration, Distribution
from scripts.training import corpus

START = Run(
    contender="bf16", seed=3, steps=2, learning_rate=2e-3,
    layers=1, width=32, heads=2, context=16, batch=2, held_out=64,
)  # fmt: skip
TUNING = Tuning(**{**vars(START), "steps": 3, "start": START})


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder of text to pretrain on; another one stands for torch's headers."""
    for name, text in (
        ("old", "def f(x):\n    return x\n"),
        ("new", "int f(int x) { return x; }\n"),
    ):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.txt").write_text(text * (10 + number))
    monkeypatch.setattr(finetuning, "new_text", lambda: corpus.load(tmp_path / "new"))
    in_threads = lambda jobs, _: ThreadPoolExecutor(jobs)  # noqa: E731
    monkeypatch.setattr(pretrained, "ProcessPoolExecutor", in_threads)
    studies.made_here(monkeypatch)
    return tmp_path / "old"


@pytest.fixture
def start(texts, tmp_path):
    """A folder with the pretrained model."""
    pretrained.make([START], tmp_path, texts, "cpu", 1)
    return tmp_path


def loaded(folder, texts):
    return pretrained.load(START, folder, text_of(texts))


# --- pretrained models


def test_a_model_is_pretrained_once(start, texts, monkeypatch):
    weights = loaded(start, texts).state_dict()
    monkeypatch.setattr(pretrained, "fit", None)
    pretrained.make([START, replace(START, held_out=128)], start, texts, "cpu", 1)
    for name, weight in loaded(start, texts).state_dict().items():
        assert_bitwise(weight, weights[name])


def test_a_pretrained_model_is_of_its_run_and_text(start, texts):
    assert pretrained.file_of(replace(START, steps=3), start) != pretrained.file_of(START, start)
    (texts / "0.txt").write_text("changed")
    with pytest.raises(ValueError, match="--pretrained another folder"):
        loaded(start, texts)


# --- fine-tuning


def test_fine_tuning_moves_the_pretrained_weights_to_the_new_text(start, texts):
    row = finetuning.tune(replace(TUNING, steps=30), start, texts)
    assert row["loss"] < row["start_loss"] - 0.1
    assert row["old_loss"] > row["loss"]
    assert row["text"] == finetuning.new_text().digest
    assert set(row["converted"]) == set(finetuning.CONVERTED)
    assert all(abs(loss / row["loss"] - 1) < 0.02 for loss in row["converted"].values())
    assert row["loss"] not in row["converted"].values()


def test_runs_of_a_seed_start_alike_and_float8_runs_differ(start, texts):
    names = ("bf16", "bf16 rounded", "tensorwise", "mxfp8")
    rows = [finetuning.tune(replace(TUNING, contender=name), start, texts) for name in names]
    assert len({row["loss"] for row in rows}) == len(names)
    assert all(row["loss"] == pytest.approx(rows[0]["loss"], rel=0.01) for row in rows)
    assert "start_loss" not in rows[2]


@pytest.mark.parametrize("name", ["bf16", "bf16 rounded", "tensorwise", "mxfp8"])
def test_adapters_train_on_a_frozen_base(name, start, texts):
    pytest.importorskip("peft")
    run = replace(TUNING, contender=name, rank=4)
    row = finetuning.tune(run, start, texts)
    model = loaded(start, texts)
    shapes = [layer.weight.shape for layer in post_training.layers(model).values()]
    assert row["parameters"] == sum(4 * (N + K) for N, K in shapes)
    assert ("moved_loss" in row) == (name not in ("bf16", "bf16 rounded"))

    what = finetuning.with_adapters(run, model)
    kept = [layer.base_layer.weight for layer in adapted(what.model)]
    assert not any(weight.requires_grad for weight in kept)
    assert all((weight.element_size() == 1) == ("moved_loss" in row) for weight in map(data, kept))


def adapted(model):
    return [module for module in model.modules() if hasattr(module, "base_layer")]


def data(weight):
    return getattr(weight, "float8_data", weight)


def test_moved_adapters_compute_what_they_did_on_the_same_base(start, texts):
    pytest.importorskip("peft")
    what = finetuning.with_adapters(replace(TUNING, rank=4), loaded(start, texts))
    with torch.no_grad():
        for layer in adapted(what.model):
            layer.lora_B["default"].weight.normal_()
    moved = finetuning.on_base(loaded(start, texts), what.model, 4)
    x_BT = torch.randint(256, (5, 13))
    assert_bitwise(moved(x_BT, x_BT).detach(), what.model(x_BT, x_BT).detach())
    plain = loaded(start, texts)(x_BT, x_BT)
    assert not torch.equal(plain, moved(x_BT, x_BT))


# --- conversion


def error(weight, scale):
    cast = oracle.cast(weight, scale, (1, WHOLE), torch.float8_e4m3fn)
    values = oracle.values(cast, scale, (1, WHOLE), torch.float8_e4m3fn)
    return (values.double() - weight.double()).square().sum(1)


@pytest.mark.parametrize("shape", [(5, 33), (1, 7), (48, 1)])
def test_mse_finds_the_least_error_of_its_grid(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    found = post_training.scale_of(weight, "channel", "mse")
    widest = weight.abs().amax(1, keepdim=True) / 448
    errors = torch.stack([error(weight, widest * factor) for factor in post_training.FACTORS])
    # Rounded scales: float32's division by 448 and the oracle's differ by an ulp.
    assert torch.allclose(error(weight, found), errors.amin(0), rtol=1e-4)
    assert (error(weight, found) <= errors[post_training.FACTORS == 1][0]).all()
    of_tensor = post_training.scale_of(weight, "tensor", "mse")
    assert of_tensor.shape == (1, 1)
    flat = weight.reshape(1, -1)
    assert_bitwise(of_tensor, post_training.scale_of(flat, "channel", "mse"))


@pytest.mark.parametrize(("K", "gain"), [(128, 1.0), (512, 0.55), (4096, 0.2)])
def test_a_search_per_channel_gains_less_the_longer_the_channels_are(K, gain):
    """Of a long row some elements lie at any place between two codes, whatever the scale."""
    weight = torch.randn(64, K, generator=torch.Generator().manual_seed(0))
    noise = [
        error(weight, scale).sum()
        for scale in (
            weight.abs().amax(1, keepdim=True) / 448,
            post_training.scale_of(weight, "channel", "mse"),
        )
    ]
    assert 10 * torch.log10(noise[0] / noise[1]) == pytest.approx(gain, abs=0.15)


def test_percentile_saturates_what_lies_above():
    weight = torch.arange(20_001.0).reshape(1, -1)
    found = post_training.scale_of(weight, "tensor", "percentile") * 448
    assert found.item() == pytest.approx(0.9999 * 20_000)


def test_loaded_scales_are_those_of_the_layer(start, texts):
    model = loaded(start, texts)
    weights = {name: m.weight.detach().clone() for name, m in post_training.layers(model).items()}
    for shared in ("tensor", "channel"):
        converted = loaded(start, texts)
        config = post_training.config_of(f"{shared} mse", "tensor amax")
        post_training.convert_to_float8_inference(converted, config=config)
        scales = {n: post_training.scale_of(w, shared, "mse") for n, w in weights.items()}
        post_training.load_scales(converted, weights, scales)
        for name, layer in post_training.layers(converted).items():
            block = (1, WHOLE) if shared == "channel" else (WHOLE, WHOLE)
            codes = oracle.cast(weights[name], scales[name], block, torch.float8_e4m3fn)
            assert_bitwise(layer.weight.float8_data, codes, replay=name)
            assert_bitwise(layer.weight.scale, scales[name], replay=name)


def test_outliers_leave_the_function_alone(start, texts):
    model, x_BT = loaded(start, texts), torch.randint(256, (3, 16))
    before = loss_in_bf16(model, x_BT)
    post_training.plant_outliers(model, 64)
    assert_bitwise(loss_in_bf16(model, x_BT), before)
    norm = model.blocks[0].feed_forward_norm.weight
    assert norm[0].item() == pytest.approx(64, rel=0.1)
    assert norm[1:].max() < 2


def loss_in_bf16(model, x_BT):
    with torch.no_grad(), autocast("cpu"):  # which keeps its casts of weights until it ends
        return model(x_BT, x_BT)


def test_mse_of_inputs_is_never_worse_than_amax_and_percentile():
    values = Distribution()
    values.add(torch.randn(3000, generator=torch.Generator().manual_seed(2)) ** 3)
    found = Calibration({"l": values}, {"l": E4M3}, "amax", 99.0)
    best = post_training.static_scales(found, "mse")["l"]
    others = [found.static_scales(method)["l"] for method in ("amax", "percentile", "sqnr")]
    assert values.sqnr(torch.tensor([best]), E4M3) >= max(values.sqnr(torch.tensor(others), E4M3))


# --- the command

SOME = [
    ("bf16", "bf16"), ("tensor amax", "tensor amax"), ("1x32 pow2", "1x32 pow2"),
    ("channel amax", "static percentile"), ("channel mse", "static mse"),
]  # fmt: skip
ALONE = [("channel pow2", "bf16")]


@pytest.mark.parametrize(
    ("weights", "inputs"), bench_finetune.CASTS[1:] + bench_finetune.WEIGHTS_ALONE
)
def test_a_conversion_casts_as_its_name_says(weights, inputs):
    config = post_training.config_of(weights, inputs)
    extents = {"tensor": (-1, -1), "channel": (1, -1), "token": (1, -1), "static": (-1, -1)}
    extents |= {"bf16": (-1, -1), "1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}
    for name, cast in ((inputs, config.plan.output.a), (weights, config.plan.output.b)):
        assert cast.block == extents[name.split()[0]], name
        is_power = "pow2" in name
        assert (cast.scale_format is not ScaleFormat.FLOAT32) == is_power, name


@pytest.mark.parametrize("name", ["finetune", "lora", "convert"])
def test_the_command_makes_each_run_once(name, texts, tmp_path, monkeypatch, capsys):
    if name == "lora":
        pytest.importorskip("peft")
    monkeypatch.setattr(bench_finetune, "RECIPES", ("bf16", "tensorwise"))
    monkeypatch.setattr(bench_finetune, "BASES", ("bf16", "blockwise"))
    monkeypatch.setattr(bench_finetune, "CASTS", SOME)
    monkeypatch.setattr(bench_finetune, "WEIGHTS_ALONE", ALONE)
    monkeypatch.setattr(bench_finetune, "OUTLIERS", (1, 64))
    monkeypatch.setattr(post_training, "CALIBRATION_BATCHES", 2)
    file = tmp_path / "out.json"
    command = ["--study", name, "--quick", "--seeds", "0", "--jobs", "1", "--data", str(texts)]
    command += ["--held-out", "64", "--pretrained", str(tmp_path / "models"), "-o", str(file)]
    assert bench_finetune.main(command) == 0
    out = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    if name == "convert":
        pairs = [(r["run"]["outliers"], r["run"]["weights"], r["run"]["inputs"]) for r in rows]
        assert pairs == [(1, *x) for x in SOME + ALONE] + [(64, *x) for x in SOME]
        plain = {row["loss"] for row in rows if row["run"]["weights"] == "bf16"}
        assert len(plain) == 1, "outliers change the function"
        assert len({row["loss"] for row in rows}) > 5
    else:
        assert len(rows) == 2
        assert "before" in out
        assert all("old_loss" in row for row in rows)
    assert bench_finetune.main([*command, "--pretrained", str(tmp_path / "other")]) == 0
    assert "0 to make" in capsys.readouterr().out
    assert not (tmp_path / "other").exists(), "no run needs a pretrained model"
    assert json.loads(file.read_text())["rows"] == rows


def test_lines_compare_runs_of_one_seed():
    def row(name, seed, loss, **more):
        return {"run": {"contender": name, "seed": seed}, "loss": loss, **more}

    before = {"start_loss": 4.0, "start_old_loss": 0.5}
    rows = [
        row("bf16", 0, 1.0, old_loss=2.0, converted={"rowwise": 1.002}, **before),
        row("bf16", 1, 2.0, old_loss=4.0, converted={"rowwise": 2.004}, **before),
        row("rowwise", 1, 2.02, old_loss=3.8, bf16_loss=2.0),
        row("rowwise", 0, 1.01, old_loss=1.9, bf16_loss=1.0, moved_loss=0.99),
        {"run": {"contender": "mxfp8", "seed": 0}, "error": "diverged"},
    ]
    found = {line.pop("layer"): line for line in bench_finetune.of_trainings(rows)[0]}
    assert found["before"] == {"seeds": 2, "diverged": 0, "loss": 4.0, "old_loss": 0.5}
    assert found["bf16"] == {"seeds": 2, "diverged": 0, "loss": 1.5, "old_loss": 3.0}
    assert found["mxfp8"] == {"seeds": 0, "diverged": 1}
    rowwise = found["rowwise"]
    assert rowwise["loss"] == pytest.approx(1.515)
    assert rowwise["gap"] == "+1.00 ± 0.00 %"
    assert rowwise["bf16_gap"] == "+0.00 ± 0.00 %"
    assert rowwise["old_gap"] == "-5.00 ± 0.00 %"
    assert rowwise["moved_gap"] == "-1.00 %"
    assert rowwise["own_cast"] == "+1.000 ± 0.000 %"
    assert rowwise["bf16_cast"] == "+0.200 ± 0.000 %"


def test_lines_compare_conversions_with_the_same_outliers():
    def row(weights, outliers, loss, **more):
        run = {"weights": weights, "inputs": "bf16", "outliers": outliers, "seed": 0}
        return {"run": run, "loss": loss, **more}

    rows = [
        row("bf16", 1, 1.0),
        row("tensor amax", 1, 1.01, weights_sqnr=31.0),
        row("bf16", 64, 2.0),
        row("tensor amax", 64, 2.04, weights_sqnr=30.0),
    ]
    found, _ = bench_finetune.of_conversions(rows)
    assert [line.get("gap") for line in found] == [
        None, "+1.000 %", None, "+2.000 %"
    ]  # fmt: skip
    assert found[1]["perplexity"] == pytest.approx(2.71828**1.01, rel=1e-5)
    assert found[3]["weights_sqnr"] == 30.0
