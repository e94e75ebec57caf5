"""`bench_rollout`: the engine that gets the trainer's float8 computes what the trainer does."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

import torch
from assertions import assert_bitwise

from benchmarks import bench_rollout
from float8 import Float8Tensor


def test_only_the_trainers_own_float8_gives_its_probabilities(tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = ["--steps", "2", "--batch", "4", "--tokens", "4", "-o", str(file)]
    assert bench_rollout.main(arguments) == 0
    found = {(r["weights"], r["inputs"]): r for r in json.loads(file.read_text())["rows"]}
    assert len(found) == 8
    own = [found.pop((bench_rollout.OWN, inputs)) for inputs in ("high precision", "float8 1x128")]
    # All is rounded at the same places; sums may be in another order.
    assert own[1]["largest"] < 1e-4
    assert own[1]["kl"] < 1e-8
    assert all(r["logp_difference"] > own[0]["logp_difference"] for r in found.values())
    assert all(0 < r["kl"] < 0.1 for r in (own[0], *found.values()))
    assert "mean reward" in capsys.readouterr().out


def test_an_engine_dequantises_data_with_the_scale_that_follows():
    engine = bench_rollout.Engine(torch.nn.Sequential(torch.nn.Linear(3, 5)))
    weight = Float8Tensor.from_high_precision(torch.randn(5, 3), torch.float8_e4m3fn)
    updates = {
        "0.weight": weight.float8_data, "0.weight_scale_inv": weight.scale, "0.bias": torch.ones(5),
    }  # fmt: skip
    engine.load(updates.items())
    assert_bitwise(engine.parameters["0.weight"], weight.dequantize())
    assert engine.parameters["0.bias"].tolist() == [1] * 5
    with pytest.raises(AssertionError, match="no weight before its scale"):
        engine.load([("0.weight_scale_inv", weight.scale)])
