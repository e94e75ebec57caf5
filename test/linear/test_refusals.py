"""What a layer or device does not take is refused before it runs, with the reason and a way out."""

import importlib
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from float8 import (
    E4M3,
    E5M2,
    Blockwise,
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    Rowwise,
    ScalingType,
    convert_to_float8_training,
    float8_linear,
    high_precision,
)
from float8.config import RECIPES
from float8.distributed.float8_gather import GatheredWeight
from float8.linear.plan import plan_for
from float8.linear.refusals import reason_against_call

OFF = CastConfig(scaling_type=ScalingType.DISABLED)
NO_CAST = Float8LinearConfig(OFF, OFF, OFF)
DELAYED = CastConfig(ScalingType.DELAYED)
NO_WEIGHT_CAST = Float8LinearConfig(OFF, OFF, DELAYED, DELAYED, DELAYED, None)
ODD = CastConfig(granularity=Blockwise(1, 64), target_dtype=torch.float8_e4m3fn)
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16

SMALL = {"tokens": 3, "k": 24, "n": 7}


# --- what a device does not take


TAKEN = [
    *((r, {"arch": "sm_100"}) for r in RECIPES),
    *((r, {"arch": "gfx95"}) for r in RECIPES if r != "blockwise"),
    *((r, {}) for r in RECIPES if "mxfp8" not in r),
    *((r, {"dtype": F32}) for r in ("tensorwise", "rowwise", "blockwise")),
    *((r, {"dtype": F32, "arch": "sm_100"}) for r in ("tensorwise", "rowwise", "blockwise")),
    ("tensorwise", {"tokens": 24, "frozen": True}),
    # A last batch in evaluation, a token in generation: rows are no contraction there.
    *((r, {"tokens": 5, "grad": False}) for r in ("tensorwise", "rowwise", "blockwise")),
    # Triton runs blocks in any size; torch's products do not change to it unasked.
    *(("blockwise", SMALL | {"arch": arch}) for arch in ("sm_89", "sm_100")),
]
REFUSED_BY_DEVICES = [
    *((r, {}, "from sm_100.*gfx95.*blockwise") for r in ("mxfp8", "mxfp8_2d")),
    ("mxfp8", {"arch": "gfx95", "dtype": F32}, "mx product in bfloat16 or float16 only"),
    ("tensorwise", {"k": 24}, "in_features=24.*module_filter_fn.*pad_inner_dim=True"),
    ("tensorwise", {"n": 24}, "out_features=24.*pad_inner_dim=True"),
    *((r, {"tokens": 5}, "5 tokens.*multiple of 16; pad") for r in ("tensorwise", "blockwise")),
    ("tensorwise", {"arch": "sm_80"}, "sm_80 is not known.*emulate=True"),
    *(("rowwise", {"dtype": d, "arch": "sm_120"}, "bfloat16") for d in (F32, torch.float16)),
    ("blockwise", SMALL, "in_features=24.*multiple of 16"),
    ("blockwise", {"arch": "gfx94"}, "output: gfx94 does not run.*_scaled_mm.*emulate=True"),
]


@pytest.mark.parametrize(
    ("recipe", "how", "words"), [*((*taken, "^$") for taken in TAKEN), *REFUSED_BY_DEVICES]
)
def test_what_a_device_takes_and_what_it_refuses_with_a_way_out(recipe, how, words):
    how = {"tokens": 32, "k": 64, "n": 48, "dtype": BF16, "arch": "sm_90", "grad": True} | how
    plan = plan_for(RECIPES[recipe], how["arch"], how["dtype"])
    wants_grad_weight = how["grad"] and "frozen" not in how
    reason = reason_against_call(
        plan, how["n"], how["k"], how["tokens"], how["grad"], wants_grad_weight
    )
    assert re.search(words, reason or "", re.DOTALL)


@pytest.mark.parametrize(
    ("family", "recipe", "checks", "words"),
    [
        ("sm_80", "tensorwise", True, r"head: output: sm_80 is not known.*emulate=True"),
        ("sm_120", "rowwise", False, "sm_120 does not run a rowwise product"),
    ],
)
def test_a_gpu_that_does_not_run_a_product_is_refused_with_or_without_the_layers_checks(
    family, recipe, checks, words, monkeypatch
):
    pytest.importorskip("triton")
    for name in ("float8.kernels", "float8.kernels.casts", "float8.kernels.products"):
        monkeypatch.setattr(importlib.import_module(name), "family_of", lambda device: family)
    config = replace(RECIPES[recipe], enable_pre_and_post_forward=checks)
    layer = Float8Linear.from_float(nn.Linear(32, 32), config, fqn="head")
    own_plans = mock.patch.dict("float8.linear.plan.USED", clear=True)
    with own_plans, pytest.raises(ValueError, match=words):
        layer(torch.randn(16, 32))


# --- what a call does not take


def _layer(config="tensorwise", dtype=torch.float32):
    return Float8Linear.from_float(nn.Linear(32, 48, dtype=dtype), config, fqn="up.w1")


def _x8(fmt=E4M3, granularity=None):
    return Float8Tensor.from_high_precision(torch.randn(16, 32), fmt, granularity)


SQUARE = Float8LinearConfig(
    CastConfig(granularity=Blockwise(8, 8)), CastConfig(granularity=Blockwise(8, 8)), emulate=True
)


def _x8_of_batches():
    """Blocks of 8 rows end within each matrix of 12 rows."""
    return Float8Tensor.from_high_precision(torch.randn(2, 12, 32), E4M3, Blockwise(8, 8))


def _unchecked(recipe):
    return _layer(replace(RECIPES[recipe], enable_pre_and_post_forward=False))


def _with_weight(config, kind=lambda w: w):
    layer = _layer(config)
    weight = kind(Float8Tensor.from_high_precision(layer.weight.detach(), E4M3))
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _gathered(w):
    return GatheredWeight(w.float8_data, w.scale, w.block, w.dtype)


def _in_autocast(layer, x):
    with torch.autocast("cpu", BF16):
        layer(x)


def _second_derivative():
    x = torch.randn(4, 32, requires_grad=True)
    torch.autograd.grad(_layer()(x).square().sum(), x, create_graph=True)


X, W = torch.ones(4, 32), torch.ones(48, 32)
REFUSED = [
    *((lambda d=d: _layer()(X.to(d)), TypeError, f"up.w1: .*{d}") for d in (torch.int64, F64)),
    (lambda: _layer()(X.bfloat16()), TypeError, "up.w1: (.|\n)*torch.autocast"),
    (lambda: _layer()(torch.ones(4, 65)), ValueError, r"up.w1: .*\(4, 65\)"),
    (lambda: _layer()(torch.ones(())), ValueError, r"up.w1: .*\(\)"),
    (lambda: _layer()([1.0]), TypeError, "up.w1: .*a list"),
    (lambda: _layer(dtype=F64), ValueError, "up.w1: weight is torch.float64"),
    (lambda: _layer(Float8LinearConfig(ODD, ODD, ODD)), ValueError, "up.w1: .*emulate=True"),
    (_second_derivative, RuntimeError, "no second derivative(.|\n)*high_precision"),
    # operands in float8
    (lambda: _layer("rowwise")(_x8()), ValueError, "up.w1: .*tensorwise.*reads e4m3 with rowwise"),
    (lambda: _layer()(_x8(E5M2)), ValueError, "up.w1: .*e5m2.*dequantize"),
    (lambda: _layer("rowwise")(_x8(E4M3, Rowwise())), ValueError, "freeze the weight"),
    (lambda: _layer(NO_CAST)(_x8()), ValueError, "keeps inputs in high precision"),
    (lambda: _with_weight(NO_WEIGHT_CAST)(X), ValueError, "up.w1: .*dequantize"),
    (lambda: _in_autocast(_with_weight(None, _gathered), X), ValueError, "up.w1: .*Mixed"),
    (lambda: _unchecked("rowwise")(_x8(E4M3, Rowwise())), ValueError, "freeze the weight"),
    (lambda: _layer(SQUARE)(_x8_of_batches()), ValueError, "up.w1: .*as a matrix"),
    # tensors on several devices, of which an op would return memory that nothing has written
    (lambda: _layer()(X.to("meta")), ValueError, "are on meta, meta, cpu"),
    (lambda: _unchecked("tensorwise")(X.to("meta")), ValueError, "are on meta, meta, cpu"),
    (
        lambda: float8_linear(X, W, torch.ones(32, device="meta")),
        ValueError,
        "are on cpu, cpu, cpu, cpu, meta",
    ),
    # the functional form
    (lambda: float8_linear(X, W, None, "delayed"), ValueError, "no amax history"),
    (lambda: float8_linear(torch.ones(4, 9), W), ValueError, r"float8_linear: .*\(4, 9\)"),
    (lambda: float8_linear(X, torch.ones(32)), ValueError, "must be"),
    (
        lambda: float8_linear(X, Float8Tensor.from_high_precision(W, torch.float8_e4m3fn)),
        TypeError,
        r"weight is a Float8Tensor; pass weight.dequantize\(\)",
    ),
    (lambda: float8_linear(X.bfloat16(), W), TypeError, "bfloat16 and weight"),
    (lambda: float8_linear(X.double(), W.double()), ValueError, "weight is torch.float64"),
    (lambda: float8_linear(_x8(), W, None, "rowwise"), ValueError, "float8_linear: .*e4m3"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_what_a_call_does_not_take_is_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()


# --- transforms that do not see through a float8 layer


TRANSFORMS = {
    "grad": lambda m, x: torch.func.grad(lambda x: m(x).sum())(x),
    "vmap": lambda m, x: torch.func.vmap(m)(x[None]),
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (x,)),
    "jit.trace": torch.jit.trace,
    "fx.symbolic_trace": lambda m, x: torch.fx.symbolic_trace(m),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_that_cannot_see_a_float8_layer_fails_and_runs_without_float8(transform):
    model, x = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32))), torch.randn(16, 32)
    with pytest.raises((RuntimeError, TypeError, torch.jit.TracingCheckError)):
        transform(model, x)
    with high_precision(model):
        transform(model, x)
