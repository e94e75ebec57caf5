"""`bench_overhead`: each recipe is compared with its layer by hand."""

from __future__ import annotations

import json
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import bench_overhead
from benchmarks.measuring.by_hand import FUNCTIONS
from benchmarks.measuring.contenders import Operands
from benchmarks.measuring.shapes import Shape
from benchmarks.measuring.stubbed_gpu import stubbed_gpu
from float8 import Float8Linear

TINY = ["--shapes", "16,32,48", "--repeats", "3", "--warmup", "1"]


def test_every_recipe_is_compared_with_its_layer_by_hand(tmp_path):
    file = tmp_path / "out.json"
    assert bench_overhead.main([*TINY, "-o", str(file)]) == 0
    rows = {row["layer"]: row for row in json.loads(file.read_text())["rows"]}
    for recipe in FUNCTIONS:
        ours, by_hand = rows[recipe], rows[f"by hand {recipe}"]
        pairs = zip(ours["samples_s"], by_hand["samples_s"], strict=True)
        assert ours["overhead"] == median(mine / other for mine, other in pairs)
        assert ours["met"] == ("yes" if ours["overhead"] <= 1.5 else "no")
        assert ours["us"] == ours["ms"] * 1e3
        assert "overhead" not in by_hand
    assert next(iter(rows)) == "nn.Linear"
    assert len(rows) == 2 + 2 * len(FUNCTIONS)  # blockwise has no layer by hand


def test_on_a_gpu_the_hosts_time_is_measured_beside_nn_linear(monkeypatch):
    """A clock that sees the host's work and the device's; launches are counted."""
    operands = SimpleNamespace(
        x=SimpleNamespace(device=torch.device("cuda")), linear=nn.Linear(1, 1)
    )
    monkeypatch.setattr(bench_overhead, "pair", lambda recipe, operands: (f"ours {recipe}", "hand"))
    made = bench_overhead.makers(["tensorwise", "rowwise"], operands, False)
    assert list(made) == ["nn.Linear", "tensorwise", "rowwise"]

    done, now = [], [0.0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now.__setitem__(0, now[0] + 5.0))
    monkeypatch.setattr(
        bench_overhead.harness,
        "host_timer",
        lambda: lambda fn, calls: -now[0] + (fn(), now[0])[1],
    )
    assert bench_overhead.until_it_is_done(lambda: done.append(1), 3) == 5.0
    assert len(done) == 3


@pytest.mark.cuda
def test_a_gpu_says_what_the_host_costs(tmp_path):
    file = tmp_path / "out.json"
    arguments = ["--device", "cuda", "--shapes", "16,16,16", "--repeats", "3", "-o", str(file)]
    assert bench_overhead.main(arguments) == 0
    rows = {row["layer"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {"nn.Linear", *bench_overhead.RECIPES}
    assert all(row["launches"] > 0 and row["us"] > 0 for row in rows.values())


def test_on_a_stubbed_gpu_the_host_launches_what_a_gpu_would():
    pytest.importorskip("triton")
    launches = {}
    with stubbed_gpu() as stub:
        for recipe in bench_overhead.RECIPES:
            operands = Operands.random(Shape(16, 16, 16), "cpu", 0)
            layer = bench_overhead.pair(recipe, operands)[0]
            bench_overhead.gradients(layer, operands)
            before = stub.launched
            found = bench_overhead.gradients(layer, operands)
            launches[recipe] = stub.launched - before
            assert [g.shape for g in found] == [operands.x.shape, operands.linear.weight.shape]
    # Input, weight, grad_output, and the weight again in backward. Dynamic scales of whole tensors,
    # rows and columns take a pass of their own, once for each operand.
    assert launches == {"tensorwise": 7, "delayed": 4, "rowwise": 7, "blockwise": 4}
    x = torch.randn(16, 16, dtype=torch.bfloat16)
    assert Float8Linear(16, 16, dtype=torch.bfloat16)(x).float().norm() > 0.1  # nothing is left


def test_the_stub_is_an_option(tmp_path):
    pytest.importorskip("triton")
    file = tmp_path / "host.json"
    options = ["--stub-gpu", "--shapes", "16,16,16", "--recipes", "tensorwise", "--repeats", "1"]
    assert bench_overhead.main([*options, "--warmup", "1", "-o", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["layer"] for row in rows] == ["nn.Linear", "tensorwise"]
    with pytest.raises(SystemExit):
        bench_overhead.main(["--stub-gpu", "--device", "cuda"])
