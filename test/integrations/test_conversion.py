"""What integrations share: versions, configs in other words, one conversion, evaluation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from float8 import (
    convert_to_float8_training,
)
from float8.config import RECIPES
from float8.distributed.sharded_weight import ShardedWeight
from float8.integrations.conversion import Adapter

GATHERING = replace(RECIPES["tensorwise"], enable_fsdp_float8_all_gather=True)


def make():
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))


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
    Adapter(GATHERING).convert(model, optimizer)
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
    before = model[0].weight.plain.clone()
    optimizer.step()
    assert not torch.equal(model[0].weight.plain, before)


# --- evaluation


@pytest.fixture
def case():
    """(model, input, its output in high precision, in float8)"""
    model, x = make(), torch.randn(16, 32)
    plain = model(x)
    convert_to_float8_training(model)
    quantised = model(x)
    Adapter().convert(model)
    return model, x, plain, quantised


def test_eval_mode_without_gradients_is_high_precision_and_nothing_else(case):
    model, x, plain, quantised = case
    assert not torch.equal(plain, quantised)
    for training in (False, True):
        model.train(training)
        assert torch.equal(model(x), quantised)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(model(x), quantised if training else plain)
    assert not any(layer.high_precision for layer in model if isinstance(layer, nn.Linear))


def test_a_part_that_is_called_by_itself_evaluates_as_the_model_does(case):
    model, x, _, _ = case
    layer = model[0]
    plain, quantised = nn.functional.linear(x, layer.weight, layer.bias), layer(x)
    assert not torch.equal(plain, quantised)
    with torch.no_grad():
        assert torch.equal(layer(x), quantised)
        model.eval()
        for _ in range(2):  # an encoder, before a decoder generates
            assert torch.equal(layer(x), plain)
            model(x)
    assert torch.equal(layer(x), quantised)


def test_compiled_in_one_graph(case):
    model, x, plain, quantised = case
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled.train()(x), quantised)
        with torch.no_grad():
            assert torch.equal(compiled.eval()(x), plain)
