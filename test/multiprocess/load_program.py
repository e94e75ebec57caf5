"""Models that fully_shard has sharded load float8 checkpoints: each rank reads its part."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from assertions import assert_bitwise
from hand_written import Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import float8
from float8 import Float8LinearConfig, convert_to_float8_inference, convert_to_float8_training
from float8.checkpoints import load
from float8.checkpoints import loading as parameters

TOKENS = torch.randint(0, 40, (16,), generator=torch.Generator().manual_seed(3))


def config_of(recipe: str, **options: Any) -> Float8LinearConfig:
    return dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), **options)


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model.up)
    return fully_shard(model)


def assert_same_values(model: nn.Module, whole: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        plain = getattr(full, "plain", full).detach()
        assert_bitwise(plain, whole.get_parameter(name).detach(), replay=name)


def check_shards(rank: int, folder: str, recipe: str) -> None:
    """Rows are split between the ranks anywhere: 272 and 144 of them, in blocks of 128."""
    whole = load(Block(seed=2), folder)
    config = None if recipe == "plain" else config_of(recipe)
    model = Block(seed=3)
    if config is not None:
        model = convert_to_float8_training(model, config=config)
        whole = convert_to_float8_training(whole, config=config)
    model = sharded(model)
    load(model, folder)
    assert_same_values(model, whole)
    assert_bitwise(model(TOKENS), whole(TOKENS))


def check_gathered_in_float8(rank: int, folder: str) -> None:
    config = config_of("delayed", enable_fsdp_float8_all_gather=True)
    whole = convert_to_float8_training(Block(seed=2), config=config_of("delayed"))
    load(whole, folder)
    model = sharded(convert_to_float8_training(Block(seed=3), config=config))
    load(model, folder)
    assert_same_values(model, whole)
    model(TOKENS).sum().backward()
    float8.after_step(model)


def check_meta(rank: int, folder: str) -> None:
    with torch.device("meta"):
        model = sharded(Block())
    whole = load(Block(seed=2), folder)
    assert_same_values(load(model, folder), whole)
    assert_bitwise(model(TOKENS), whole(TOKENS))


def check_two_dimensions(rank: int, folder: str) -> None:
    """Rows split by tensor parallelism and again by FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = Block(seed=3)
    parallelize_module(model.up, mesh["model"], ColwiseParallel())
    fully_shard(model, mesh=mesh["data"])
    load(model, folder)
    assert_same_values(model, load(Block(seed=2), folder))


def check_expert_parallel(rank: int, folder: str, recipe: str) -> None:
    """Experts that start as NaN: each rank has its own half of each stack after it."""
    from published_models import convert, model_of

    whole, model = load(model_of("qwen3_moe", seed=1), folder), model_of("qwen3_moe", seed=2)
    mesh = init_device_mesh("cpu", (2,))
    experts = "model.layers.*.mlp.experts"
    for is_converted in (False, True):
        parallelize_module(model, mesh, {experts: float8.Float8ExpertParallel()})
        if is_converted:
            convert(model, recipe)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        load(model, folder)
        for name, parameter in model.named_parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            expected = whole.get_parameter(name)
            if ".experts." in name:
                assert own.shape[0] == 2  # of 4
                assert not torch.equal(expected[:2], expected[2:])
                expected = expected[2 * rank : 2 * rank + 2]
            assert_bitwise(own.detach(), expected.detach(), replay=(is_converted, name))
        model = model_of("qwen3_moe", seed=3)


def check_each_rank_reads_its_part(rank: int, folder: str) -> None:
    model, read = sharded(Block(seed=3)), []
    original = parameters._plain

    def counted(source: torch.Tensor, box: tuple[slice, ...]) -> torch.Tensor:
        part = original(source, box)
        read.append(part.numel())
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "_plain", counted)
        load(model, folder)
    own = sum(p.to_local().numel() for p in model.parameters())
    assert sum(read) == own + model.steps.numel()
    assert own < 0.3 * sum(p.numel() for p in model.parameters())


def check_float8_weights(rank: int, folder: str) -> None:
    """Sharded before they are in float8 they are refused; after it, rows are split anywhere."""
    model = sharded(Block(seed=3))
    before = model.up.weight.full_tensor()
    with pytest.raises(ValueError, match=r"(up|down): its weight is sharded already"):
        load(model, folder, "float8")
    assert_bitwise(model.up.weight.full_tensor(), before)
    x = torch.randn(4, 32)
    for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8"):
        for rows in (3, 10, 48, 272):  # of which ranks have 1 or 0, 3 or 1, 12, 68
            frozen = convert_to_float8_inference(
                nn.Sequential(nn.Linear(32, rows)), config=config_of(recipe)
            )
            expected = frozen(x)
            assert_bitwise(fully_shard(frozen)(x), expected, replay=(recipe, rows))
    blocks = sharded(load(Block(seed=2), folder, "float8"))
    assert_bitwise(blocks(TOKENS), load(Block(seed=3), folder, "float8")(TOKENS))
    frozen = load(Block(seed=3), folder, "float8")
    expected = frozen(TOKENS)
    left = {layer.weight for layer in (frozen.up, frozen.down)}
    assert_bitwise(fully_shard(frozen, ignored_params=left)(TOKENS), expected)


def check_conversion_after_sharding_is_refused(rank: int, folder: str) -> None:
    """FSDP2 would gather the weights for the plain layers, and the new ones multiply shards."""
    model = sharded(Block(seed=3))
    why = r"(?s)down: fully_shard \(FSDP2\) has sharded its weight.*convert the model first"
    with pytest.raises(ValueError, match=why):
        convert_to_float8_training(model, config=config_of("blockwise"))
    assert_same_values(model, Block(seed=3))
    model(TOKENS)
