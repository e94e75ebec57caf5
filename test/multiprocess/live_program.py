"""Weights of sharded models pushed to an engine, on two processes; see ``test_live.py``."""

from __future__ import annotations

import torch
from published_models import convert, model_of
from torch.distributed.fsdp import fully_shard

from benchmarks.measuring.memory import Allocations, bytes_of
from float8.checkpoints import weight_updates


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def every_rank_gets_whole_tensors(rank, name, recipe):
    """The bits of one process, before and after a step."""
    single, model = (convert(model_of(name), recipe) for _ in range(2))
    sharded(model)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01, foreach=True) for m in (single, model)]
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        found, expected = list(weight_updates(model)), dict(weight_updates(single))
        assert [key for key, _ in found] == list(expected)
        for key, x in found:
            assert type(x) is torch.Tensor, (key, type(x))
            same = torch.equal(x.view(torch.uint8), expected[key].view(torch.uint8))
            assert same, key
        for m, optimizer in zip((single, model), optimizers, strict=True):
            m(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def gathers_one_parameter_at_a_time(rank):
    """No more than a whole parameter and its cast are there at once, beside the shards."""
    model = convert(model_of("mixtral"), "rowwise")
    largest = max(bytes_of([p]) for p in model.parameters())
    sharded(model)
    updates = weight_updates(model)
    with Allocations(model.parameters()) as alive:
        start = alive.now
        for _ in updates:
            pass
    assert alive.peak - start <= 3 * largest, (alive.peak - start, largest)


def a_step_in_between_is_an_error(rank):
    """Multi-tensor optimizers leave the version counters of sharded parameters alone."""
    model = sharded(convert(model_of("llama"), "blockwise"))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=True)
    updates = weight_updates(model)
    next(updates)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    try:
        list(updates)
    except RuntimeError as error:
        assert "was written to since the call" in str(error)
    else:
        raise AssertionError("it went on")
