"""Weights of sharded models pushed to an engine, on two processes; see ``test_live.py``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import float8
from benchmarks.measuring.memory import Allocations, bytes_of
from float8.checkpoints import weight_updates


class Block(nn.Module):
    """Odd sizes make uneven shards."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model_of(recipe, is_sharded, gathers=False):
    """Both processes have the same weights, and those of a model that is not sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(32, 16))
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, enable_fsdp_float8_all_gather=gathers)
    float8.convert_to_float8_training(model, config=config)
    if is_sharded:
        for block in model:
            fully_shard(block)
        fully_shard(model)
    return model


def train(model, optimizer):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def every_rank_gets_whole_tensors(rank, recipe, gathers=False):
    """The bits of one process, before and after a step."""
    models = [model_of(recipe, is_sharded, gathers) for is_sharded in (False, True)]
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01, foreach=True) for m in models]
    for _ in range(2):
        expected, found = (list(weight_updates(model)) for model in models)
        assert [key for key, _ in found] == [key for key, _ in expected]
        for (key, x), (_, y) in zip(found, expected, strict=True):
            assert type(x) is torch.Tensor, (key, type(x))
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), key
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer)


def gathers_one_parameter_at_a_time(rank):
    """No more than a whole parameter and its cast are there at once, beside the shards."""
    largest = max(bytes_of([p]) for p in model_of("rowwise", False).parameters())
    model = model_of("rowwise", True)
    updates = weight_updates(model)
    with Allocations(model.parameters()) as alive:
        start = alive.now
        for _ in updates:
            pass
    assert alive.peak - start <= 3 * largest, (alive.peak - start, largest)


def a_step_in_between_is_an_error(rank):
    """Multi-tensor optimizers leave the version counters of sharded parameters alone."""
    model = model_of("blockwise", True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=True)
    updates = weight_updates(model)
    next(updates)
    train(model, optimizer)
    with pytest.raises(RuntimeError, match="was written to since the call"):
        list(updates)
