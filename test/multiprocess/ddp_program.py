"""What must be true of DistributedDataParallel on two processes; `test_ddp.py` starts them.

A file of its own, because spawned processes import it by name. See `one_process` for what equality
means.
"""

from __future__ import annotations

import functools

import faults
import fsdp1_program
import one_process as one
import pytest
import torch
from assertions import error
from recompute import Checkpointed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

WORLD, MICROBATCHES = 2, 2


def steps_equal_one_process(rank, recipe, options, steps=3, wrap=lambda m: m, compiles=False):
    """Losses, parameters, histories and scales, bit for bit, with gradient accumulation."""
    single, model = one.make(recipe), one.make(recipe, wrap)
    parallel = DistributedDataParallel(model, **options)
    forward = torch.compile(parallel, backend="aot_eager") if compiles else parallel
    optimizers = one.adamw(single), one.adamw(parallel)
    for step in range(steps):
        # torch learns a static graph in the first backward, which must not be under no_sync.
        count = 1 if options.get("static_graph") and step == 0 else MICROBATCHES
        data = [[one.batch(step, r, m) for m in range(count)] for r in range(WORLD)]
        expected = one.global_step(single, data)
        found = one.rank_step(forward, data[rank], others=parallel.no_sync)
        assert found == expected[rank], (recipe, options, step)
        one.update(single, optimizers[0])
        one.update(parallel, optimizers[1])
        one.assert_same_model(parallel, single, (recipe, options, step))


def a_missing_all_reduce_is_caught(rank):
    """Every rank has scales of its own."""
    with faults.missing_all_reduce(), pytest.raises(AssertionError, match="buffers"):
        steps_equal_one_process(rank, "delayed", {})


def checkpointing_changes_nothing(rank, recipe, kind):
    """Recomputed activations are cast with the scales of the first pass, amaxes recorded once."""
    wrap = functools.partial(Checkpointed, kind=kind)
    steps_equal_one_process(rank, recipe, {}, wrap=wrap)


def compiling_changes_nothing(rank, recipe):
    """A compiled DDP model, in which dynamo splits the graph at the buckets."""
    steps_equal_one_process(rank, recipe, {}, steps=2, compiles=True)


def compiling_fsdp2_changes_nothing(rank, recipe):
    """Here and not with FSDP's other claims, because dynamo takes longer to import than to run."""
    shard = functools.partial(fsdp1_program.fsdp2, over=init_device_mesh("cpu", (WORLD,)))
    fsdp1_program.steps_equal_one_process(rank, recipe, shard, steps=2, compiles=True)


def one_layer_equals_the_global_batch_at_once(rank, recipe):
    """Where scales do not depend on the batch, only the order of sums differs: plain's difference.

    That is recipe ``unit``, and ``delayed`` behind its first sync. A unit-scaled weight gradient
    is multiplied by the rows of a call to the power -1/2; R ranks with a share of the rows each
    thus end with R ** 0.5 times the gradient. Adam divides by it; SGD does not.
    """
    off = {}
    for name in (recipe, None):
        single, model = (one.make(name, lambda m: nn.Sequential(m[0])) for _ in range(2))
        parallel = DistributedDataParallel(model)
        for step in range(2):
            xs, gs = zip(*(one.batch(step, r) for r in range(WORLD)), strict=True)
            gs = [torch.cat([g, g[:, :16]], 1) for g in gs]
            for model in (single, parallel):
                model.zero_grad()
            whole = one.loss_of(single, (torch.cat(xs), torch.cat(gs)))
            (whole / WORLD).backward()
            one.loss_of(parallel, (xs[rank], gs[rank])).backward()
            for model in (single, parallel):
                one.sync_float8_amax_and_scale_history(model)
        factor = WORLD**0.5 if name == "unit" else 1.0
        p, q = (next(m.parameters()).grad for m in (single, parallel))
        off[name] = error(q, p * factor) / p.norm().item()
    assert off[recipe] <= 4 * max(off[None], torch.finfo(torch.float32).eps), (recipe, off)
