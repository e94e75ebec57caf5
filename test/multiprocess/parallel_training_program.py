"""Training under torch's own parallelism: DDP, FSDP1, FSDP2, HSDP and pipelines.

Parameters are gathered in high precision, and `Float8Linear` casts them. The reference is training
in one process: `one_process` says when every bit is equal. Checks run on two processes, or on four
that shard two by two.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import faults
import one_process as one
import pytest
import torch
import torch.distributed as dist
from assertions import error
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import float8.distributed.first_use  # noqa: F401  compares the ranks' layers
from float8 import convert_to_float8_training
from float8.config import RECIPES, DelayedScalingConfig

WORLD, BF16 = 2, torch.bfloat16
in_bf16 = functools.partial(torch.autocast, "cpu", BF16)
MICROBATCHES = (2, 2, 2)  # of each step


@functools.cache
def mesh():
    """All ranks; of four, two groups of two."""
    if dist.get_world_size() == 2:
        return init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def fsdp1(model, group=None, **options):
    """Shard over pairs of ranks, every linear layer a unit of its own."""
    return FullyShardedDataParallel(
        model,
        process_group=group or mesh().get_group("shard"),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        **options,
    )


def fsdp2(model, over="shard", **options):
    """Shard over pairs of ranks, or with ``over=None`` over all four, two by two."""
    options["mesh"] = mesh()[over] if isinstance(over, str) else over or mesh()
    for layer in list(model.modules()):
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


@contextmanager
def without_sync(model):
    """Accumulate gradients without a reduction."""
    if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def whole_parameters(model):
    """FSDP1 shows whole parameters on request only."""
    if isinstance(model, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(model, writeback=False)
    return nullcontext()


def steps_equal_one_process(
    rank,
    recipe,
    wrap,
    ranks=2,
    microbatches=MICROBATCHES,
    autocast=nullcontext,
    recompute=lambda model: model,
    backend=None,
):
    """Losses, parameters, histories and scales are equal, with gradient accumulation."""
    parallel = wrap(one.make(recipe, recompute))
    one.assert_same_training(
        rank,
        one.make(recipe),
        parallel,
        [
            [[one.batch(step, r, m) for m in range(count)] for r in range(ranks)]
            for step, count in enumerate(microbatches)
        ],
        recipe,
        forward=backend and torch.compile(parallel, backend=backend),
        without_sync=functools.partial(without_sync, parallel),
        autocast=autocast,
        whole_parameters=functools.partial(whole_parameters, parallel),
    )


# --- DDP on two processes


def ddp_trains(rank, recipe, options):
    # torch learns a static graph in the first backward, which must not be under no_sync.
    microbatches = (1, 2, 2) if options.get("static_graph") else MICROBATCHES
    wrap = functools.partial(DistributedDataParallel, **options)
    steps_equal_one_process(rank, recipe, wrap, microbatches=microbatches)


def ddp_with_checkpointing_trains(rank, recipe, kind):
    """Recomputed activations are cast with the first scales; an amax is recorded once."""
    recompute = functools.partial(Checkpointed, kind=kind)
    steps_equal_one_process(rank, recipe, DistributedDataParallel, recompute=recompute)


def compiled_fsdp2_trains(rank, recipe):
    steps_equal_one_process(rank, recipe, fsdp2, microbatches=(2, 2), backend="eager")


def ddp_keeps_the_amaxes_of_each_rank(rank):
    """DDP broadcasts buffers at every forward, which must not reach the amaxes."""
    model = one.make("delayed")
    parallel = DistributedDataParallel(model)
    peaks = []
    for microbatch, factor in enumerate((1000.0 if rank == 1 else 1.0, 1.0)):
        x, g = one.batch(0, rank, microbatch)
        peaks.append((factor * x).abs().max())
        one.loss_of(parallel, (factor * x, g)).backward()
    assert model[0].cast_input.current_amax == max(peaks)


def one_layer_equals_the_whole_batch_at_once(rank, recipe):
    """Where scales do not depend on the batch, only the order of sums differs, as without float8.

    Recipes: ``unit``, and ``delayed`` after its first sync. A unit-scaled weight gradient is
    multiplied by the rows of a call to the power -1/2. So R ranks, each with a share of the rows,
    get R ** 0.5 times the gradient. Adam divides by it; SGD does not.
    """
    off = {}
    for name in (recipe, None):
        single, model = (one.make(name, lambda m: nn.Sequential(m[0])) for _ in range(2))
        parallel = DistributedDataParallel(model)
        for step in range(2):
            xs, gs = zip(*(one.batch(step, r) for r in range(WORLD)), strict=True)
            gs = [torch.cat([g, g[:, :16]], 1) for g in gs]
            for each in (single, parallel):
                each.zero_grad()
            loss = one.loss_of(single, (torch.cat(xs), torch.cat(gs)))
            (loss / WORLD).backward()
            one.loss_of(parallel, (xs[rank], gs[rank])).backward()
            for each in (single, parallel):
                one.sync_float8_amax_and_scale_history(each)
        factor = WORLD**0.5 if name == "unit" else 1.0
        p, q = (next(m.parameters()).grad for m in (single, parallel))
        off[name] = error(q, p * factor) / p.norm().item()
    assert off[recipe] <= 4 * max(off[None], torch.finfo(torch.float32).eps), (recipe, off)


# --- sync on two processes


def scales_after_two_steps(rank, bad=None, interval=1):
    """All ranks' histories and scales; rank 1 reads one bad value in the second step."""
    delayed = DelayedScalingConfig(interval=interval)
    config = replace(RECIPES["delayed"], delayed_scaling=delayed)
    model = convert_to_float8_training(one.make(None), config=config)
    for step in range(2):
        x, g = one.batch(step, rank)
        if step == rank == 1 and bad is not None:  # on rank 0 gloo's MAX would keep a NaN
            x[0, 0] = bad
        one.loss_of(model, (x, g)).backward()
        one.sync_float8_amax_and_scale_history(model)
    mine = torch.cat([b.reshape(-1) for b in model.buffers()])
    ranks = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(ranks, mine)
    return ranks


def ranks_end_a_sync_with_equal_finite_scales(rank, bad, interval=1):
    ranks = scales_after_two_steps(rank, bad, interval)
    assert torch.equal(*ranks)
    assert ranks[0].isfinite().all()


def a_missing_all_reduce_is_found(rank):
    """A planted fault: every rank has its own scales."""
    with faults.missing_all_reduce():
        assert not torch.equal(*scales_after_two_steps(rank))
        with pytest.raises(AssertionError, match="buffers"):
            ddp_trains(rank, "delayed", {})


# --- pipelines of two processes

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
PIPELINE_MICROBATCHES = 4


def halves(model):
    """The two stages: a linear layer and its activation; another linear layer."""
    return nn.Sequential(*model[:2]), nn.Sequential(model[2])


@functools.cache
def own_stage():
    """The ranks that hold this rank's layers: here itself alone."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))["data"]


def examples(rank):
    """Example inputs and outputs of a stage in a microbatch.

    Without them torch (2.13; not 2.11) runs forward and backward of each stage on uninitialised
    memory in training mode, and a delayed cast would record its amaxes.
    """
    ends = [
        torch.zeros(one.TOKENS, width, requires_grad=width == one.HIDDEN or rank == 1)
        for width in (one.WIDTH, one.HIDDEN, one.WIDTH)
    ]
    return ends[rank], ends[rank + 1]


def a_pipeline_trains(rank, recipe, schedule, steps=2):
    """Losses, gradients and parameters: the same microbatches in the same order."""
    single, mine = one.make(recipe), halves(one.make(recipe))[rank]
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"), *examples(rank))
    loss_fn = lambda y, g: (y * g).sum()  # noqa: E731
    parallel = SCHEDULES[schedule](stage, PIPELINE_MICROBATCHES, loss_fn=loss_fn)
    optimizers = one.adamw(single), one.adamw(mine)
    for step in range(steps):
        data = [one.batch(step, 0, m) for m in range(PIPELINE_MICROBATCHES)]
        expected = one.rank_step(single, data)
        for p in single.parameters():
            p.grad /= PIPELINE_MICROBATCHES  # as schedules do
        x, g = (torch.cat(parts) for parts in zip(*data, strict=True))
        found = []
        parallel.step(*([x] if rank == 0 else []), target=g, losses=found)
        if rank == 1:
            assert [loss.item() for loss in found] == expected, (recipe, schedule, step)
        one.update(single, optimizers[0])
        one.update(mine, optimizers[1], own_stage())
        one.assert_same_model(mine, halves(single)[rank], (recipe, schedule, step))


def a_pipeline_without_a_group_is_refused(rank):
    """Else scales of one stage would depend on the amaxes of another stage's layers."""
    mine = halves(one.make("delayed"))[rank]
    with pytest.raises(RuntimeError, match="pipeline stages"):
        one.sync_float8_amax_and_scale_history(mine)


# --- FSDP on four processes


def fsdp1_trains(rank, recipe, strategy):
    strategy = ShardingStrategy[strategy]
    steps_equal_one_process(rank, recipe, functools.partial(fsdp1, sharding_strategy=strategy))


def fsdp1_in_mixed_precision_trains_as_autocast_does(rank, recipe):
    """Without accumulation: FSDP1 accumulates in bfloat16, also for plain layers."""
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
    wrap = functools.partial(fsdp1, mixed_precision=precision)
    steps_equal_one_process(rank, recipe, wrap, microbatches=(1, 1, 1), autocast=in_bf16)


def fsdp1_that_rounds_buffers_is_refused(rank):
    """Kernels read histories and scales as float32, and bfloat16 would change them."""
    model = fsdp1(one.make("delayed"), mixed_precision=MixedPrecision(BF16, BF16, BF16))
    with pytest.raises(TypeError, match="buffer_dtype"):
        one.rank_step(model, [one.batch(0, rank)])


def fsdp2_trains(rank, recipe):
    steps_equal_one_process(rank, recipe, fsdp2)


def fsdp2_in_mixed_precision_trains_as_autocast_does(rank, recipe):
    """Both round operands to the compute dtype first and cast then."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    steps_equal_one_process(
        rank, recipe, functools.partial(fsdp2, mp_policy=policy), autocast=in_bf16
    )


def hsdp_trains(rank, recipe):
    """Sums over pairs that shard, then over pairs that replicate: the order of `one_process`."""
    steps_equal_one_process(rank, recipe, functools.partial(fsdp2, over=None), ranks=4)


def cpu_offload_trains(rank, recipe):
    policy = CPUOffloadPolicy(pin_memory=False)  # pinned memory needs an accelerator
    steps_equal_one_process(rank, recipe, functools.partial(fsdp2, offload_policy=policy))


def fsdp2_with_checkpointing_trains(rank, recipe, kind):
    recompute = functools.partial(Checkpointed, kind=kind)
    steps_equal_one_process(rank, recipe, fsdp2, recompute=recompute)


def uneven_shards_train(rank, recipe, kind, hidden):
    """5 x hidden and hidden x 5 weights on four ranks, some of which hold fewer rows, or none.

    All ranks read the same batch: four equal numbers add up, and divide by four, exactly.
    """
    width = 5
    wrap = {
        "fsdp1": functools.partial(fsdp1, group=dist.group.WORLD),
        "fsdp2": functools.partial(fsdp2, over=mesh()._flatten("all")),
    }[kind]
    single, parallel = (one.make(recipe, width=width, hidden=hidden) for _ in range(2))
    parallel = wrap(parallel)
    one.assert_same_training(
        rank,
        single,
        parallel,
        [[[one.batch(step, 0, width=width)]] * 4 for step in range(2)],
        (recipe, kind, hidden),
        whole_parameters=functools.partial(whole_parameters, parallel),
    )
