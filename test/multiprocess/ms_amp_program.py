"""`ms_amp` with a wrapped model on two processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from float8 import Float8LinearConfig, convert_to_float8_training
from float8.convert.inference import convert_to_float8_inference, hide_from_ddp
from float8.distributed.sharded_weight import ShardedWeight
from float8.ms_amp.ms_amp import ms_amp
from float8.optim import AdamW, Moment


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> tuple[float, float]:
    """The mean losses of all ranks at the first and the last of 15 steps."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(64, 64, generator=generator)
    wanted = torch.sin(x.roll(3, 1))
    losses = []
    for _ in range(15):
        loss = (model(x).float() - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    both = torch.stack([losses[0], losses[-1]])
    dist.all_reduce(both)
    return both[0].item(), both[1].item()


def ddp_joins_moments_and_communication(rank: int) -> None:
    model = DistributedDataParallel(convert_to_float8_training(model_of()))
    model, optimizer = ms_amp(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "O2")
    with torch.autocast("cpu", torch.bfloat16):
        first, last = trained(model, optimizer, rank)
    assert last < 0.7 * first, (first, last)
    weight = model.module[0].weight
    assert weight.dtype == weight.grad.dtype == torch.float32
    state = optimizer.state[weight]
    assert (state["exp_avg"].kind, state["exp_avg_sq"].kind) == ("float8", "float16")
    assert model.ms_amp.communication.report()
    assert not model.ms_amp.weights
    same = weight.detach().clone()
    dist.broadcast(same, 0)
    assert torch.equal(same, weight)
    other = DistributedDataParallel(convert_to_float8_training(model_of()))
    with pytest.raises(ValueError, match=r"O3 of a wrapped model is FSDP2.*level O2"):
        ms_amp(other, torch.optim.AdamW(other.parameters()), "O3")


def fsdp2_joins_moments_and_communication(rank: int) -> None:
    for level, gathered in (("O1", False), ("O3", True)):
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathered)
        model = convert_to_float8_training(model_of(), config=config)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model, new = ms_amp(model, optimizer, level, min_size=0)
        assert type(new) is AdamW
        first, last = trained(model, new, rank)
        assert last < 0.7 * first, (level, first, last)
        weight = model[0].weight
        assert isinstance(weight, DTensor)
        assert isinstance(weight.to_local(), ShardedWeight) == gathered
        assert isinstance(new.state[weight]["exp_avg"], Moment) == (level == "O3")


def adapters_over_frozen_float8_weights_train_under_ddp(rank: int) -> None:
    def model() -> nn.Sequential:
        base = convert_to_float8_inference(model_of())
        torch.manual_seed(1)
        return nn.Sequential(base, nn.Linear(64, 8))

    alone = model()
    shared = model()
    hide_from_ddp(shared)
    wrapped = DistributedDataParallel(shared)
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(2))
    wrapped(x[rank]).square().mean().backward()
    for half in x:
        (alone(half).square().mean() / 2).backward()
    torch.testing.assert_close(shared[1].weight.grad, alone[1].weight.grad)
    direct = convert_to_float8_inference(nn.Sequential(nn.Linear(64, 16), nn.LayerNorm(16)))
    DistributedDataParallel(direct)  # conversion has hidden its weights already


def layers_are_converted_before_the_wrapper(rank: int) -> None:
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.AdamW(model.parameters())
    for options in ({}, {"config": Float8LinearConfig()}):
        with pytest.raises(ValueError, match=r"convert it first, .* then wrap"):
            ms_amp(model, optimizer, "O1", **options)
    # Inside another module or a compiled one, DDP would not reduce gradients of new weights.
    for outer in (nn.Sequential(model), torch.compile(model)):
        with pytest.raises(ValueError, match=r"DistributedDataParallel.*give ms_amp the wrapper"):
            ms_amp(outer, torch.optim.AdamW(outer.parameters()), "O1")
    flat = FullyShardedDataParallel(model_of(), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"shard with fully_shard"):
        ms_amp(flat, torch.optim.AdamW(flat.parameters()), "O1")
    plain = convert_to_float8_training(model_of())
    fully_shard(plain)
    with pytest.raises(ValueError, match=r"gathered in float8.*before fully_shard"):
        ms_amp(plain, torch.optim.AdamW(plain.parameters()), "O3")
