"""What must be true on each of two gloo processes; `test_distributed.py` starts them.

A file of its own, because spawned processes import it by name.
"""

import copy
from dataclasses import replace

import faults
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from float8 import convert_to_float8_training, sync_float8_amax_and_scale_history
from float8.config import RECIPES, DelayedScalingConfig

WORLD = 2


def _model(recipe, **delayed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    config = RECIPES[recipe]
    if delayed:
        config = replace(config, delayed_scaling=DelayedScalingConfig(**delayed))
    return convert_to_float8_training(model, config=config)


def fsdp2_equals_one_process(rank, recipes):
    for recipe in recipes:
        single = _model(recipe)
        sharded = copy.deepcopy(single)
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh)
        for step in range(2):
            torch.manual_seed(step)
            x, g = torch.randn(16, 32), torch.randn(16, 32)
            outs = []
            for model in (single, sharded):
                model.zero_grad()
                outs.append(model(x))
                outs[-1].backward(g)
                sync_float8_amax_and_scale_history(model)
            assert torch.equal(*outs), (recipe, step)
            for p, q in zip(single.parameters(), sharded.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad.full_tensor()), (recipe, step)


def _scales_after_a_step(rank, bad, **delayed):
    """Every rank sees other data, one of them perhaps a bad value; its scales after ``sync``."""
    model = _model("delayed", **delayed)
    torch.manual_seed(rank)
    model(torch.randn(16, 32) * (rank + 1)).backward(torch.randn(16, 32))
    sync_float8_amax_and_scale_history(model)
    x = torch.randn(16, 32) * (rank + 1)
    if bad is not None and rank == 1:  # not on rank 0, where gloo's MAX would keep it
        x[0, 0] = bad
    model(x).backward(torch.randn(16, 32))
    sync_float8_amax_and_scale_history(model)
    mine = torch.cat([b.reshape(-1) for b in model.buffers()])
    gathered = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(gathered, mine)
    return gathered


def ranks_agree(rank, bad, interval=1):
    gathered = _scales_after_a_step(rank, bad, interval=interval)
    assert torch.equal(*gathered)
    assert gathered[0].isfinite().all()


def ddp_keeps_every_ranks_amaxes(rank):
    model = _model("delayed")
    parallel = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank)
    peaks = []
    for factor in (1000.0 if rank == 1 else 1.0, 1.0):  # the peak is on rank 1, in microbatch 1
        x = torch.randn(16, 32) * factor
        peaks.append(x.abs().max())
        parallel(x).backward(torch.randn(16, 32))
    assert model[0].cast_input.current_amax == max(peaks)


def ranks_disagree_without_the_all_reduce(rank):
    with faults.missing_all_reduce():
        gathered = _scales_after_a_step(rank, None)
    assert not torch.equal(*gathered)
