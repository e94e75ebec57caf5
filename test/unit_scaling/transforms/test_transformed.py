"""A transformed model is its model, in another class, under modes in the order of their depths."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling.transforms.transformed import Mode, Transform, transformed


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


def test_a_mode_is_left_when_the_model_fails():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        transformed(Fails(), Doubles())(torch.randn(3))
    x = torch.randn(3)
    assert torch.equal(F.gelu(x), Model()(x))
