"""Modules that a transform would not reach are refused by name, before any change."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise
from torch import nn
from torch.nn.utils import prune, spectral_norm
from torch.utils.checkpoint import checkpoint

from float8.unit_scaling.transforms import compile, float8, simulate_fp8, track_scales, unit_scale

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
        (lambda: torch.relu, TypeError, r"takes an nn\.Module, got builtin_function"),
        (lambda: compile(nn.Linear(8, 8)), TypeError, "transform it first, then compile"),
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


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_second_transform_of_a_kind_is_refused(transform):
    with pytest.raises(ValueError, match=r"has the transform \w+ already"):
        transform(transform(nn.Linear(8, 8)))


def test_compile_takes_modules_only():
    with pytest.raises(TypeError, match=r"takes an nn\.Module"):
        compile(torch.relu)


def test_an_exported_module_is_refused():
    exported = torch.export.export(nn.Linear(8, 8), (torch.randn(2, 8),)).module()
    with pytest.raises(TypeError, match=r"0 .* was exported"):
        simulate_fp8(nn.Sequential(exported))


def test_a_traced_graph_inside_of_a_model_is_reached():
    plain, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)
    model = simulate_fp8(nn.Sequential(torch.fx.symbolic_trace(plain)))
    assert torch.equal(model(x), simulate_fp8(plain)(x)) and not torch.equal(model(x), plain(x))


def test_a_forward_that_has_not_run_when_it_returns_is_refused():
    class Generates(nn.Module):
        def forward(self, x):
            yield F.gelu(x)

    with pytest.raises(TypeError, match="returned a generator"):
        simulate_fp8(Generates())(torch.randn(2))


# --- tensors that a module computes from its parameters and keeps


class Keeps(nn.Linear):
    """Keeps a result of its forward, as models with an auxiliary loss do."""

    def __init__(self, as_buffer=False):
        super().__init__(8, 8)
        if as_buffer:
            self.register_buffer("last", None, persistent=False)

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def weight_norm(layer):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer)


def that_has_run(layer):
    layer(torch.randn(2, 8))
    return layer


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: weight_norm(nn.Linear(8, 8)), r"\(Linear\) has weight, .*remove_weight_norm"),
        (lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5), r".* prune\.remove"),
        (lambda: that_has_run(spectral_norm(nn.Linear(8, 8))), ".* remove_spectral_norm"),
        (lambda: that_has_run(Keeps()), r"\(Keeps\) has last, .* set it to None"),
        (lambda: that_has_run(Keeps(as_buffer=True)), r"\(Keeps\) has last, .* set it to None"),
    ],
)
def test_what_cannot_be_copied_is_refused_by_module_and_attribute(transform, make, message):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(make()))
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match=rf"^1\.0 {message}"):
        transform(model)


@pytest.mark.parametrize("normed", [nn.utils.parametrizations.spectral_norm, spectral_norm])
def test_a_weight_of_unknown_scale_is_refused_by_unit_scale_alone(normed):
    """It can be copied, but its standard deviation is not that of the parameter it is made of."""
    model = nn.Sequential(nn.Linear(8, 8), normed(nn.Linear(8, 8)))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"^unit_scale: 1 computes its weight.*remove_spectral"):
        unit_scale(model)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    simulate_fp8(model)(torch.randn(2, 8))


# --- activation checkpointing


class Net(nn.Module):
    def __init__(self, kind=None):
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(16, 16), nn.Linear(16, 16)

    def block(self, x):
        return x + self.second(F.gelu(self.first(x)))

    def forward(self, x):
        if self.kind is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.kind == "reentrant")


EACH = pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
KINDS = pytest.mark.parametrize("kind", ["reentrant", "other"])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # without gradients
@EACH
@KINDS
def test_inside_it_is_refused(transform, kind):
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="put the checkpoint around the transformed model"):
        transform(Net(kind))(x)


@EACH
@KINDS
def test_around_it_gives_the_same_gradients(transform, kind):
    fresh, g = transform(Net()), torch.randn(4, 16)
    results = []
    for checkpointed in (False, True):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        model = copy.deepcopy(fresh)  # so that each forward is the model's first
        if checkpointed:
            checkpoint(model, x, use_reentrant=kind == "reentrant").backward(g)
        else:
            model(x).backward(g)
        results.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    for mine, theirs in zip(*results, strict=True):
        assert_bitwise(mine, theirs)
