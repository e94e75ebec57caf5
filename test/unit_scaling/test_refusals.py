"""Every error of unit scaling: models out of a transform's reach, calls, arguments."""

from __future__ import annotations

import copy
import math
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

import float8.unit_scaling as uu
from float8 import convert_to_float8_training
from float8.config import RECIPES
from float8.unit_scaling import functional as U
from float8.unit_scaling.constraints import apply_constraint
from float8.unit_scaling.formats import FPFormat
from float8.unit_scaling.optim import lr_scale_func_adam, lr_scale_func_sgd, scaled_parameters
from float8.unit_scaling.scale import scale_fwd
from float8.unit_scaling.transforms import (
    compile,
    float8,
    simulate_fp8,
    track_scales,
    unit_scale,
)

TRANSFORMS = (unit_scale, simulate_fp8, track_scales, float8)


class Calls(nn.Module):
    """Calls a function with its input and its weight, of which the function may have more."""

    def __init__(self, function, shape=(8, 8)):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(shape)), function

    def forward(self, x):
        return self.function(x, self.weight)


class Holds(nn.Module):
    """A function among its attributes has its layer's weights."""

    def __init__(self, how="function"):
        super().__init__()
        self.layer = nn.Linear(8, 8)

        def inner(x):
            return self.layer(x)

        if how == "hook":
            self.layer.register_forward_hook(lambda module, args, y: y @ self.layer.weight)
        self.function = inner if how == "function" else torch.relu
        self.hidden = [nn.Linear(8, 8)]  # not a ModuleList

    def forward(self, x):
        return self.hidden[0](x)


class Generates(nn.Module):
    def forward(self, x):
        yield F.gelu(x)


def linear():
    return nn.Linear(8, 8)


def inside(module):
    return nn.Sequential(linear(), nn.Sequential(module))


def assigned():
    layer = linear()
    layer.forward = types.MethodType(nn.Linear.forward, layer)
    return layer


def scripted():
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):  # the latter by torch 2.14
        return torch.jit.script(linear())


def grouped(function, x, w):
    return function(x, w.transpose(-2, -1), offs=torch.tensor([2, 4], dtype=torch.int32))


def breaks(x, w):
    y = x @ w
    return x + y if y.sum() > 0 else x


def exported():
    return torch.export.export(linear(), (torch.randn(2, 8),)).module()


def called(model, *shape, dtype=torch.float32):
    """The call of a model with a random input."""
    return lambda: model()(torch.randn(*shape or (2, 8), dtype=dtype))


def scaled(make, *inputs):
    """The call of a unit-scaled model."""
    return lambda: unit_scale(make())(*inputs)


X, X4 = torch.randn(2, 8), torch.randn(4, 16)
# What every transform refuses: model, exception, the message.
MODELS = [
    (Holds, ValueError, "has Holds.* as function, which holds a part of the model"),
    (lambda: nn.Sequential(Holds("hook")), ValueError, "0.layer .* has .* as _forward_hooks"),
    (assigned, ValueError, "has a forward of its own"),
    (lambda: torch.relu, TypeError, "a transform: .*builtin_function"),
    (lambda: compile(linear()), ValueError, "transform it first, then compile"),
    (lambda: nn.Sequential(torch.compile(linear())), ValueError, "0 .* is compiled"),
    (lambda: nn.Sequential(scripted()), ValueError, "0 .* runs without Python"),
    (lambda: nn.Sequential(exported()), ValueError, "0 .* was exported"),
    (lambda: nn.DataParallel(linear()), ValueError, "DataParallel.* then wrap it"),
    (lambda: torch.fx.symbolic_trace(nn.Sequential(linear())), ValueError, "wrap the model"),
]
# What one of them refuses: call, exception, the message.
CALLS = [
    *((lambda t=t: t(t(linear())), ValueError, r"has the transform \w+ already")
      for t in TRANSFORMS),
    (called(lambda: simulate_fp8(Generates())), TypeError, "returned a generator"),
    # unit_scale
    *((lambda norm=norm: unit_scale(inside(norm(linear()))), ValueError, "computes its weight")
      for norm in (parametrizations.spectral_norm, spectral_norm, parametrizations.weight_norm)),
    (lambda: unit_scale(nn.Sequential(linear(), nn.Linear(3, 3, device="meta"))), ValueError,
     "1 is on the meta device"),
    (lambda: unit_scale(nn.Sequential(float8(linear()))), ValueError, "has the transform float8"),
    (lambda: unit_scale(convert_to_float8_training(inside(nn.Linear(32, 32)))), ValueError,
     r"1\.0 .*is converted"),
    *((lambda r=r: unit_scale(nn.GELU(), replace=r), error, text) for r, error, text in (
        ({linear: U.gelu}, ValueError, r"not see calls of linear: .*registry\.overridable"),
        ({len: U.gelu}, ValueError, "does not see calls of len"),
    )),
    # At a standard deviation of 1 a weight without a unit-scaled function would make the
    # activations grow with the width.
    (scaled(lambda: nn.LSTM(8, 4), X), ValueError, r"lstm multiplies by weight_ih_l0.*replace="),
    (scaled(lambda: nn.GRUCell(8, 4), X), ValueError, "gru_cell multiplies by weight_ih"),
    (scaled(lambda: nn.ConvTranspose2d(3, 4, 2), torch.randn(2, 3, 4, 4)), ValueError,
     "conv_transpose2d"),
    (scaled(lambda: nn.Bilinear(8, 8, 2), X, X), ValueError, "bilinear"),
    # Sums and means of its rows have no factor that would give them unit scale.
    (scaled(lambda: nn.EmbeddingBag(10, 8), torch.randint(10, (6, 5))), ValueError,
     "embedding_bag .* weight"),
    *((scaled(lambda f=f: Calls(partial(grouped, f), (2, 16, 16)), X4), ValueError,
       "grouped_mm multiplies by weight") for f in (torch._grouped_mm, F.grouped_mm)),
    (scaled(lambda: Holds("nothing"), X), ValueError,
     r"reads a trained parameter that is not a parameter of the mod"),
    (called(lambda: torch.compile(unit_scale(Calls(breaks)), backend="eager")), RuntimeError,
     "breaks the graph inside a unit-scaled model"),
    # float8, track_scales and what reads its graphs
    (lambda: float8(linear(), ["unit"]), TypeError, "config must be a Float8LinearConfig"),
    (lambda: float8(linear(), RECIPES["delayed"]), ValueError, "keeps no amax history"),
    (called(lambda: float8(linear().double()), dtype=torch.float64), TypeError, "float64"),
    (called(lambda: float8(linear()), dtype=torch.bfloat16), TypeError, "weight torch.float32"),
    (lambda: convert_to_float8_training(unit_scale(linear())), ValueError, "transforms.float8"),
    (called(lambda: torch.compile(track_scales(linear()), fullgraph=True, backend="eager")),
     Exception, r"without torch\.compile"),
]  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("make", "error", "message"), MODELS)
def test_a_model_out_of_reach_is_refused_and_stays_as_it_is(transform, make, error, message):
    model = make()
    state = getattr(model, "state_dict", dict)()
    before = {name: value.clone() for name, value in state.items()}
    with pytest.raises(error, match=message):
        transform(model)
    assert all(torch.equal(value, before[name]) for name, value in state.items())
    assert not any(hasattr(p, "mup_type") for p in getattr(model, "parameters", list)())


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_a_call_is_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_traced_graph_inside_of_a_model_is_reached():
    plain, x = nn.Sequential(linear(), nn.ReLU()), torch.randn(2, 8)
    model = simulate_fp8(nn.Sequential(torch.fx.symbolic_trace(plain)))
    assert torch.equal(model(x), simulate_fp8(plain)(x)) and not torch.equal(model(x), plain(x))


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


# --- functions, modules, optimizers

IDS = torch.tensor([0, 1, 2])
HALF_SCALED = nn.Sequential(uu.Linear(4, 4), nn.Linear(4, 3))


def ones(*shape):
    return torch.ones(shape)


def scaled_groups(params, **options):
    return lambda: scaled_parameters(params, lr_scale_func_adam, **{"lr": 2.0, **options})


IN_PLACE = "inplace=True cannot be unit-scaled; pass inplace=False"
LEGACY = "size_average or reduce .*; pass reduction='none'"

VALUE_ERRORS = [
    (lambda: uu.SiLU(inplace=True)(ones(3)), f"silu: {IN_PLACE}"),
    (lambda: uu.Dropout(inplace=True)(ones(3)), f"dropout: {IN_PLACE}"),
    *((lambda m=m: U.gelu(ones(2), mult=m), f"gelu: mult={m} .* greater than 0")
      for m in (0, -1.0, math.nan, math.inf, True)),
    (lambda: U.silu_glu(ones(4, 3), ones(1, 3)), "silu_glu: a gate of another shape"),
    *((lambda f=f: f(*[ones(1, 2, 4)] * 3, mult=2.0, scale=0.25), "mult=2.0 with scale=0.25")
      for f in (U.scaled_dot_product_attention, U.sqrt_softmax_attention)),
    (lambda: U.cross_entropy(ones(3, 4), IDS, size_average=True), f"cross_entropy: {LEGACY}"),
    (lambda: U.mse_loss(ones(3), ones(3), True), f"mse_loss: {LEGACY}"),
    (lambda: U.mse_loss(ones(3), ones(3), weight=ones(3)), "multiply the losses"),
    (lambda: uu.Embedding(5, 3, scale_grad_by_freq=True)(IDS), "scale_grad_by_freq=True .* False"),
    (lambda: U.add(ones(3), ones(3), out=ones(3)), "out= cannot be unit-scaled"),
    *((lambda name=name: apply_constraint(name, 1.0, 2.0), f"{name!r} is no constraint: .*gmean")
      for name in ("mean", "", 3)),
    (lambda: uu.Parameter(ones(2), "hidden"), "'output'.; got 'hidden'"),
    (lambda: lr_scale_func_sgd("gmean"), "LinearReadout; got 'gmean'"),
    (scaled_groups(HALF_SCALED), r"2 parameters .*1.weight of shape \(3, 4\)"),
    (scaled_groups([*HALF_SCALED.parameters()]), r"a parameter of shape \(3, 4\).*MupModule"),
    (lambda: FPFormat(1, 3), "exponent_bits=1 is not in"),
    (lambda: FPFormat(4, 3, rounding="up"), "rounding='up'.*'nearest'"),
    (lambda: U.register(torch.nn.functional.silu, U.gelu), "registered already; pass replace=True"),
]  # fmt: skip
# Errors of Python and torch.
OTHER_ERRORS = [
    *((lambda s=s: scale_fwd(ones(2), s), TypeError, "0-d tensor without gradient")
      for s in (ones(2), torch.ones((), requires_grad=True))),
    (scaled_groups(nn.Parameter(ones(2))), TypeError, "params argument given"),
    (scaled_groups(uu.Linear(3, 4), lr=0.0, weight_decay=0.1), ZeroDivisionError, "by zero"),
    (lambda: apply_constraint("to_left_grad_scale", 1.0, 2.0), TypeError, "missing 1 required"),
    (lambda: U.cross_entropy(ones(3, 4), IDS, reduction="max"), KeyError, "max"),
    (lambda: uu.MHSA(8, 2, True, attention="linear")(ones(3, 8)), KeyError, "linear"),
    (lambda: uu.TransformerDecoder(16, 24, 2, 2, norm="post")(IDS), KeyError, "post"),
]  # fmt: skip
MESSAGES = [*((call, ValueError, text) for call, text in VALUE_ERRORS), *OTHER_ERRORS]


@pytest.mark.parametrize(("call", "error", "text"), MESSAGES, ids=[row[2] for row in MESSAGES])
def test_the_message(call, error, text):
    with pytest.raises(error, match=text):
        call()
