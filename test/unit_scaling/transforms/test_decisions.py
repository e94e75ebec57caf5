"""Decisions: what each call becomes, and which rule it follows."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from decided import decisions_of, steps_of
from torch import nn

from float8.unit_scaling.transforms.unit_scale import unit_scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, double=False):
        x = x + F.silu(self.up(x))
        return self.head(x) * (2 if double else 1)


def test_decisions_say_what_becomes_of_each_call():
    model, x = unit_scale(Model()), torch.randn(2, 4)
    assert steps_of(model, x) == [
        ("linear", False),
        ("silu", False),
        ("add", False),
        ("linear", True),
    ]
    decisions = decisions_of(model, x)
    assert [addition.kind for addition in decisions.additions.values()] == ["residual"]
    reads = {(call, path) for call, path, _ in decisions.factors().reads}
    assert reads == {(0, (0, 0)), (2, (0, 0))}  # of x, by the first linear layer and the addition


def test_the_residual_layers_are_counted_once_and_copies_keep_the_number():
    model, x = unit_scale(Model()), torch.randn(2, 4)
    (transform,) = model.transforms
    assert transform.layers is None
    model(x)
    assert transform.layers == 1
    (other,) = pickle.loads(pickle.dumps(copy.deepcopy(model))).transforms
    assert other.layers == 1


def test_what_is_done_is_logged_with_the_models_lines(caplog):
    caplog.set_level(logging.INFO, logger="float8")
    unit_scale(Model())(torch.randn(2, 4))
    for text in (
        "unit scaling weight: up.weight",
        "setting bias to zero: up.bias",
        "residual-add, tau=1.414",
        "unconstraining node: linear",
        __file__,
    ):
        assert text in caplog.text


def test_a_forward_of_nothing_returns_its_input():
    class Nothing(nn.Module):
        def forward(self, x):
            return x

    model, x = unit_scale(Nothing()), torch.randn(3)
    assert model(x) is x


@pytest.mark.parametrize("container", [tuple, list, lambda y: {"out": y}])
def test_results_may_be_nested(container):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 9)

        def forward(self, x):
            y = self.a(x)
            y = self.b(y), y.sum()
            return container(y)

    # y is read twice, by b and by the sum: b's input gradient has to agree with the sum's
    steps = steps_of(unit_scale(Nested()), torch.randn(2, 4))
    assert steps == [("linear", True), ("linear", False)]
