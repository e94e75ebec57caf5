"""Two processes when something goes wrong on one of them.

The checks are about values (NaN, infinities, empty batches). `dies_in_mid_step` is what processes
run that are killed or stopped. `test_interruptions.py` starts both.
"""

from __future__ import annotations

import datetime
import math
import os
import time

import one_process as one
import torch
import torch.distributed as dist
from parallel_training_program import fsdp2
from processes import join_group
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def parallel(kind, model):
    """The model under DDP, or sharded."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    return fsdp2(model, init_device_mesh("cpu", (WORLD,)))


def with_bad_value(batch, bad):
    x = batch[0].clone()
    x[0, 0] = bad
    return x, batch[1]


def a_step_with_a_bad_value_can_be_skipped_by_all_ranks(rank, recipe, kind, bad):
    """Rank 1 reads one bad value in step 1: no rank's gradients are finite, all scales are.

    Every rank then decides by its own gradients to skip that update, and ends with the bits of one
    process that does the same.
    """
    single, mine = one.make(recipe), parallel(kind, one.make(recipe))
    optimizers = one.adamw(single), one.adamw(mine)
    for step in range(3):
        data = [[one.batch(step, r)] for r in range(WORLD)]
        if step == 1:
            data[1] = [with_bad_value(data[1][0], bad)]
        expected = one.global_step(single, data)
        found = one.rank_step(mine, data[rank])
        assert math.isfinite(found[0]) == (step != 1 or rank == 0), (recipe, kind, bad, step)
        assert str(found) == str(expected[rank]), (recipe, kind, bad, step)  # NaN equals no NaN
        for model, optimizer in zip((single, mine), optimizers, strict=True):
            norm = one.whole([torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])])
            assert norm[0].isfinite() == (step != 1), (recipe, kind, bad, step)
            if not norm[0].isfinite():
                optimizer.zero_grad()
            one.update(model, optimizer)
        one.assert_same_model(mine, single, (recipe, kind, bad, step))
        assert all(b.isfinite().all() for b in mine.buffers())


def a_step_with_a_bad_value_that_is_not_skipped_makes_all_ranks_nan(rank, recipe, kind):
    """The parameters are NaN on all ranks, hence all later losses."""
    mine = parallel(kind, one.make(recipe))
    optimizer = one.adamw(mine)
    losses = []
    for step in range(3):
        data = one.batch(step, rank)
        if step == rank == 1:
            data = with_bad_value(data, math.nan)
        losses += one.rank_step(mine, [data])
        one.update(mine, optimizer)
    assert [math.isfinite(loss) for loss in losses] == [True, rank == 0, False]
    weights = torch.cat([w.detach().flatten() for w in one.whole(mine.parameters())])
    assert weights.isnan().any(), (recipe, kind)
    ranks = [torch.empty_like(weights) for _ in range(WORLD)]
    dist.all_gather(ranks, weights)
    assert all(torch.equal(r.nan_to_num(7.0), weights.nan_to_num(7.0)) for r in ranks)


def an_empty_batch_on_one_rank_trains(rank, recipe, kind):
    """As when no token reaches a rank: its amaxes are 0, its gradients too."""
    steps = []
    for step in range(3):
        x, g = one.batch(step, 1)
        rows = 0 if step != 1 else one.TOKENS
        steps.append([[one.batch(step, 0)], [(x[:rows], g[:rows])]])
    mine = parallel(kind, one.make(recipe))
    one.assert_same_training(rank, one.make(recipe), mine, steps, (recipe, kind))


def dies_in_mid_step(rank, port, kind, how, seconds, errors):
    """Train until rank 1 kills or stops itself, in the backward of its second step.

    Args:
        rank: of two.
        port: of the store of both processes.
        kind: see `parallel`.
        how: a signal. A killed process ends its connections; a stopped one keeps them.
        seconds: the timeout of collectives.
        errors: a queue for (rank, the error's text, the seconds until it was raised).
    """
    join_group(port, rank, WORLD, timeout=datetime.timedelta(seconds=seconds))
    model = one.make("delayed")
    layer, mine = model[2], parallel(kind, model)
    optimizer = one.adamw(mine)
    one.rank_step(mine, [one.batch(0, rank)])
    one.update(mine, optimizer)
    if rank == 1:
        layer.register_full_backward_hook(lambda *_: os.kill(os.getpid(), how))
    begin = time.monotonic()
    try:
        one.rank_step(mine, [one.batch(1, rank)])
        one.update(mine, optimizer)
    except RuntimeError as error:  # torch.distributed's errors are RuntimeErrors
        errors.put((rank, str(error), time.monotonic() - begin))
