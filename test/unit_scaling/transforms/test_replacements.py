"""Which function is called in place of another, and which calls are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling import functional as U
from float8.unit_scaling import registry
from float8.unit_scaling.registry import overridable
from float8.unit_scaling.transforms.unit_scale import unit_scale


def new_gelu(x):
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


@overridable
def seen_gelu(x):
    return new_gelu(x)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class ByWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x @ self.weight


def test_a_registered_function_comes_before_the_table_and_the_users_before_it():
    def mine(left, right):
        return left @ right

    plain, x = ByWeight(), torch.randn(2, 4)
    registry.register(torch.matmul, mine, replace=True)
    try:
        model = unit_scale(plain)  # without options of our own matmul
        assert torch.equal(model(x), x @ model.weight)
        assert torch.equal(unit_scale(plain, {torch.matmul: lambda x, w: x})(x), x)
    finally:
        registry.register(torch.matmul, U.matmul, replace=True)


X = torch.linspace(-2, 2, 5)
REPLACED = {
    "an overridable function": (seen_gelu, {seen_gelu: U.gelu}, U.gelu),
    "a function of torch as value": (seen_gelu, {seen_gelu: F.gelu}, U.gelu),
    "a function of torch": (F.relu, {F.relu: U.gelu}, U.gelu),
    "its own value": (F.gelu, {F.gelu: F.gelu}, F.gelu),
    "a function of the user's": (F.gelu, {F.gelu: lambda x: x * 3}, lambda x: x * 3),
    "another spelling": (lambda x: x.softmax(-1), {torch.softmax: lambda x, d: x * 3},
                         lambda x: x * 3),
    "not called": (seen_gelu, {F.relu: U.gelu}, new_gelu),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACED)
def test_functions_of_torch_and_overridable_ones_are_replaced(name):
    function, replace, expected = REPLACED[name]
    plain = Calls(function)
    before = plain(X)
    model = unit_scale(plain, replace=replace)
    assert torch.equal(model(X), expected(X)) and torch.equal(plain(X), before)
    assert model.function is function


def test_such_a_call_stays_as_it_is_where_its_weight_is_frozen_or_it_is_replaced_by_itself():
    plain, x = nn.LSTM(4, 4).requires_grad_(False), torch.randn(3, 2, 4)
    assert torch.equal(unit_scale(plain)(x)[0], plain(x)[0])
    model = unit_scale(nn.Bilinear(3, 4, 2), replace={F.bilinear: F.bilinear})
    assert model(torch.randn(5, 3), torch.randn(5, 4)).shape == (5, 2)
