"""What must be true of a pipeline of two processes; `test_pipelining.py` starts them.

The stages are the two halves of a float8 model, built by hand. A file of its own, because spawned
processes import it by name.
"""

from __future__ import annotations

import functools

import one_process as one
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import float8.distributed.first_use  # noqa: F401  it compares the ranks' layers

MICROBATCHES = 4
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def halves(model):
    """A linear layer and its activation; another linear layer."""
    return nn.Sequential(*model[:2]), nn.Sequential(model[2])


@functools.cache
def own_stage():
    """The ranks that hold this rank's layers: here itself alone."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))["data"]


def examples(rank):
    """What a stage reads and returns in a microbatch: told, so that torch does not try it out.

    Else torch (2.13; not 2.11) runs forward and backward of each stage on uninitialised memory,
    in training mode, and a delayed cast records the amaxes of that as of any other step.
    """
    ends = [
        torch.zeros(one.TOKENS, width, requires_grad=width == one.HIDDEN or rank == 1)
        for width in (one.WIDTH, one.HIDDEN, one.WIDTH)
    ]
    return ends[rank], ends[rank + 1]


def steps_equal_one_process(rank, recipe, schedule, steps=2):
    """Losses, gradients and parameters, bit for bit: the same microbatches in the same order."""
    single, mine = one.make(recipe), halves(one.make(recipe))[rank]
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"), *examples(rank))
    parallel = SCHEDULES[schedule](stage, MICROBATCHES, loss_fn=lambda y, g: (y * g).sum())
    optimizers = one.adamw(single), one.adamw(mine)
    for step in range(steps):
        data = [one.batch(step, 0, m) for m in range(MICROBATCHES)]
        expected = one.rank_step(single, data)
        for p in single.parameters():
            p.grad /= MICROBATCHES  # as schedules do
        x, g = (torch.cat(parts) for parts in zip(*data, strict=True))
        found = []
        parallel.step(*([x] if rank == 0 else []), target=g, losses=found)
        if rank == 1:
            assert [loss.item() for loss in found] == expected, (recipe, schedule, step)
        one.update(single, optimizers[0])
        one.update(mine, optimizers[1], own_stage())
        one.assert_same_model(mine, halves(single)[rank], (recipe, schedule, step))


def a_forgotten_group_is_refused(rank):
    """Else scales of one stage would follow the amaxes of another's layers."""
    mine = halves(one.make("delayed"))[rank]
    with pytest.raises(RuntimeError, match="pipeline stages"):
        one.sync_float8_amax_and_scale_history(mine)
