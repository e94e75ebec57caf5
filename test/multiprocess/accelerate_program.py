"""`prepare_float8` on two processes; `test_accelerate.py` starts them.

Accelerate (1.15) shards with FSDP2 on accelerators only. `accelerator_of` makes it take the CPU for
an accelerator, with gloo between the ranks, so that its own code runs.
"""

from __future__ import annotations

import os
import tempfile

import one_process as one
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import nn

import float8.optim
from float8.distributed.sharded_weight import ShardedWeight
from float8.integrations.accelerate import prepare_float8

WORLD, MICROBATCHES = 2, 2


def accelerator_of(rank, fsdp=None, **options):
    """An Accelerator in an existing process group; ``fsdp``: options of the FSDP2 plugin."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    os.environ.update({k: str(v) for k, v in ranks.items()}, MASTER_ADDR="127.0.0.1")
    for name in [n for n in os.environ if "FSDP" in n]:  # an earlier accelerator has set them
        del os.environ[name]
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    if fsdp is not None:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **fsdp)
    return Accelerator(cpu=True, gradient_accumulation_steps=MICROBATCHES, **options)


def make(seed=0, tied=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    if tied:
        model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32, bias=False))
        model[2].weight = model[0].weight
    return model


def prepared(rank, recipe, fsdp=None, seed=0, tied=False, build=torch.optim.AdamW, **options):
    """(accelerator, model, optimizer); the optimizer is built before conversion."""
    accelerator = accelerator_of(rank, fsdp, **options)
    model = make(seed, tied)
    optimizer = build(model.parameters(), lr=0.01)
    config = one.convert(make(), recipe)[0].config
    return accelerator, *prepare_float8(accelerator, model, optimizer, config)


def train(accelerator, model, optimizer, batches, clip=1e9):
    """Train; return the losses of the microbatches. The default clips at a norm never reached."""
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = one.loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def batches_of(rank, steps):
    """The microbatches of a rank's steps."""
    return [one.batch(step, rank, i) for step in steps for i in range(MICROBATCHES)]


def trains_like_one_process(rank, recipe, fsdp=None, tied=False):
    """Losses, parameters and histories, bit for bit."""
    accelerator, model, optimizer = prepared(rank, recipe, fsdp, tied=tied)
    single = one.convert(make(tied=tied), recipe.removeprefix(one.GATHERED))
    expected = one.adamw(single)
    for step in range(3):
        data = [
            [(x, g / MICROBATCHES) for x, g in (one.batch(step, r, m) for m in range(MICROBATCHES))]
            for r in range(WORLD)
        ]
        losses = one.global_step(single, data)[rank]
        found = train(accelerator, model, optimizer, batches_of(rank, [step]))
        assert found == [loss * MICROBATCHES for loss in losses], (recipe, fsdp, step)
        one.update(single, expected)
        one.assert_same_model(accelerator.unwrap_model(model), single, (recipe, fsdp, step))
    if recipe.startswith(one.GATHERED):
        assert isinstance(model[0].weight._local_tensor, ShardedWeight)


def resumes(rank, recipe, fsdp=None, mixed_precision="bf16", build=torch.optim.AdamW):
    """Another model and optimizer resume from a checkpoint to the same losses."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    options = {"mixed_precision": mixed_precision, "build": build}
    first = prepared(rank, recipe, fsdp, **options)
    train(*first, batches_of(rank, range(2)))
    first[0].save_state(folder[0])
    expected = train(*first, batches_of(rank, range(2, 4)))
    second = prepared(rank, recipe, fsdp, seed=1, **options)
    dist.barrier()  # rank 0 has written
    second[0].load_state(folder[0])
    assert train(*second, batches_of(rank, range(2, 4))) == expected, (recipe, fsdp)


def float8_optimizer_resumes(rank, recipe, fsdp):
    """With moments in float8."""
    resumes(rank, recipe, fsdp, build=lambda p, lr: float8.optim.AdamW(p, lr=lr, min_size=1))


def a_bfloat16_model_is_upcast(rank):
    """As Accelerate does for FSDP2 in mixed precision; it could not after `prepare_float8`."""
    losses = []
    for dtype in (torch.bfloat16, torch.float32):
        accelerator = accelerator_of(rank, {}, mixed_precision="bf16")
        model = make().bfloat16().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        config = one.convert(make(), one.GATHERED + "tensorwise")[0].config
        model, optimizer = prepare_float8(accelerator, model, optimizer, config)
        losses.append(train(accelerator, model, optimizer, batches_of(rank, range(2))))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert losses[0] == losses[1]


def clips_and_writes_plain_tensors(rank, recipe):
    """Norms over shards are those of the whole; save_model writes what a plain model loads."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    accelerator, model, _ = prepared(rank, recipe, {})
    x, g = one.batch(0, 0)
    accelerator.backward((model(x) * g).sum())
    gradients = one.whole(p.grad for p in model.parameters())
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    expected = torch.nn.utils.get_total_norm(gradients)
    torch.testing.assert_close(one.whole([norm])[0], expected)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(one.whole([p.grad])[0], gradient * (0.5 / expected))
    with float8.high_precision(model):
        accelerator.save_model(model, folder[0])
    dist.barrier()
    from safetensors.torch import load_file

    plain = make(seed=1)
    plain.load_state_dict(load_file(f"{folder[0]}/model.safetensors"))
    for a, b in zip(one.whole(model.parameters()), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def refuses_what_would_be_lost(rank):
    """Optimizer states would be lost, and Accelerate cannot distribute buffers."""
    accelerator = accelerator_of(rank, {})
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 32)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"states of 4 parameters.*load_state"):
        prepare_float8(accelerator, model, optimizer)
    accelerator = accelerator_of(rank, {"cpu_ram_efficient_loading": True})
    model = make()
    with pytest.raises(ValueError, match="cpu_ram_efficient_loading"):
        prepare_float8(accelerator, model, torch.optim.AdamW(model.parameters()), "delayed")
    assert type(model[0]) is nn.Linear
