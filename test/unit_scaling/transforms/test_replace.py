"""A model's own functions are seen by a mode, wherever the model finds them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling import functional as U
from float8.unit_scaling.override import overridable
from float8.unit_scaling.transforms.replace import made_visible
from float8.unit_scaling.transforms.unit_scale import unit_scale


def new_gelu(x):
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def calls_it(x):
    return new_gelu(x)


@overridable
def seen_already(x):
    return new_gelu(x)


class Global(nn.Module):
    def forward(self, x):
        return new_gelu(x)


class Indirect(nn.Module):
    def forward(self, x):
        return calls_it(x)


class Attribute(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def enclosed():
    def own_gelu(x):
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))

    def through(x):
        return own_gelu(x)

    class Enclosed(nn.Module):
        def forward(self, x):
            return through(x)

    return Enclosed(), own_gelu


def test_it_is_found_as_a_global_a_closure_and_an_attribute_eager_and_compiled():
    enclosing, own = enclosed()
    lonely = lambda x: x.relu()  # noqa: E731
    models = {
        "global": (Global(), new_gelu),
        "indirect": (Indirect(), new_gelu),
        "closure": (enclosing, own),
        "attribute": (Attribute(lonely), lonely),
        "overridable": (Attribute(seen_already), seen_already),
        "torch": (Attribute(F.relu), F.relu),
    }
    x = torch.randn(5)
    expected = U.gelu(x)
    for name, (model, key) in models.items():
        before = model(x)
        scaled = unit_scale(model, replace={key: U.gelu})
        compiled = torch.compile(scaled, backend="eager", fullgraph=True)
        assert torch.equal(scaled(x), expected), name
        assert torch.equal(compiled(x), expected), name
        assert torch.equal(model(x), before), f"{name}: the original changed"


def test_a_function_that_was_replaced_once_can_be_replaced_again():
    model, key = enclosed()
    unit_scale(model, replace={key: U.gelu})
    other = unit_scale(model, replace={key: U.silu})
    x = torch.randn(5)
    assert torch.equal(other(x), U.silu(x))


def test_a_function_of_torch_as_value_means_its_unit_scaled_version():
    x = torch.randn(5)
    assert torch.equal(unit_scale(Global(), replace={new_gelu: F.gelu})(x), U.gelu(x))


def test_a_function_that_is_its_own_value_is_left_alone():
    x = torch.randn(5)
    model = unit_scale(Attribute(F.gelu), replace={F.gelu: F.gelu})
    assert torch.equal(model(x), F.gelu(x))


def test_a_function_of_the_users_as_value_is_called_as_it_is():
    x = torch.randn(5)
    model = unit_scale(Attribute(F.gelu), replace={F.gelu: lambda x: x * 3})
    assert torch.equal(model(x), x * 3)


def test_methods_and_operators_can_be_replaced_too():
    class Model(nn.Module):
        def forward(self, x):
            return x.softmax(-1)

    x = torch.randn(5)
    model = unit_scale(Model(), replace={torch.softmax: lambda x, dim: x * 3})
    assert torch.equal(model(x), x * 3)


def test_what_cannot_be_found_or_seen_is_refused_by_name():
    def nowhere(x):
        return x

    functions = [nowhere]
    del nowhere
    with pytest.raises(ValueError, match="nowhere is not found"):
        unit_scale(Global(), replace={functions[0]: U.gelu})
    with pytest.raises(ValueError, match="neither a function of torch nor"):
        unit_scale(Global(), replace={len: U.gelu})
    with pytest.raises(TypeError, match="functions to functions"):
        unit_scale(Global(), replace={new_gelu: "gelu"})


def test_nothing_is_made_visible_when_one_of_several_functions_is_refused():
    lonely = lambda x: x.relu()  # noqa: E731
    model = Attribute(lonely)
    with pytest.raises(ValueError, match="neither a function of torch nor"):
        made_visible(model, [lonely, len])
    assert model.function is lonely
