"""Bytes held in training, against counts by hand and torch's own MemTracker."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.measuring import memory
from benchmarks.models.transformer import GPT, LLAMA
from float8 import E4M3, Float8LinearConfig, Float8Tensor, convert_to_float8_training
from float8.optim import AdamW

TINY = LLAMA["tiny"]
BF16 = torch.bfloat16


def meta_llama(blocks: int = 1) -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    with torch.device("meta"):
        model = GPT(replace(TINY, layers=blocks)).bfloat16()
        tokens, targets = torch.zeros(2, TINY.batch, TINY.context, dtype=torch.int64)
    return model, (tokens, targets)


def test_storages_count_once_and_subclasses_by_what_is_in_them():
    x = torch.zeros(32, 64)
    assert memory.bytes_of([x, x[3:], x.t(), nn.Parameter(x)]) == 32 * 64 * 4
    codes = Float8Tensor.from_high_precision(x, E4M3)
    assert memory.bytes_of([codes]) == 32 * 64 + 4
    assert memory.bytes_of([torch.zeros(10)[:2], x]) == 40 + 32 * 64 * 4


def test_the_peak_is_what_was_alive_at_once_on_a_cpu_too():
    with memory.Allocations() as allocations:
        a = torch.zeros(100)
        b = a + 1
        del a
        c = b[10:]  # a view
        del b
        assert allocations.now == 400
        d = torch.zeros(50)
        assert (allocations.now, allocations.peak) == (600, 800)
        del c, d
        allocations.forget_peak()
        assert (allocations.now, allocations.peak) == (0, 0)


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_torchs_own_tracker_finds_the_same_peak_and_activations(recipe):
    model, batch = meta_llama(blocks=2)
    if recipe:
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(model.blocks, config=config)
    states = AdamW(model.parameters())  # without states in the first backward
    tracker = MemTracker()
    tracker.track_external(model, *batch)
    with memory.as_on_cuda():
        with tracker:
            before = total(tracker)
            loss = model(*batch)
            kept = total(tracker) - before
            loss.backward()
            peak = total(tracker, "peak")
        del loss
        model.zero_grad()
        allocations = memory.Allocations(model.parameters(), model.buffers(), batch)
        with allocations:
            assert memory._backward(model, batch, memory.ExitStack, allocations) == kept
        assert allocations.peak == peak
        model.zero_grad()
        step = memory.footprint(model, states, batch)
    assert step.activations == kept
    assert step.peak_backward == peak + step.states
    assert step.peak_update == sum((step.parameters, step.gradients, step.states)) + sum(
        memory.bytes_of([x]) for x in (*model.buffers(), *batch[:1])
    )


def total(tracker: MemTracker, when: str = "current") -> int:
    (snapshot,) = tracker.get_tracker_snapshot(when).values()
    return snapshot["Total"]


def test_a_trace_on_meta_counts_what_a_cpu_really_keeps():
    """Without attention and norms, which differ between CPU and CUDA: the same layers, for real."""
    sizes = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 1)).to(BF16)
            x = torch.ones(32, 64, dtype=BF16)
        loss = nn.Sequential(model, Mean())
        optimizer = AdamW(model.parameters(), fused=False)
        sizes.append(memory.footprint(loss, optimizer, (x,)))
    assert sizes[0].activations == sizes[1].activations > 32 * 128 * 2
    assert sizes[0].peak_backward == sizes[1].peak_backward
    assert sizes[0].parameters == sizes[0].gradients == (65 * 128 + 129) * 2


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()
