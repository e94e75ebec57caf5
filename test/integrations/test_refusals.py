"""What every framework refuses before it trains: one table of mistakes, one of entry points."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

import torch
from accelerate import Accelerator
from torch import nn

from float8 import Float8Linear, convert_to_float8_training
from float8.config import RECIPES
from float8.integrations.accelerate import prepare_float8
from float8.integrations.conversion import Adapter, check_optimizer
from float8.integrations.lightning import Float8Precision
from float8.integrations.transformers import Float8Callback


def make():
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


def by_hand(model, optimizer, config):
    Adapter(config).convert(model, optimizer)


def by_accelerate(model, optimizer, config):
    prepare_float8(Accelerator(cpu=True), model, optimizer, config)


def by_lightning(model, optimizer, config):
    """The calls that the Trainer makes, in its order."""
    check_optimizer(optimizer, Float8Precision(config).convert_module(model))


def by_the_trainer(model, optimizer, config):
    arguments = SimpleNamespace(mixed_precision="bf16")
    callback = Float8Callback(config)
    callback.on_init_end(arguments, None, None, model=model, optimizer=optimizer)


ENTRIES = [by_hand, by_accelerate, by_lightning, by_the_trainer]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# What an entry point is given, made of a model; what it says.
MISTAKES = {
    "another config": (
        lambda m: (convert_to_float8_training(m), adamw(m), "rowwise"),
        r"^0 was converted before with another config",
    ),
    "another model's optimizer": (
        lambda m: (m, adamw(make()), None),
        r"none of the 4 parameters of this AdamW .*Sequential's",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("enter", ENTRIES)
def test_a_model_and_an_optimizer_that_do_not_go_together_are_refused(enter, mistake):
    given, says = MISTAKES[mistake]
    with pytest.raises(ValueError, match=says):
        enter(*given(make()))


@pytest.mark.parametrize("enter", ENTRIES)
def test_a_converted_model_keeps_its_layers(enter):
    for config in (None, "rowwise"):
        model = convert_to_float8_training(make(), config=RECIPES["rowwise"])
        layers = list(model)
        enter(model, adamw(model), config)
        assert list(model) == layers


ARGUMENTS = [
    (lambda: by_accelerate(make(), None, None), TypeError, "optimizer must be a torch"),
    (lambda: Float8Precision(precision="16-mixed"), ValueError, "precision must be"),
    (lambda: Float8Callback(report_path="run.json"), ValueError, "need inspect_every"),
    (lambda: Float8Callback(on_alarm=print), ValueError, "need inspect_every"),
]


@pytest.mark.parametrize(("call", "error", "says"), ARGUMENTS)
def test_arguments_are_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize("enter", ENTRIES)
@pytest.mark.parametrize(
    ("config", "error", "says"),
    [("rowwize", ValueError, "unknown recipe"), (7, TypeError, "config")],
)
def test_configs_are_refused_before_a_layer_is_converted(enter, config, error, says):
    model = make()
    with pytest.raises(error, match=says):
        enter(model, adamw(model), config)
    assert not any(isinstance(module, Float8Linear) for module in model)
