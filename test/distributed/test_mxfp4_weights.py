"""MXFP4 weights of sharded models: each is projected as in one process, and saved as such."""

import copy
from dataclasses import replace

import mxfp4_oracle
import pytest
import torch
import torch.distributed as dist
from hand_written import write
from parallel_forms import FORMS, trains
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from float8 import (
    CastConfig,
    Float8ColwiseParallel,
    Float8LinearConfig,
    Float8RowwiseParallel,
    ScaleFormat,
    convert_to_float8_training,
)
from float8.checkpoints import load, save_pretrained
from float8.config import RECIPES

POW2 = CastConfig(scale_format=ScaleFormat.POWER_OF_TWO)
EXACT = Float8LinearConfig(POW2, POW2, POW2, mxfp4_weights=True)


def model_of(recipe="blockwise"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    config = replace(RECIPES[recipe], mxfp4_weights=True)
    return convert_to_float8_training(model, config=config)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("form", ["FSDP2", "FSDP2, mixed", "FSDP2, columns", "DDP"])
def test_training_has_the_bits_of_one_process(rank, form, recipe):
    trains(rank, recipe, single=model_of(recipe), parallel=model_of(recipe), **FORMS[form])


@pytest.mark.ranks(2)
def test_a_sharded_model_saves_the_projected_weights(rank, tmp_path):
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    model = FORMS["FSDP2"]["wrap"](model_of())
    save_pretrained(model, f"{folder[0]}/it")
    tensors = load_file(f"{folder[0]}/it/model.safetensors")
    codes, scale = mxfp4_oracle.encode(model_of()[0].weight.detach())
    assert torch.equal(tensors["0.weight_packed"], mxfp4_oracle.pack(codes))
    assert torch.equal(tensors["0.weight_scale"], scale)


class Experts(nn.Module):
    """A stack (E, K, N), as gpt-oss has it."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(3, 96, 64))


@pytest.mark.ranks(2)
def test_sharded_stacks_load_their_experts(rank, tmp_path):
    w = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0))
    codes, scale = mxfp4_oracle.encode(w)
    blocks = mxfp4_oracle.pack(codes).view(3, 64, 3, 16)
    write(tmp_path, {"up_blocks": blocks, "up_scales": scale}, {"quant_method": "mxfp4"})
    for placement in (0, 1, 2):
        model = fully_shard(Experts(), shard_placement_fn=lambda p, dim=placement: Shard(dim))
        loaded = load(model, tmp_path).up.full_tensor()
        assert torch.equal(loaded, mxfp4_oracle.project(w).mT), placement


def integers(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


@pytest.mark.ranks(2)
def test_layers_of_tensor_parallelism_project_their_parts(rank):
    """Sums of small integers are exact in any order; 1.25 times an integer is not MXFP4."""
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False))
    with torch.no_grad():
        for seed, p in enumerate(model.parameters()):
            p.copy_(integers(*p.shape, seed=seed) * 1.25)
    one = convert_to_float8_training(copy.deepcopy(model), config=EXACT)
    mesh = init_device_mesh("cpu", (2,))
    styles = {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()}
    parallel = convert_to_float8_training(
        parallelize_module(copy.deepcopy(model), mesh, styles), config=EXACT
    )
    x, g = integers(16, 32, seed=7), integers(16, 32, seed=8)
    for each in (one, parallel):
        each(x).backward(g)
    assert torch.equal(parallel(x), one(x))
    for mine, its in zip(parallel.parameters(), one.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), its.grad)
    plain = convert_to_float8_training(
        parallelize_module(model, mesh, {"0": ColwiseParallel()}), config=EXACT
    )
    with pytest.raises(ValueError, match=r"use float8\.Float8Colwise"):
        plain(x)
