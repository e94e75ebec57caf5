"""What a transform would not reach is refused by name, before anything has changed."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling.transforms import float8, simulate_fp8, track_scales, unit_scale

TRANSFORMS = (unit_scale, simulate_fp8, track_scales, float8)


class Holds(nn.Module):
    """A function among its attributes has its layer's weights, or a method of it has."""

    def __init__(self, how="function"):
        super().__init__()
        self.layer = nn.Linear(8, 8)

        def inner(x):
            return self.layer(x)

        if how == "hook":
            self.layer.register_forward_hook(lambda module, args, y: inner(y))
        self.function = {"function": inner, "method": self.method}.get(how, torch.relu)

    def method(self, x):
        return self.layer(x)

    def forward(self, x):
        return self.function(x)


def scripted():
    with pytest.warns(DeprecationWarning, match="jit"):
        return torch.jit.script(nn.Linear(8, 8))


class Instance(nn.Linear):
    def __init__(self, make):
        super().__init__(8, 8)
        self.forward = make(self)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            Holds,
            ValueError,
            "function Holds.*inner as function, which holds the model",
        ),
        (lambda: nn.Sequential(Holds("hook")), ValueError, "0.layer has .* one of _forward_hooks"),
        (lambda: Instance(lambda m: lambda x: x), ValueError, "forward was assigned"),
        (
            lambda: Instance(lambda m: types.MethodType(nn.Linear.forward, m)),
            ValueError,
            "forward was assigned",
        ),
        (lambda: nn.Sequential(torch.compile(nn.Linear(8, 8))), TypeError, "0 .* is compiled"),
        (lambda: nn.Sequential(scripted()), TypeError, "0 .* runs without Python"),
        (lambda: nn.DataParallel(nn.Linear(8, 8)), TypeError, "DataParallel.* then wrap it"),
        (
            lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8))),
            TypeError,
            r"wrap it, nn\.Sequential",
        ),
    ],
)
def test_what_is_out_of_reach_is_refused_by_name(transform, make, error, message):
    with pytest.raises(error, match=message):
        transform(make())


def test_an_exported_module_is_refused():
    exported = torch.export.export(nn.Linear(8, 8), (torch.randn(2, 8),)).module()
    with pytest.raises(TypeError, match=r"0 .* was exported"):
        simulate_fp8(nn.Sequential(exported))


def test_bound_methods_and_functions_that_hold_nothing_of_the_model_are_copied():
    other, x = nn.Linear(8, 8), torch.randn(2, 8)
    plain = Holds("method")
    plain.layer.register_forward_hook(lambda module, args, y: y + other(y).detach())
    model = simulate_fp8(plain)
    model(x).sum().backward()
    assert plain.layer.weight.grad is None and model.layer.weight.grad is not None


def test_a_traced_graph_inside_of_a_model_is_reached():
    plain, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)
    model = simulate_fp8(nn.Sequential(torch.fx.symbolic_trace(plain)))
    assert torch.equal(model(x), simulate_fp8(plain)(x)) and not torch.equal(model(x), plain(x))


def test_a_model_compiled_in_place_is_transformed_as_it_was_written():
    plain, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8)
    plain.compile(backend="eager")
    assert torch.equal(simulate_fp8(plain)(x), simulate_fp8(nn.Sequential(plain[0]))(x))


def test_a_forward_that_has_not_run_when_it_returns_is_refused():
    class Generates(nn.Module):
        def forward(self, x):
            yield F.gelu(x)

    with pytest.raises(TypeError, match="returned a generator"):
        simulate_fp8(Generates())(torch.randn(2))
