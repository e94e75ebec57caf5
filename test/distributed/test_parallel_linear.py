"""Tensor-parallel layers on a fake process group: conversion, layouts and refusals."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from float8 import (
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    convert_from_float8_training,
    convert_to_float8_training,
    high_precision,
)
from float8.distributed.parallel_linear import Float8ParallelLinear, ParallelLinear
from float8.distributed.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def _layer(mesh, style, layer=None):
    model = nn.Sequential(layer or nn.Linear(32, 64))
    return parallelize_module(model, mesh, {"0": style})


def test_conversion_and_back_keep_the_parameters_and_the_layout(mesh):
    model = _layer(mesh, Float8RowwiseParallel(output_layouts=Shard(1)))
    weight = model[0].weight
    assert isinstance(weight, DTensor) and weight.placements == (Shard(1),)
    assert type(model[0]) is ParallelLinear
    convert_to_float8_training(model)
    assert type(model[0]) is Float8ParallelLinear and model[0].weight is weight
    assert "rowwise over 4 ranks, S(-1) -> S(1)" in str(model).replace("Shard(dim=-1)", "S(-1)")
    convert_from_float8_training(model)
    assert type(model[0]) is ParallelLinear and model[0].weight is weight


def test_a_converted_layer_stays_the_same_object_and_keeps_its_state_dict_keys(mesh):
    layer = Float8Linear(32, 64, config=Float8LinearConfig.from_recipe_name("delayed"))
    keys, buffers = list(layer.state_dict()), list(layer.buffers())
    model = _layer(mesh, Float8ColwiseParallel(), layer)
    assert model[0] is layer and list(layer.state_dict()) == keys
    # Scales are numbers that every rank has, not DTensors.
    assert all(a is b for a, b in zip(layer.buffers(), buffers, strict=True))
    copied = copy.deepcopy(model)
    assert copied[0].layout is layer.layout and copied[0].weight is not layer.weight


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("style", ["Float8ColwiseParallel", "PrepareFloat8ModuleInput"])
def test_a_style_without_a_conversion_warns(mesh, style, compiles):
    """Once, by Python's filter; layers that are converted do not."""
    model = nn.Sequential(nn.Linear(32, 64))
    whole = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
    plan = {
        "Float8ColwiseParallel": {"0": Float8ColwiseParallel()},
        "PrepareFloat8ModuleInput": PrepareFloat8ModuleInput(**whole, use_local_output=True),
    }
    parallelize_module(model, mesh, plan[style])
    x = torch.randn(16, 32)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiles else model
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        run(x), run(x)
    (warning,) = warned
    assert style in str(warning.message)
    assert "call convert_to_float8_training(model)" in str(warning.message)
    convert_to_float8_training(model)(x)
    with high_precision(model):
        model(x)


GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
REFUSED = [
    (nn.Embedding(8, 8), {}, r"Embedding: only nn\.Linear and Float8Linear"),
    (nn.Linear(32, 64), {"output_layouts": Partial()}, "output_layouts must be Replicate"),
    (Float8Linear(32, 64, config=GATHERED), {}, "leave it off here"),
]


@pytest.mark.parametrize("style", [Float8ColwiseParallel, Float8RowwiseParallel])
@pytest.mark.parametrize(("layer", "options", "message"), REFUSED)
def test_what_is_not_parallelized(mesh, style, layer, options, message):
    with pytest.raises(ValueError, match=f"{style.__name__}: .*{message}"):
        _layer(mesh, style(**options), layer)


def test_inputs_that_do_not_fit_are_refused_by_the_layers_name(mesh):
    model = convert_to_float8_training(_layer(mesh, Float8RowwiseParallel()))
    with pytest.raises(ValueError, match=r"0: input has shape \(4, 32\), expected \(..., 8\)"):
        model(torch.randn(4, 32))
    model = convert_to_float8_training(_layer(mesh, Float8ColwiseParallel(input_layouts=Shard(0))))
    x = Float8Tensor.from_high_precision(torch.randn(4, 32), torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="dequantize"):
        model(x)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    with pytest.raises(ValueError, match="0: the input lies on"):
        model(DTensor.from_local(torch.randn(4, 32), other, [Replicate()], run_check=False))
