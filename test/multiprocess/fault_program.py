"""What must be true of two processes when something goes wrong on one of them.

The claims are about values (NaN, infinities, empty batches); the functions at the end are what
processes run that have to die. `test_interruptions.py` starts both. A file of its own, because
spawned processes import it by name.
"""

from __future__ import annotations

import datetime
import math
import os
import time

import one_process as one
import torch
import torch.distributed as dist
from fsdp1_program import fsdp2
from processes import meet
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def parallel(kind, model):
    """The model under DDP, or sharded."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    return fsdp2(model, init_device_mesh("cpu", (WORLD,)))


def spoiled(batch, bad):
    """A batch with one bad value in its input."""
    x = batch[0].clone()
    x[0, 0] = bad
    return x, batch[1]


def a_bad_value_is_seen_by_all_and_can_be_skipped(rank, recipe, kind, bad):
    """Rank 1 reads one bad value in step 1: gradients are not finite anywhere, scales are.

    Every rank then decides alike, by its own gradients, to skip that update, and ends with the bits
    of one process that does the same.
    """
    single, mine = one.make(recipe), parallel(kind, one.make(recipe))
    optimizers = one.adamw(single), one.adamw(mine)
    for step in range(4):
        data = [[one.batch(step, r)] for r in range(WORLD)]
        if step == 1:
            data[1] = [spoiled(data[1][0], bad)]
        expected = one.global_step(single, data)
        found = one.rank_step(mine, data[rank])
        assert math.isfinite(found[0]) == (step != 1 or rank == 0), (recipe, kind, bad, step)
        assert str(found) == str(expected[rank]), (recipe, kind, bad, step)  # NaN reads "nan"
        for model, optimizer in zip((single, mine), optimizers, strict=True):
            norm = one.whole([torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])])
            assert norm[0].isfinite() == (step != 1), (recipe, kind, bad, step)
            if not norm[0].isfinite():
                optimizer.zero_grad()
            one.update(model, optimizer)
        one.assert_same_model(mine, single, (recipe, kind, bad, step))
        assert all(b.isfinite().all() for b in mine.buffers())


def a_bad_value_that_is_not_skipped_ends_every_rank_alike(rank, recipe, kind):
    """No rank trains on by itself: the parameters, hence all losses behind it, are NaN on all."""
    mine = parallel(kind, one.make(recipe))
    optimizer = one.adamw(mine)
    losses = []
    for step in range(3):
        data = one.batch(step, rank)
        losses += one.rank_step(mine, [spoiled(data, math.nan) if step == rank == 1 else data])
        one.update(mine, optimizer)
    assert [math.isfinite(loss) for loss in losses] == [True, rank == 0, False]
    weights = torch.cat([w.detach().flatten() for w in one.whole(mine.parameters())])
    assert weights.isnan().any(), (recipe, kind)
    ranks = [torch.empty_like(weights) for _ in range(WORLD)]
    dist.all_gather(ranks, weights)
    assert all(torch.equal(r.nan_to_num(7.0), weights.nan_to_num(7.0)) for r in ranks)


def an_empty_batch_on_one_rank_is_a_batch(rank, recipe, kind):
    """As when no token reaches a rank; its amaxes are 0, its gradients too."""
    single, mine = one.make(recipe), parallel(kind, one.make(recipe))
    optimizers = one.adamw(single), one.adamw(mine)
    for step in range(3):
        x, g = one.batch(step, 1)
        rows = 0 if step != 1 else one.TOKENS
        data = [[one.batch(step, 0)], [(x[:rows], g[:rows])]]
        expected = one.global_step(single, data)
        assert one.rank_step(mine, data[rank]) == expected[rank], (recipe, kind, step)
        one.update(single, optimizers[0])
        one.update(mine, optimizers[1])
        one.assert_same_model(mine, single, (recipe, kind, step))


# --- processes that die


def dies_in_mid_step(rank, port, kind, how, seconds, told):
    """Trains until rank 1 kills or stops itself, in the backward of its second step.

    Args:
        rank: of two.
        port: where they meet.
        kind: see `parallel`.
        how: a signal. Killed, its connections end; stopped, they are silent.
        seconds: the patience of collectives.
        told: a queue for (rank, the exception's type, seconds that it took to come).
    """
    meet(port, rank, WORLD, timeout=datetime.timedelta(seconds=seconds))
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
        told.put((rank, str(error), time.monotonic() - begin))
