"""The forms of data parallelism that torch has, each trained to the bits of one process.

`one_process` says when every bit is equal: two ranks, or pairs of ranks in pairs.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import one_process as one
import torch
from recompute import KINDS, Checkpointed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as ddp

import float8
from float8 import after_step, sync_float8_amax_and_scale_history

WORLD, BF16, F32 = 2, torch.bfloat16, torch.float32
MICROBATCHES = (2, 1, 2)  # of each step
in_bf16 = functools.partial(torch.autocast, "cpu", BF16)


def mesh():
    """All ranks in pairs: one pair, or two."""
    pairs = torch.distributed.get_world_size() // 2
    return init_device_mesh("cpu", (pairs, 2), mesh_dim_names=("replicate", "shard"))


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


def fsdp2(model, over=None, **options):
    """Shard over pairs of ranks, or over another mesh."""
    options["mesh"] = over or mesh()["shard"]
    for layer in list(model.modules()):
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def from_meta(model):
    """Shard a model on the meta device, and fill it afterwards."""
    values = [p.detach() for p in model.parameters()]
    sharded = fsdp2(model.to("meta")).to_empty(device="cpu")
    for p, value in zip(sharded.parameters(), values, strict=True):
        p.detach().copy_(distribute_tensor(value, p.device_mesh, p.placements))
    return sharded


def in_backward(model):
    """An optimizer for each sharded parameter, which steps as soon as the gradient is complete."""
    if not isinstance(model, FSDPModule):
        return one.adamw(model)
    for p in model.parameters():
        own = torch.optim.AdamW([p], lr=0.01)
        p.register_post_accumulate_grad_hook(lambda p, own=own: (own.step(), own.zero_grad()))
    return SimpleNamespace(step=lambda: None, zero_grad=lambda: None)


def by_columns(p):
    return Shard(1) if p.dim() == 2 else Shard(0)


def form(wrap, options=None, **others):
    return {"wrap": functools.partial(wrap, **(options or {})), **others}


# The arguments of `trains`.
FORMS = {
    "DDP": form(ddp),
    "DDP, views": form(ddp, {"gradient_as_bucket_view": True}),
    # torch learns a static graph in the first backward, which must not be under no_sync.
    "DDP, static": form(ddp, {"static_graph": True}, microbatches=(1, 2, 2)),
    "FSDP1": form(fsdp1),
    "FSDP1, gradients": form(fsdp1, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    # Without accumulation: FSDP1 accumulates in bfloat16, also for plain layers.
    "FSDP1, mixed": form(
        fsdp1,
        {"mixed_precision": MixedPrecision(BF16, F32)},
        microbatches=(1, 1, 1),
        autocast=in_bf16,
    ),
    "FSDP2": form(fsdp2),
    # No scale is found before the next gather, and multi-tensor steps count no version.
    "FSDP2, foreach": form(
        fsdp2,
        end_step=sync_float8_amax_and_scale_history,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), 0.01, foreach=True),
    ),
    "FSDP2, compiled": form(fsdp2, microbatches=(2, 2), backend="eager"),
    "FSDP2, mixed": form(fsdp2, {"mp_policy": MixedPrecisionPolicy(BF16, F32)}, autocast=in_bf16),
    "FSDP2, kept": form(fsdp2, {"reshard_after_forward": False}),
    "FSDP2, kept for a step": form(fsdp2, {"reshard_after_forward": False}, keeps=True),
    "FSDP2, columns": form(fsdp2, {"shard_placement_fn": by_columns}),
    "FSDP2, on CPUs": form(fsdp2, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "FSDP2, from meta": form(from_meta),
    "FSDP2, in backward": form(fsdp2, microbatches=(1, 1, 1), optimizer=in_backward),
    "FSDP2, float8.optim": form(fsdp2, optimizer=lambda m: float8.optim.SGD(m.parameters(), 0.01)),
    # Sums over pairs that shard, then over pairs that replicate: the order of `one_process`.
    "HSDP": {"wrap": lambda model: fsdp2(model, mesh()), "ranks": 4},
    **{
        f"{name}, {kind}": form(wrap, recompute=functools.partial(Checkpointed, kind=kind))
        for name, wrap in (("DDP", ddp), ("FSDP2", fsdp2))
        for kind in KINDS
    },
}


@contextmanager
def without_sync(model, keeps=False):
    """Accumulate gradients without a reduction; FSDP2 ``keeps`` its weights gathered."""
    if isinstance(model, (ddp, FullyShardedDataParallel)):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(not keeps)
    yield
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)


def whole_parameters(model):
    """FSDP1 shows whole parameters on request only."""
    if isinstance(model, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(model, writeback=False)
    return nullcontext()


def trains(
    rank, recipe, wrap, ranks=2, microbatches=MICROBATCHES, recompute=lambda model: model,
    backend=None, single=None, parallel=None, steps=None, keeps=False, **options,
):  # fmt: skip
    """Losses, parameters, histories and scales equal those of one process, with accumulation.

    Args:
        rank: of two or four.
        recipe: see `one_process.convert`; one process gathers nothing.
        wrap: makes the model parallel.
        ranks: that have data of their own.
        microbatches: of each step.
        recompute: around the model.
        backend: compiles the parallel model.
        single, parallel: in place of those of `one_process.make`.
        steps: in place of batches that all differ.
        keeps: whether FSDP2 keeps weights gathered for the microbatches of a step.
        options: of `one_process.assert_same_training`.
    """
    parallel = wrap(parallel or one.make(recipe, recompute))
    one.assert_same_training(
        rank,
        single or one.make(recipe and recipe.removeprefix(one.GATHERED)),
        parallel,
        steps
        or [
            [[one.batch(step, r, m) for m in range(count)] for r in range(ranks)]
            for step, count in enumerate(microbatches)
        ],
        recipe,
        forward=backend and torch.compile(parallel, backend=backend),
        without_sync=functools.partial(without_sync, parallel, keeps),
        whole_parameters=functools.partial(whole_parameters, parallel),
        **{"end_step": after_step, **options},
    )
