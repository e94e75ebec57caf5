"""The counts of `benchmarks.measuring.wire.Wire` on two processes; `test_wire.py` starts them.

Every expected number is computed by hand in the comment beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.measuring.wire import Wire

WORLD = 2


# torch 2.13 has new names for these, and warns of the ones that torch 2.11 knows.
gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
all_gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def every_collective_is_counted_by_hand(rank):
    with Wire() as wire:
        gather(torch.empty(20), torch.randn(10))  # 20 * 4 / 2
        dist.all_gather([torch.empty(3) for _ in range(WORLD)], torch.randn(3))  # 6 * 4 / 2
        scatter(torch.empty(5), torch.randn(10))  # 10 * 4 / 2
        dist.all_reduce(torch.randn(7, dtype=torch.float64))  # 2 * 7 * 8 / 2
        dist.broadcast(torch.zeros(6, dtype=torch.uint8), src=0)  # 6 / 2
        dist.all_to_all_single(torch.empty(8), torch.randn(8))  # 4 * 4
        mine = [1, 3] if rank == 0 else [2, 2]  # rows for rank 0, for rank 1
        theirs = [1, 2] if rank == 0 else [3, 2]
        dist.all_to_all_single(torch.empty(sum(theirs), 2), torch.randn(4, 2), theirs, mine)
        functional.all_reduce(torch.randn(2), "sum", dist.group.WORLD).wait()  # 2 * 2 * 4 / 2
        all_gather(torch.randn(4), 0, dist.group.WORLD).wait()  # 8 * 4 / 2
        dist.barrier()
    counted = [(each.kind, each.bytes) for each in wire.sent]
    assert counted == [
        ("all_gather", 40),
        ("all_gather", 12),
        ("reduce_scatter", 20),
        ("all_reduce", 56),
        ("broadcast", 3),
        ("all_to_all", 16),
        ("all_to_all", (3 if rank == 0 else 2) * 2 * 4),
        ("all_reduce", 8),
        ("all_gather", 16),
    ], counted
    assert {each.ranks for each in wire.sent} == {WORLD}
    assert wire.sent[4].dtype == torch.uint8
    assert wire.count("all_gather") == 3
    assert wire.bytes("all_gather") == 68


def what_it_does_not_know_is_refused(rank):
    with Wire(), pytest.raises(NotImplementedError, match="c10d::reduce_"):
        dist.reduce(torch.randn(2), dst=0)


def fsdp2_is_seen_in_forward_and_backward(rank):
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with Wire() as wire:
        model(torch.randn(3, 8)).square().sum().backward()
    weights = (48 + 24) * 4
    # Both are gathered for forward and again for backward, where the gradients are scattered.
    assert wire.bytes("all_gather") == 2 * weights / 2
    assert wire.bytes("reduce_scatter") == weights / 2
    assert {each.kind for each in wire.sent} == {"all_gather", "reduce_scatter"}
    assert wire.unsharded_bytes == 48 * 4  # one layer at a time, and this is the larger one


def ddp_is_seen(rank):
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 6, bias=False))
    with Wire() as wire:
        model(torch.randn(3, 8)).square().sum().backward()
    assert wire.bytes("all_reduce") == 48 * 4  # 2 * 192 / 2
