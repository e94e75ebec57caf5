"""`bench_model`: its command line, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import bench_model
from benchmarks.measuring.contenders import BASELINE, SCALED
from benchmarks.models import llama
from float8 import Float8Linear

SIZES = llama.Sizes(64, 128, 4, 2, batch=2, tokens=16, blocks=2)
FAST = ["--device", "cpu", "--size", "tiny", "--repeats", "2", "--warmup", "1", "--no-peer"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(llama.SIZES, "tiny", SIZES)


def run(tmp_path: Path, *arguments: str) -> list[dict]:
    file = tmp_path / "out.json"
    assert bench_model.main([*FAST, *arguments, "-o", str(file)]) == 0
    return json.loads(file.read_text())["rows"]


def test_every_recipe_is_measured_beside_bf16(tmp_path):
    plain, *rows = run(tmp_path)
    assert [row["layer"] for row in (plain, *rows)] == [BASELINE, *SCALED]
    assert [row["error"] for row in rows if "error" in row] == []
    for row in (plain, *rows):
        assert row["tokens_s"] == pytest.approx(2 * 16 / row["ms"] * 1e3)
    assert plain["ratio"] == 1
    assert {row["layer"]: row["sqnr_db"] for row in rows if not 20 < row["sqnr_db"] < 50} == {}


def test_float8_keeps_less_for_backward(tmp_path):
    plain, tensorwise = run(tmp_path, "--recipes", "tensorwise", "--blocks", "1")
    tokens = SIZES.batch * SIZES.tokens
    # wqkv and w13, wo, w2 read four inputs. nn.Linear saves them in two bytes per
    # element; two of them are saved anyway, by SwiGLU and attention, as their outputs.
    halved = tokens * (3 * SIZES.hidden + SIZES.feed_forward)
    assert 0 < (plain["saved_mib"] - tensorwise["saved_mib"]) * 2**20 <= halved


def test_all_models_share_their_parameters():
    plain = llama.Llama(SIZES)
    for name in (BASELINE, *SCALED):
        model = bench_model.model_of(name, plain)
        shared = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(one is other for one, other in shared)
        layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        assert {isinstance(layer, Float8Linear) for layer in layers} == {name != BASELINE}
    assert not any(isinstance(m, Float8Linear) for m in plain.modules())


def test_delayed_scaling_syncs():
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    plain = llama.Llama(SIZES).bfloat16()
    step = bench_model.step("delayed", "eager", plain, x, torch.randn_like(x))
    step()
    scale = step.layer.get_submodule("blocks.0.attention.wo.cast_grad_output").scale
    assert step.syncs
    assert scale > 0


def test_compiled_is_block_by_block(tmp_path, monkeypatch):
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kwargs: compiled.append(self))
    rows = run(tmp_path, "--modes", "eager", "compiled", "--recipes", "tensorwise")
    assert [type(module).__name__ for module in compiled] == ["Block"] * 4
    assert [(row["mode"], row["layer"]) for row in rows] == [
        ("eager", BASELINE),
        ("eager", "tensorwise"),
        ("compiled", BASELINE),
        ("compiled", "tensorwise"),
    ]


def test_a_recipe_of_ours_that_fails_fails_the_run(monkeypatch, capsys):
    def broken(model: nn.Module, **kwargs: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(bench_model, "convert_to_float8_training", broken)
    assert bench_model.main([*FAST, "--recipes", "tensorwise"]) == 1
    assert "RuntimeError: boom" in capsys.readouterr().out


def test_peak_memory_is_counted_on_cuda_only():
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    plain = llama.Llama(SIZES).bfloat16()
    step = bench_model.step(BASELINE, "eager", plain, x, torch.randn_like(x))
    assert bench_model.peak_bytes(step, "cpu") is None
