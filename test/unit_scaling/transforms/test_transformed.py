"""A transformed model is its model, in another class, under modes in the order of their depths."""

from __future__ import annotations

import copy
import pickle
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling import functional as U
from float8.unit_scaling.transforms import compile, simulate_fp8, unit_scale
from float8.unit_scaling.transforms.transformed import Mode, Transform, model_of, transformed


class Doubles(Transform):
    """Doubles what F.gelu returns."""

    depth: ClassVar[int] = 2

    def mode(self, model, forward, args, kwargs):
        return Mode({F.gelu: lambda x, **options: 2 * F.gelu(x, **options)})


class Shifts(Transform):
    """Adds one to what F.gelu returns, and hands the call on."""

    depth: ClassVar[int] = 1

    def mode(self, model, forward, args, kwargs):
        return Mode({F.gelu: lambda x, **options: F.gelu(x, **options) + 1})


class Model(nn.Module):
    def __init__(self, function=F.gelu):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.function = function

    def forward(self, x):
        return self.function(x * self.scale)

    def describe(self):
        return "a model"


def test_the_call_goes_to_the_least_depth_first_whatever_the_order_of_application():
    x = torch.randn(3)
    for first, second in ((Doubles, Shifts), (Shifts, Doubles)):
        model = transformed(transformed(Model(), first()), second())
        for run in (model, torch.compile(model, backend="eager", fullgraph=True)):
            torch.testing.assert_close(run(x), 2 * F.gelu(x) + 1)


def test_a_mode_looks_inside_overridable_functions():
    x = torch.randn(3)
    model = transformed(Model(U.gelu), Doubles())
    torch.testing.assert_close(model(x), 2 * U.gelu(x))


def test_copies_and_pickles_keep_class_transforms_and_weights_of_their_own():
    x = torch.randn(3)
    model = transformed(Model(), Doubles())
    assert isinstance(model, Model) and model.describe() == "a model"
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x)) and type(other) is type(model)
        with torch.no_grad():
            other.scale.fill_(-1.0)
        assert torch.equal(other(x), model(-x))


def test_whatever_becomes_of_a_model_is_found_by_its_id():
    model = transformed(Model(), Doubles())
    replica = model._replicate_for_data_parallel()
    for other in (model, copy.copy(model), copy.deepcopy(model), replica):
        assert model_of(id(other)) is other


def test_the_original_runs_as_before():
    x, plain = torch.randn(3), Model()
    transformed(plain, Doubles())
    assert type(plain) is Model and torch.equal(plain(x), F.gelu(x))


def test_a_mode_is_left_when_the_model_fails():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        transformed(Fails(), Doubles())(torch.randn(3))
    x = torch.randn(3)
    assert torch.equal(F.gelu(x), Model()(x))


def test_a_transformed_model_compiles_to_one_graph_with_its_numbers_and_gradients():
    model = simulate_fp8(unit_scale(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))))
    compiled = compile(model, backend="eager", fullgraph=True)
    assert isinstance(compiled, nn.Module)
    x, grad = torch.randn(3, 8), torch.randn(3, 4)
    found = []
    for run in (model, compiled):
        run.zero_grad()
        run(x).backward(grad)
        found.append([run(x), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
