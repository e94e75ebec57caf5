"""A training step: fresh gradients, the sync of delayed scaling, saved bytes and launches."""

from __future__ import annotations

import json
import os
import weakref

import pytest
import torch
from shapes import DEVICES
from torch import nn

from benchmarks import bench_linear, bench_model
from benchmarks.measuring import alone, step
from benchmarks.measuring.contenders import BASELINE, SCALED, STATIC
from benchmarks.measuring.shapes import Shape

M, K, N = 48, 128, 64


def steps_of(*names: str) -> dict[str, step.Step]:
    operands = bench_linear.Operands.random(Shape(M, K, N), "cpu", 0)
    return {name: bench_linear.step(name, "eager", operands) for name in names}


@pytest.mark.parametrize("name", [BASELINE, *SCALED, STATIC])
def test_a_step_leaves_fresh_gradients(name):
    run = steps_of(name)[name]
    run()
    first = run.layer.weight.grad.clone()
    run()
    assert torch.equal(run.layer.weight.grad, first) or name == "delayed"
    assert run.layer.weight.grad.norm() < 1.5 * first.norm()  # accumulated, it would be 2


def test_what_is_saved_for_backward_is_weighed():
    steps = steps_of(BASELINE, "tensorwise")
    assert step.saved_bytes(steps[BASELINE]) == M * K * 2  # bf16 input; the weight is a parameter
    assert M * K <= step.saved_bytes(steps["tensorwise"]) <= 0.52 * M * K * 2


def test_what_was_weighed_is_freed():
    outputs = []

    def forward(x):
        outputs.append(weakref.ref(y := torch.sigmoid(x)))  # saves its own output
        return y * 2

    x = torch.randn(3, 4, requires_grad=True)
    assert step.saved_bytes(step.Step(nn.Identity(), forward, x, x)) == 3 * 4 * 4
    assert outputs[0]() is None


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_of_a_contender_is_its_own(device, monkeypatch):
    more = torch.ones(2**29, dtype=torch.uint8, device=device)
    measured = []
    monkeypatch.setattr(bench_model, "alone", lambda *a: measured.append(a) or alone.alone(*a))
    sizes = ["--size", "tiny", "--blocks", "1", "--recipes", "tensorwise", "--no-peer"]
    options = bench_model.parse([*sizes, "--repeats", "1", "--warmup", "1", "--device", device])
    rows = bench_model.measure("eager", options)
    assert [name for _, name, *_ in measured] == [row["layer"] for row in rows]
    here = alone.peak_bytes(lambda: None, device)
    assert here > more.nbytes
    assert all(0 < row["peak_gib"] * 2**30 < here - more.nbytes / 2 for row in rows), rows


def test_a_process_of_its_own_ends_as_a_row():
    assert alone.alone(os.getpid) != os.getpid()
    broken = alone.alone(json.loads, "{")
    assert broken["refused"] and broken["error"].startswith("JSONDecodeError: ")
    killed = alone.alone(os._exit, 9)
    assert not killed["refused"] and "terminated abruptly" in killed["error"]


def test_static_scales_hold_the_operands():
    operands = bench_linear.Operands.random(Shape(M, K, N), "cpu", 0)
    config = bench_linear.config_of(STATIC, operands)
    largest = operands.x.detach().abs().max().item()
    assert config.cast_config_input.static_scale * 448 == pytest.approx(largest)
    largest = operands.grad_output.abs().max().item()
    assert config.cast_config_grad_output.static_scale * 57344 == pytest.approx(largest)


def test_launches_are_what_stands_on_the_stream(tmp_path):
    categories = ["kernel", "cpu_op", "gpu_memset", "cuda_runtime", "gpu_user_annotation", "kernel"]
    events = [{"cat": category, "ph": "X"} for category in categories] + [{"ph": "M"}]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    assert step.launches_in(trace) == 3


@pytest.mark.cuda
def test_launches_of_a_known_program():
    x = torch.ones(1024, device="cuda")
    assert step.launches(lambda: (x.mul_(2), x.add_(1), x.sin_()), "cuda") == 3
