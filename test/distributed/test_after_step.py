"""`after_step` in one process; on two: ``after_step`` of fsdp_program.py."""

import copy

import pytest
import torch
from torch import nn

import float8
from float8 import convert_to_float8_training
from float8.config import RECIPES


def trained(recipe):
    torch.manual_seed(0)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 16)), config=RECIPES[recipe])
    model(torch.randn(8, 32)).backward(torch.randn(8, 16))
    return model


def test_a_delayed_model_is_synced():
    model = trained("delayed")
    expected = copy.deepcopy(model)
    float8.sync_float8_amax_and_scale_history(expected)
    float8.after_step(model)
    for a, b in zip(model.buffers(), expected.buffers(), strict=True):
        assert torch.equal(a, b)
    assert model[0].cast_input.history_ready


@pytest.mark.parametrize("recipe", ["tensorwise", "unit"])
def test_a_model_that_needs_nothing_is_left_alone(recipe, caplog):
    model = trained(recipe)
    before = copy.deepcopy(model.state_dict())
    float8.after_step(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not caplog.records


def test_a_model_without_float8_layers_is_named_once(caplog):
    model = nn.ReLU()
    for _ in range(2):
        float8.after_step(model)
    (message,) = caplog.messages
    assert "ReLU has no float8 layer" in message
