"""Distributed checkpoints, written by four processes and read by four, two and one.

All ranks read the same batch: 2 or 4 equal numbers add up, and divide, exactly. So losses are
equal, bit for bit, on any of these numbers of ranks. `test_checkpoints.py` starts the processes.
"""

from __future__ import annotations

from contextlib import nullcontext

import one_process as one
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from float8 import high_precision

BEFORE, AFTER = 3, 3  # steps before and after the checkpoint
RECIPES = ("delayed", "tensorwise", "unit", None, "gathered tensorwise", "gathered delayed")


def sharded(recipe):
    """A model, sharded over all ranks if there are several, and its optimizer."""
    model = one.make(recipe)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    return model, one.adamw(model)


def train(model, optimizer, steps):
    """Train; return the losses. The batch is the same on every rank."""
    losses = []
    for step in steps:
        losses += one.rank_step(model, [one.batch(step, 0)])
        one.update(model, optimizer)
    return losses


def state_of(model, optimizer):
    """The state that is saved, or loaded into."""
    parts = get_state_dict(model, optimizer)
    return dict(zip(("model", "optimizer"), parts, strict=True))


def save(model, optimizer, path):
    dcp.save(state_of(model, optimizer), checkpoint_id=path)


def load(model, optimizer, path):
    """Load a checkpoint that any number of ranks has written."""
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def expected_losses(recipe):
    """The losses of an uninterrupted training in one process."""
    model = one.make(recipe)
    return train(model, one.adamw(model), range(BEFORE + AFTER))


def resumes(recipe, saved, path):
    """Resume with ``recipe`` from a checkpoint of ``saved``; equal casts give equal losses."""
    model, optimizer = sharded(recipe)
    # A checkpoint without histories has the keys of the plain model.
    is_plain = "delayed" in str(recipe) and "delayed" not in str(saved)
    with high_precision(model) if is_plain else nullcontext():
        load(model, optimizer, path)
    losses = train(model, optimizer, range(BEFORE, BEFORE + AFTER))
    if str(recipe).removeprefix(one.GATHERED) == str(saved).removeprefix(one.GATHERED):
        assert losses == expected_losses(recipe)[BEFORE:], (recipe, saved)
    return model, losses


def saves_and_resumes(rank, recipe, path):
    model, optimizer = sharded(recipe)
    losses = train(model, optimizer, range(BEFORE))
    save(model, optimizer, path)
    losses += train(model, optimizer, range(BEFORE, BEFORE + AFTER))
    assert losses == expected_losses(recipe), recipe
    again, _ = resumes(recipe, recipe, path)
    one.assert_same_model(again, model, recipe)
