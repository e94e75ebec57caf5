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
from float8.unit_scaling.core.functional import scale_elementwise
from float8.unit_scaling.formats import FPFormat
from float8.unit_scaling.optim import lr_scale_func_adam, lr_scale_func_sgd, scaled_parameters
from float8.unit_scaling.parameter import set_parameter_data
from float8.unit_scaling.scale import scale_fwd

IDS = torch.tensor([0, 1, 2])
HALF_SCALED = nn.Sequential(uu.Linear(4, 4), nn.Linear(4, 3))


def x(*shape):
    return torch.ones(shape)


def grouped(params, **options):
    return lambda: scaled_parameters(params, lr_scale_func_adam, **{"lr": 2.0, **options})


IN_PLACE = "inplace=True cannot be unit-scaled; pass inplace=False"
LEGACY = "size_average or reduce .*; pass reduction='none'"
COUNTS = "scale_grad_by_freq=True .* pass False"
UNKNOWN = r"is unknown: use one of gmean, hmean, amean.* to_grad_input_scale, None"

VALUE_ERRORS = [
    (lambda: U.silu(x(3), inplace=True), f"silu: {IN_PLACE}"),
    (lambda: U.dropout(x(3), inplace=True), f"dropout: {IN_PLACE}"),
    (lambda: uu.SiLU(inplace=True), f"uu.SiLU: {IN_PLACE}"),
    (lambda: uu.Dropout(inplace=True), f"uu.Dropout: {IN_PLACE}"),
    *((lambda m=m: U.gelu(x(2), mult=m), f"gelu: mult .* greater than 0, got {m}")
      for m in (0, -1.0, math.nan, math.inf, True)),
    (lambda: U.silu_glu(x(4, 3), x(1, 3)), "silu_glu: a gate of another shape"),
    *((lambda f=f: f(x(1, 2, 4), x(1, 2, 4), x(1, 2, 4), mult=2.0, scale=0.25), "mult=2.0 or scal")
      for f in (U.scaled_dot_product_attention, U.sqrt_softmax_attention)),
    (lambda: U.cross_entropy(x(3, 4), IDS, reduction="max"), "'mean' or 'sum', got 'max'"),
    (lambda: U.cross_entropy(x(3, 4), IDS, size_average=True), f"cross_entropy: {LEGACY}"),
    (lambda: uu.CrossEntropyLoss(reduce=False), f"uu.CrossEntropyLoss: {LEGACY}"),
    (lambda: U.mse_loss(x(3), x(3), True), f"mse_loss: {LEGACY}"),
    (lambda: U.mse_loss(x(3), x(2, 3)), "mse_loss: a target of another shape"),
    (lambda: U.mse_loss(x(3), x(3), weight=x(3)), "multiply the losses"),
    (lambda: U.embedding(IDS, x(3, 3), scale_grad_by_freq=True), f"embedding: {COUNTS}"),
    (lambda: uu.Embedding(5, 3, scale_grad_by_freq=True), f"uu.Embedding: {COUNTS}"),
    (lambda: U.add(x(3), x(3), out=x(3)), "out= cannot be unit-scaled"),
    *((lambda name=name: apply_constraint(name, 1.0, 2.0), f"{name!r} {UNKNOWN}")
      for name in ("mean", "", 3)),
    (lambda: apply_constraint("to_left_grad_scale", 1.0, 2.0), "not defined .* of 2 scales"),
    (lambda: apply_constraint("to_grad_input_scale", 1.0, 1.0, 1.0), "not defined .* of 3 scales"),
    (lambda: scale_elementwise(torch.tanh, 1.0, 1.0, "mean"), "'mean' is unknown"),
    (lambda: uu.Linear(3, 4, constraint="to_output")(x(2, 3)), f"'to_output' {UNKNOWN}"),
    (lambda: uu.MHSA(10, 4, True), "hidden_size=10 is a multiple of heads=4"),
    (lambda: uu.MHSA(8, 2, True, attention="linear"), "'sqrt_softmax'], not 'linear'"),
    (lambda: uu.TransformerDecoder(16, 24, 2, 2, norm="post"), "'res-post'], got 'post'"),
    (lambda: uu.Parameter(x(2), "hidden"), "'output'.; got 'hidden'"),
    (lambda: uu.Parameter(x(2), "bias", 0), "at least 1, got 0"),
    (lambda: lr_scale_func_sgd("gmean"), "LinearReadout; got 'gmean'"),
    (grouped(HALF_SCALED), r"1.weight of shape \(3, 4\), 1.bias of shape \(3,\)"),
    (grouped([*HALF_SCALED.parameters()]), r"a parameter of shape \(3, 4\).*MupModule"),
    (grouped(nn.ModuleList(nn.Linear(2, 2) for _ in range(9))), "and 10 more"),
    (grouped(uu.Linear(3, 4), lr=None), "needs lr="),
    (grouped(uu.Linear(3, 4), lr=0.0, weight_decay=0.1), "let a scheduler start at 0"),
    (lambda: FPFormat(1, 3), "exponent_bits=1 is not in"),
    (lambda: FPFormat(4, 3, rounding="up"), "rounding='up'.*'nearest'"),
    (lambda: FPFormat(4, 3, rounding="nearest", srbits=4), "leave srbits out"),
    (lambda: U.register(torch.nn.functional.silu, U.gelu), "registered already; pass replace=True"),
]  # fmt: skip
TYPE_ERRORS = [
    *((lambda s=s: scale_fwd(x(2), s), "0-d tensor without gradient")
      for s in (x(2), torch.ones((), requires_grad=True))),
    (lambda: set_parameter_data(x(2), "bias"), r"uu\.Parameter; got a Tensor"),
    *((grouped(params), "ordered iterable")
      for params in (nn.Parameter(x(2)), {"params": []}, "weight", {nn.Parameter(x(2))})),
    (grouped([3]), "a tensor or a"),
    (lambda: FPFormat(4, 3).quantise(IDS), r"torch\.int64"),
]  # fmt: skip
MESSAGES = [
    *((call, ValueError, text) for call, text in VALUE_ERRORS),
    *((call, TypeError, text) for call, text in TYPE_ERRORS),
]


@pytest.mark.parametrize(("call", "error", "text"), MESSAGES, ids=[row[2] for row in MESSAGES])
def test_the_message(call, error, text):
    with pytest.raises(error, match=text):
        call()
