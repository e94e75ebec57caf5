"""What integrations share: versions, configs in other words, one conversion, evaluation."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from torch import nn

from float8 import (
    Float8LinearConfig,
    RMSNormCast,
    convert_to_float8_training,
    fuse_norms,
)
from float8.config import RECIPES
from float8.distributed.sharded_weight import ShardedWeight
from float8.integrations.conversion import Adapter, as_config, warn_of_version

GATHERING = replace(RECIPES["tensorwise"], enable_fsdp_float8_all_gather=True)


def make():
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))


def test_how_to_evaluate_is_no_part_of_a_config():
    assert as_config(None) is None
    assert as_config("rowwise") == RECIPES["rowwise"]
    for wanted in (False, True):
        adapter = Adapter({"use_autocast_during_eval": wanted})
        assert adapter.config == Float8LinearConfig.from_te_recipe()
        assert adapter.float8_in_evaluation == wanted
    assert not any(Adapter(c).float8_in_evaluation for c in ({}, None, "delayed", GATHERING))


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


# --- versions


@pytest.mark.parametrize(
    ("version", "warns"),
    [
        ("0.9.9", True),
        ("1.2", False),
        ("1.2.0", False),
        ("1.10.3", False),
        ("1.11.0", True),
        ("1.11", True),
        ("2.0.dev1", True),
    ],
)
def test_a_version_outside_the_tested_range_is_named_with_it(monkeypatch, version, warns):
    monkeypatch.setattr(metadata, "version", lambda package: version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_version("framework", "1.2", "1.11")
    assert bool(caught) == warns
    if warns:
        text = str(caught[0].message)
        assert ">= 1.2, < 1.11" in text
        assert version in text


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


def test_copies_and_pickles_evaluate_as_the_model_does(case):
    model, x, plain, quantised = case
    model.eval()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), quantised)
        with torch.no_grad():
            assert torch.equal(copied(x), plain)
            assert torch.equal(model(x), plain)


def test_compiled_in_one_graph(case):
    model, x, plain, quantised = case
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled.train()(x), quantised)
        with torch.no_grad():
            assert torch.equal(compiled.eval()(x), plain)


def test_a_norm_that_is_fused_later_evaluates_as_its_consumers_do():
    model = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 16)).eval()
    x = torch.randn(16, 32)
    plain = model(x)
    convert_to_float8_training(model)
    Adapter().convert(model)
    fuse_norms(model)
    assert isinstance(model[0], RMSNormCast)
    with torch.no_grad():
        assert torch.equal(model(x), plain)
