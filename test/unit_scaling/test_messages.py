"""Every error of this package names the call and the remedy: one table.

Errors of transforms are in ``transforms/test_refusals.py``.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import float8.unit_scaling as uu
from float8.unit_scaling import functional as U
from float8.unit_scaling.constraints import apply_constraint
from float8.unit_scaling.formats import FPFormat
from float8.unit_scaling.optim import lr_scale_func_adam, lr_scale_func_sgd, scaled_parameters
from float8.unit_scaling.scale import scale_fwd

IDS = torch.tensor([0, 1, 2])
HALF_SCALED = nn.Sequential(uu.Linear(4, 4), nn.Linear(4, 3))


def x(*shape):
    return torch.ones(shape)


def grouped(params, **options):
    return lambda: scaled_parameters(params, lr_scale_func_adam, **{"lr": 2.0, **options})


IN_PLACE = "inplace=True cannot be unit-scaled; pass inplace=False"
LEGACY = "size_average or reduce .*; pass reduction='none'"

VALUE_ERRORS = [
    (lambda: uu.SiLU(inplace=True)(x(3)), f"silu: {IN_PLACE}"),
    (lambda: uu.Dropout(inplace=True)(x(3)), f"dropout: {IN_PLACE}"),
    *((lambda m=m: U.gelu(x(2), mult=m), f"gelu: mult={m} .* greater than 0")
      for m in (0, -1.0, math.nan, math.inf, True)),
    (lambda: U.silu_glu(x(4, 3), x(1, 3)), "silu_glu: a gate of another shape"),
    *((lambda f=f: f(x(1, 2, 4), x(1, 2, 4), x(1, 2, 4), mult=2.0, scale=0.25), "mult=2.0 with sc")
      for f in (U.scaled_dot_product_attention, U.sqrt_softmax_attention)),
    (lambda: U.cross_entropy(x(3, 4), IDS, size_average=True), f"cross_entropy: {LEGACY}"),
    (lambda: U.mse_loss(x(3), x(3), True), f"mse_loss: {LEGACY}"),
    (lambda: U.mse_loss(x(3), x(3), weight=x(3)), "multiply the losses"),
    (lambda: uu.Embedding(5, 3, scale_grad_by_freq=True)(IDS), "scale_grad_by_freq=True .* False"),
    (lambda: U.add(x(3), x(3), out=x(3)), "out= cannot be unit-scaled"),
    *((lambda name=name: apply_constraint(name, 1.0, 2.0), f"{name!r} is no constraint: .*gmean")
      for name in ("mean", "", 3)),
    (lambda: uu.Parameter(x(2), "hidden"), "'output'.; got 'hidden'"),
    (lambda: lr_scale_func_sgd("gmean"), "LinearReadout; got 'gmean'"),
    (grouped(HALF_SCALED), r"2 parameters .*1.weight of shape \(3, 4\)"),
    (grouped([*HALF_SCALED.parameters()]), r"a parameter of shape \(3, 4\).*MupModule"),
    (lambda: FPFormat(1, 3), "exponent_bits=1 is not in"),
    (lambda: FPFormat(4, 3, rounding="up"), "rounding='up'.*'nearest'"),
    (lambda: U.register(torch.nn.functional.silu, U.gelu), "registered already; pass replace=True"),
]  # fmt: skip
# Errors of Python and torch.
OTHER_ERRORS = [
    *((lambda s=s: scale_fwd(x(2), s), TypeError, "0-d tensor without gradient")
      for s in (x(2), torch.ones((), requires_grad=True))),
    (grouped(nn.Parameter(x(2))), TypeError, "params argument given"),
    (grouped(uu.Linear(3, 4), lr=0.0, weight_decay=0.1), ZeroDivisionError, "division by zero"),
    (lambda: apply_constraint("to_left_grad_scale", 1.0, 2.0), TypeError, "missing 1 required"),
    (lambda: U.cross_entropy(x(3, 4), IDS, reduction="max"), KeyError, "max"),
    (lambda: uu.MHSA(8, 2, True, attention="linear")(x(3, 8)), KeyError, "linear"),
    (lambda: uu.TransformerDecoder(16, 24, 2, 2, norm="post")(IDS), KeyError, "post"),
]  # fmt: skip
MESSAGES = [*((call, ValueError, text) for call, text in VALUE_ERRORS), *OTHER_ERRORS]


@pytest.mark.parametrize(("call", "error", "text"), MESSAGES, ids=[row[2] for row in MESSAGES])
def test_the_message(call, error, text):
    with pytest.raises(error, match=text):
        call()
