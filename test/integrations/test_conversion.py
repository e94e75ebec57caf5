"""Configs in other packages' words, one conversion, and an optimizer that goes with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from float8 import Float8LinearConfig, convert_to_float8_training
from float8.config import RECIPES
from float8.distributed.sharded_weight import ShardedWeight
from float8.integrations.conversion import (
    as_config,
    check_optimizer,
    convert,
    evaluates_in_float8,
    is_converted,
)

GATHERING = replace(RECIPES["tensorwise"], enable_fsdp_float8_all_gather=True)


def make():
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))


class TestConfigs:
    def test_of_this_package(self):
        assert as_config(None) is None
        assert as_config("rowwise") == RECIPES["rowwise"]
        assert as_config(GATHERING) is GATHERING

    def test_of_transformer_engine_as_accelerate_and_its_files_write_them(self):
        expected = Float8LinearConfig.from_te_recipe(
            margin=1, interval=2, amax_history_len=8, amax_compute_algo="most_recent"
        )
        file = {"MARGIN": 1, "interval": 2, "amax_history_length": 8}
        assert as_config({**file, "amax_compute_algorithm": "most_recent"}) == expected

        @dataclass
        class TERecipeKwargs:  # Accelerate's cannot be made without TransformerEngine
            use_autocast_during_eval: bool = False
            margin: int = 1
            interval: int = 2
            fp8_format: str = "HYBRID"
            amax_history_len: int = 8
            amax_compute_algo: str = "most_recent"
            override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
            use_mxfp8_block_scaling: bool = False

        assert as_config(TERecipeKwargs()) == expected
        assert evaluates_in_float8(TERecipeKwargs(True))
        assert not evaluates_in_float8(TERecipeKwargs())

    @pytest.mark.parametrize("key", ["use_autocast_during_eval", "FP8_USE_AUTOCAST_DURING_EVAL"])
    def test_how_to_evaluate_is_asked_apart_from_what_to_compute(self, key):
        for wanted in (False, True):
            assert as_config({key: wanted}) == Float8LinearConfig.from_te_recipe()
            assert evaluates_in_float8({key: wanted}) == wanted
        assert not any(map(evaluates_in_float8, ({}, None, "delayed", GATHERING)))

    def test_of_torchao(self, monkeypatch):
        seen = []
        made = classmethod(lambda cls, config: seen.append(config) or RECIPES["rowwise"])
        monkeypatch.setattr(Float8LinearConfig, "from_torchao", made)

        class AORecipeKwargs(SimpleNamespace):
            pass

        class Theirs:
            pass

        Theirs.__module__ = "torchao.float8.config"
        theirs = Theirs()
        for given in (theirs, AORecipeKwargs(config=theirs)):
            assert as_config(given) == RECIPES["rowwise"]
        assert seen == [theirs, theirs]

    def test_of_nobody(self):
        with pytest.raises(TypeError, match=r"config must be .*got 7"):
            as_config(7)


def test_an_optimizer_follows_replaced_parameters_with_its_states():
    model = make()
    optimizer = torch.optim.SGD(
        [{"params": [model[0].weight], "lr": 0.5}, {"params": [*model[2].parameters()]}],
        lr=0.1,
        momentum=0.9,
    )
    model(torch.randn(16, 32)).sum().backward()
    optimizer.step()
    states = [optimizer.state[p]["momentum_buffer"] for p in (model[0].weight, model[2].bias)]
    convert(model, GATHERING, None, optimizer)
    assert isinstance(model[0].weight, ShardedWeight)
    groups = [group["params"] for group in optimizer.param_groups]
    assert [[id(p) for p in g] for g in groups] == [
        [id(model[0].weight)],
        [id(model[2].weight), id(model[2].bias)],
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert len(optimizer.state) == 3
    assert optimizer.state[model[0].weight]["momentum_buffer"] is states[0]
    assert optimizer.state[model[2].bias]["momentum_buffer"] is states[1]
    check_optimizer(optimizer, model)
    before = model[0].weight.plain.clone()
    optimizer.step()
    assert not torch.equal(model[0].weight.plain, before)


def test_tied_weights_are_replaced_once():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model, GATHERING, None, optimizer)
    assert model[1].weight is model[0].weight is optimizer.param_groups[0]["params"][0]


def test_a_converted_model_stays_as_it_is_or_is_refused():
    model = make()
    assert not is_converted(model)
    convert_to_float8_training(model, config=RECIPES["rowwise"])
    layers = list(model)
    for config in (None, RECIPES["rowwise"]):
        assert convert(model, config, None) is model
        assert list(model) == layers
    with pytest.raises(ValueError, match=r"^0 was converted before with another config"):
        convert(model, GATHERING, None)


def test_optimizers_that_would_train_nothing_are_refused():
    model = make()
    stale = torch.optim.AdamW(model.parameters())
    convert(model, GATHERING, None)
    with pytest.raises(ValueError, match=r"a weight of 0 that conversion.*build the optimizer"):
        check_optimizer(stale, model)
    other = torch.optim.AdamW(make().parameters())
    with pytest.raises(ValueError, match=r"none of the 4 parameters of this AdamW .*Sequential's"):
        check_optimizer(other, model)
    check_optimizer(torch.optim.AdamW(model.parameters()), model)
