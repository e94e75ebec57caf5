"""What must be true of models sharded by torch alone: FSDP1, and FSDP2 without a float8 gather.

The parameters are gathered in high precision and `Float8Linear` casts what it is given. Four
processes, two by two, take these claims; `test_fsdp1.py` starts them. A file of its own, because
spawned processes import it by name. See `one_process` for what equality means.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager, nullcontext

import one_process as one
import pytest
import torch
import torch.distributed as dist
from recompute import Checkpointed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

MICROBATCHES, BF16 = 2, torch.bfloat16
in_bf16 = functools.partial(torch.autocast, "cpu", BF16)


@functools.cache
def mesh():
    """Two groups of two ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def fsdp1(model, group=None, **options):
    """Sharded over pairs of ranks, every linear layer a unit of its own."""
    return FullyShardedDataParallel(
        model,
        process_group=group or mesh().get_group("shard"),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        **options,
    )


def fsdp2(model, over="shard", **options):
    """Sharded over pairs of ranks, or with ``over=None`` over all four, two by two."""
    options["mesh"] = mesh()[over] if isinstance(over, str) else over or mesh()
    for layer in list(model.modules()):
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


@contextmanager
def without_sync(model):
    """Gradient accumulation, as FSDP1 and FSDP2 spell it."""
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def steps_equal_one_process(
    rank,
    recipe,
    shard,
    ranks=2,
    autocast=nullcontext,
    microbatches=MICROBATCHES,
    steps=3,
    wrap=lambda m: m,
    compiles=False,
):
    """Losses, parameters, histories and scales, bit for bit, with gradient accumulation."""
    single, parallel = one.make(recipe), shard(one.make(recipe, wrap))
    forward = torch.compile(parallel, backend="eager") if compiles else parallel
    optimizers = one.adamw(single), one.adamw(parallel)
    for step in range(steps):
        data = [[one.batch(step, r, m) for m in range(microbatches)] for r in range(ranks)]
        with autocast():
            expected = one.global_step(single, data)
        others = functools.partial(without_sync, parallel)
        found = one.rank_step(forward, data[rank % ranks], others=others)
        assert found == expected[rank % ranks], (recipe, step, found, expected)
        one.update(single, optimizers[0])
        one.update(parallel, optimizers[1])
        with gathered(parallel):
            one.assert_same_model(parallel, single, (recipe, step))


def gathered(model):
    """FSDP1 shows whole parameters on request only."""
    if isinstance(model, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(model, writeback=False)
    return nullcontext()


def fsdp1_trains(rank, recipe, strategy):
    strategy = ShardingStrategy[strategy]
    steps_equal_one_process(rank, recipe, functools.partial(fsdp1, sharding_strategy=strategy))


def fsdp1_in_mixed_precision_trains_as_autocast_does(rank, recipe):
    """Without accumulation: FSDP1 accumulates in bfloat16, also for plain layers."""
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
    shard = functools.partial(fsdp1, mixed_precision=precision)
    steps_equal_one_process(rank, recipe, shard, autocast=in_bf16, microbatches=1)


def fsdp1_that_rounds_buffers_is_refused(rank):
    """Histories and scales in bfloat16 would be others, and kernels read them as float32."""
    model = fsdp1(one.make("delayed"), mixed_precision=MixedPrecision(BF16, BF16, BF16))
    with pytest.raises(TypeError, match="buffer_dtype"):
        one.rank_step(model, [one.batch(0, rank)])


def fsdp2_trains(rank, recipe, **options):
    steps_equal_one_process(rank, recipe, functools.partial(fsdp2, **options))


def fsdp2_in_mixed_precision_trains_as_autocast_does(rank, recipe):
    """Operands are rounded to the compute dtype first and cast then: equal bits in both."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    shard = functools.partial(fsdp2, mp_policy=policy)
    steps_equal_one_process(rank, recipe, shard, autocast=in_bf16)


def hsdp_trains(rank, recipe):
    """Sums over pairs that shard, then over pairs that replicate: the order of `one_process`."""
    steps_equal_one_process(rank, recipe, functools.partial(fsdp2, over=None), ranks=4)


def cpu_offload_trains(rank, recipe):
    """Pinned memory needs an accelerator."""
    policy = CPUOffloadPolicy(pin_memory=False)
    steps_equal_one_process(rank, recipe, functools.partial(fsdp2, offload_policy=policy))


def checkpointing_changes_nothing(rank, recipe, kind):
    wrap = functools.partial(Checkpointed, kind=kind)
    steps_equal_one_process(rank, recipe, fsdp2, wrap=wrap)


def uneven_shards_train(rank, recipe, kind, hidden):
    """5 x hidden and hidden x 5 weights on four ranks, some of which hold fewer rows, or none.

    All ranks read the same batch: four equal numbers add up, and divide by four, exactly.
    """
    width = 5
    shard = {
        "fsdp1": functools.partial(fsdp1, group=dist.group.WORLD),
        "fsdp2": functools.partial(fsdp2, over=mesh()._flatten("all")),
    }[kind]
    single, parallel = (one.make(recipe, width=width, hidden=hidden) for _ in range(2))
    parallel = shard(parallel)
    optimizers = one.adamw(single), one.adamw(parallel)
    for step in range(2):
        data = one.batch(step, 0, width=width)
        assert one.rank_step(parallel, [data]) == one.rank_step(single, [data]), (recipe, step)
        one.update(single, optimizers[0])
        one.update(parallel, optimizers[1])
        with gathered(parallel):
            one.assert_same_model(parallel, single, (recipe, kind, hidden, step))
