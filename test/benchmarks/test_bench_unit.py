"""`bench_unit`: its command line, on a small model."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import float8.unit_scaling as uu
from benchmarks import bench_unit as bench
from float8 import Float8Linear

FAST = ["--device", "cpu", "--quick"]
NAMES = (bench.BASELINE, *bench.RECIPES)


def test_every_recipe_is_measured_beside_high_precision(tmp_path):
    file = tmp_path / "out.json"
    assert bench.main([*FAST, "-o", str(file)]) == 0
    plain, *rows = json.loads(file.read_text())["rows"]
    assert [row["layer"] for row in (plain, *rows)] == list(NAMES)
    assert [row["error"] for row in rows if "error" in row] == []
    assert plain["ratio"] == 1
    assert rows[-1]["ratio_to_unit"] == 1
    for row in (plain, *rows):
        assert row["tokens_s"] == pytest.approx(32 / row["ms"] * 1e3)
    assert {row["layer"]: row["sqnr_db"] for row in rows if not 15 < row["sqnr_db"] < 50} == {}
    moved = {row["layer"]: (row["cuda_mib"], row["cuda_launches"]) for row in rows}
    assert moved["unit"] == min(moved.values())


def test_all_contenders_share_the_parameters_and_the_plain_model_stays_plain():
    plain = uu.TransformerStack(1, hidden_size=32, heads=2, is_causal=True)
    for name in NAMES:
        model = bench.model_of(name, plain)
        shared = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(one is other for one, other in shared)
        layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        assert {isinstance(layer, Float8Linear) for layer in layers} == {name != bench.BASELINE}
    assert not any(isinstance(m, Float8Linear) for m in plain.modules())


def test_compiled_is_layer_by_layer(monkeypatch):
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kwargs: compiled.append(self))
    plain = uu.TransformerStack(2, hidden_size=32, heads=2, is_causal=True)
    x = torch.randn(1, 16, 32, requires_grad=True)
    bench.step("unit", "compiled", plain, x, torch.randn(1, 16, 32))()
    assert [type(module) for module in compiled] == [uu.TransformerLayer] * 2


def test_delayed_scaling_syncs():
    plain = uu.TransformerStack(1, hidden_size=32, heads=2, is_causal=True)
    x = torch.randn(1, 16, 32, requires_grad=True)
    steps = {name: bench.step(name, "eager", plain, x, torch.randn_like(x)) for name in NAMES}
    assert [name for name, step in steps.items() if step.syncs] == ["delayed"]


def test_a_recipe_that_fails_fails_the_run(monkeypatch, capsys):
    def broken(model: nn.Module, **kwargs: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(bench, "convert_to_float8_training", broken)
    assert bench.main([*FAST, "--recipes", "unit"]) == 1
    assert "RuntimeError: boom" in capsys.readouterr().out


def test_a_width_that_heads_do_not_divide_is_refused_before_anything_is_measured(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", "--width", "100"])
    assert "--width must be a multiple of 32" in capsys.readouterr().err
