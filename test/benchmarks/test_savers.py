"""The runs of `bench_memory`: each has the dtypes that its name says, and takes a step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench_memory
from benchmarks.measuring import harness, savers
from benchmarks.models.llama import MODELS
from float8 import Float8Linear, Float8Tensor
from float8.optim import Moment

SMALL = replace(MODELS["tiny"], blocks=1, tokens=32)
W13 = "stack.blocks.0.feed_forward.w13.weight"


def held_after_a_step(way: str) -> tuple[str, ...]:
    held = savers.hold(way, SMALL, "cpu")
    batch = savers.batch_of(SMALL, "cpu")
    with held.forward():
        held.model(*batch).backward()
    weight = dict(held.model.named_parameters())[W13]
    gradient = weight.grad
    held.optimizer.step()
    state = held.optimizer.state[weight]
    kept = (
        weight,
        gradient,
        *(state[name] for name in ("exp_avg", "exp_avg_sq", "master") if name in state),
    )
    layers = [m for m in held.model.modules() if isinstance(m, torch.nn.Linear)]
    assert type(held.model.head) is torch.nn.Linear
    assert {type(layer) is Float8Linear for layer in layers[:-1]} == {way.startswith("tensorwise")}
    return tuple(dtype_of(x) for x in kept)


def dtype_of(x: torch.Tensor) -> str:
    codes = x.codes if isinstance(x, Moment) else x
    codes = x.float8_data if isinstance(x, Float8Tensor) else codes
    return str(codes.dtype).removeprefix("torch.") + ("*" if codes is not x else "")


F8, F16, BF16, F32 = "float8_e4m3fn*", "float16*", "bfloat16", "float32"


@pytest.mark.parametrize(("way", "dtypes"), [
    ("bf16", (BF16, BF16, F32, F32)),
    ("bf16+fp32_master", (BF16, BF16, F32, F32, F32)),
    ("bf16+bf16_adamw", (BF16, BF16, BF16, BF16)),
    ("bf16+float8_adamw_v16", (BF16, BF16, F8, F16)),
    ("tensorwise+saved_activations+float8_adamw", (BF16, BF16, F8, F8)),
    ("tensorwise+O1", ("float16", F8, F32, F32)),
    ("tensorwise+saved_activations+O2", ("float16", F8, F8, F16)),
    ("tensorwise+O3", (F8, F8, F8, F16, F16)),
])  # fmt: skip
def test_a_ways_weight_gradient_moments_and_master_are_held_as_it_says(way, dtypes):
    assert held_after_a_step(way) == dtypes


def test_what_is_not_here_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(savers.NotHere, match="torchao is not installed"):
        savers.hold("torchao AdamW8bit", SMALL, "meta")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    with pytest.raises(savers.NotHere, match="CUDA kernels"):
        savers.hold("bitsandbytes AdamW8bit", SMALL, "meta")


def test_on_a_gpu_peak_and_time_are_of_whole_steps(monkeypatch):
    """The measurement itself, on a CPU that is said to be a GPU."""
    steps: list[str] = []
    step = savers.step
    monkeypatch.setattr(
        savers, "step", lambda held, batch: (step(held, batch), steps.append("step"))
    )
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: steps.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(harness, "cuda_seconds", lambda fn, calls: (fn(), 0.5)[1])
    monkeypatch.setattr(bench_memory, "ROUNDS", 1)
    row = bench_memory.measure("bf16+float8_adamw", SMALL, "cpu")
    assert steps[:5] == ["step", "step", "reset_peak_memory_stats", "step", "synchronize"]
    assert (row["peak_mib"], row["ms"], row["samples_s"]) == (3, 500, [0.5])
    assert row["optimizer_mib"] == pytest.approx(
        row["parameters_mib"] / 2 * (2 + 12 / 128), rel=0.01
    )


def test_weights_are_never_in_another_dtype_on_the_way():
    model = savers.language_model(SMALL, "meta", torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
