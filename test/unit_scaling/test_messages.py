"""Every error names the call, the value and the remedy: one table.

Errors after which an object must be unchanged are tested in the file of that object.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import float8.unit_scaling as uu
from float8.unit_scaling import functional as U
from float8.unit_scaling import registry
from float8.unit_scaling.constraints import apply_constraint
from float8.unit_scaling.core.functional import scale_elementwise, transformer_residual_scaling_rule
from float8.unit_scaling.formats import FPFormat
from float8.unit_scaling.modules.attention import rotary
from float8.unit_scaling.optim import lr_scale_func_adam, lr_scale_func_sgd, scaled_parameters
from float8.unit_scaling.parameter import set_parameter_data
from float8.unit_scaling.scale import scale_fwd

NAN = math.nan
IDS = torch.tensor([0, 1, 2])
DECODER = {"hidden_size": 16, "vocab_size": 24, "layers": 2, "heads": 2}


def x(*shape):
    return torch.ones(shape)


def attend(function, **options):
    return lambda: function(x(1, 2, 4), x(1, 2, 4), x(1, 2, 4), **options)


def classes(*shape):
    return lambda: U.cross_entropy(x(*shape), torch.zeros(shape[:1], dtype=torch.long))


def mhsa(**options):
    return lambda: uu.MHSA(**{"hidden_size": 8, "heads": 2, "is_causal": True, **options})


def decoder(**options):
    return lambda: uu.TransformerDecoder(**{**DECODER, **options})


def grouped(params, **options):
    return lambda: scaled_parameters(params, lr_scale_func_adam, **{"lr": 2.0, **options})


def learning_rate(scale):
    parameter = uu.Parameter(x(3, 5), "weight")
    parameter.mup_type = "hidden"
    return lambda: scale(parameter)


HALF_SCALED = nn.Sequential(uu.Linear(4, 4), nn.Linear(4, 3))
IN_PLACE = "inplace=True cannot be unit-scaled.*pass inplace=False"
PROBABILITY = r"is a probability in \[0, 1\), got"
TWO_CLASSES = "there must be 2 classes or more"
LEGACY = "torch's old names; pass reduction='none'"
COUNTS = "scale_grad_by_freq=True .* pass False"
UNKNOWN = r"is unknown: use one of gmean, hmean, amean.* to_grad_input_scale, None"

VALUE_ERRORS = [
    # functions
    (lambda: U.silu(x(3), inplace=True), f"silu: {IN_PLACE}"),
    (lambda: U.dropout(x(3), inplace=True), f"dropout: {IN_PLACE}"),
    *((lambda p=p: U.dropout(x(3), p, False), f"dropout: p {PROBABILITY} {p}")
      for p in (1.0, -0.1, 1.5, NAN)),
    *((lambda m=m: U.gelu(x(2), mult=m), f"gelu: mult .* greater than 0, got {m}")
      for m in (0, -1.0, NAN, math.inf)),
    (lambda: U.silu_glu(x(4, 3), x(1, 3)), r"input has shape \(4, 3\) and gate \(1, 3\)"),
    *(row for f in (U.scaled_dot_product_attention, U.sqrt_softmax_attention) for row in (
        (attend(f, mult=2.0, scale=0.25), r"both mult=2\.0 and scale=0\.25"),
        (attend(f, scale=0.0), "scale multiplies .* greater than 0, got 0.0"),
        (attend(f, mult=-1), "attention: mult .* greater than 0, got -1"),
        (attend(f, dropout_p=1.0), f"attention: dropout_p {PROBABILITY} 1.0"),
        (attend(f, dropout_p=-0.5), f"attention: dropout_p {PROBABILITY} -0.5"),
    )),
    (lambda: U.conv1d(x(2, 4, 9), x(6, 4)), r"in_channels / groups, taps\), got \(6, 4\)"),
    (lambda: U.conv1d(x(2, 4, 9), x(6, 4, 3), padding="full"), "'valid' or 'same', got 'full'"),
    *((classes(*shape), TWO_CLASSES) for shape in ((1,), (3, 1), (3, 1, 4), (3, 0))),
    (lambda: U.cross_entropy(torch.tensor(1.0), torch.tensor(0)), "got 0-d"),
    *((lambda o=o: U.cross_entropy(x(3, 4), IDS, **o), text) for o, text in (
        ({"reduction": "max"}, "reduction is 'none', 'mean' or 'sum', got 'max'"),
        ({"size_average": True}, "size_average=True and reduce=None"),
        ({"reduce": False}, f"cross_entropy: .*{LEGACY}"),
        ({"label_smoothing": 1.0}, "label_smoothing is in"),
        ({"mult": 0}, "cross_entropy: mult"),
    )),
    (lambda: U.mse_loss(x(3), x(2, 3)), r"input has shape \(3,\) and target \(2, 3\)"),
    (lambda: U.mse_loss(x(3), x(3), weight=x(3)), "weight has no unit-scaling rule"),
    (lambda: U.mse_loss(x(3), x(3), True), f"mse_loss: .*{LEGACY}"),
    (lambda: U.embedding(IDS, x(3, 3), scale_grad_by_freq=True), f"embedding: {COUNTS}"),
    (lambda: U.linear(x(3, 7), x(7)), r"weight of shape \(out_features, in_features\), got \(7"),
    (lambda: U.linear(x(3, 7), x(5, 7), constraint="mean"), f"'mean' {UNKNOWN}"),
    (lambda: U.matmul(x(), x(3)), r"got \(\) and \(3,\)"),
    (lambda: U.add(x(3), x(3), out=x(3)), "out= cannot be unit-scaled"),
    *((lambda tau=tau: U.residual_split(x(3), tau), "tau is the weight of a residual branch")
      for tau in (-0.1, NAN, math.inf)),
    # their parts
    *((lambda name=name: apply_constraint(name, 1.0, 2.0), f"'{name}' {UNKNOWN}")
      for name in ("mean", "", "GMEAN", "apply_constraint", "Callable")),
    (lambda: apply_constraint("to_left_grad_scale", 1.0, 2.0), "not defined .* of 2 scales"),
    (lambda: apply_constraint("to_grad_input_scale", 1.0, 1.0, 1.0), "not defined .* of 3 scales"),
    (lambda: scale_elementwise(torch.tanh, 1.0, 1.0, "mean"), "'mean' is unknown"),
    (lambda: transformer_residual_scaling_rule(1.0, -1), "residual_attn_ratio is a ratio .* -1"),
    # modules
    (lambda: uu.SiLU(inplace=True), f"uu.SiLU: {IN_PLACE}"),
    (lambda: uu.Dropout(inplace=True), f"uu.Dropout: {IN_PLACE}"),
    *((lambda p=p: uu.Dropout(p), f"uu.Dropout: p {PROBABILITY} {p}")
      for p in (1.0, -0.1, 1.5, NAN)),
    *((lambda o=o: uu.CrossEntropyLoss(**o), f"uu.CrossEntropyLoss: .*{LEGACY}")
      for o in ({"reduce": False}, {"reduce": True}, {"size_average": False})),
    (lambda: uu.Linear(3, 4, constraint="to_output")(x(2, 3)), f"'to_output' {UNKNOWN}"),
    (lambda: uu.Embedding(5, 3, scale_grad_by_freq=True), f"uu.Embedding: {COUNTS}"),
    (mhsa(hidden_size=10, heads=4), "hidden_size=10 is not a multiple of heads=4"),
    (mhsa(hidden_size=9, heads=3, rotary_base=1e4), "heads of 3 features.*or no rotary_base"),
    (mhsa(dropout_p=1.0), f"uu.MHSA: dropout_p {PROBABILITY} 1.0"),
    (mhsa(attention="linear"), r"\['softmax', 'sqrt_softmax'\], got 'linear'"),
    (lambda: rotary(x(3, 7)), "the head has 7"),
    *((lambda base=base: rotary(x(3, 4), base), f"greater than 0, got {base}")
      for base in (0.0, -10.0, NAN)),
    (decoder(norm="post"), r"norm must be one of \['pre', 'res-post'\], got 'post'"),
    # parameters and optimizers
    (lambda: uu.Parameter(x(2), "hidden"), "'norm', 'output'; got 'hidden'"),
    (lambda: uu.Parameter(x(2), "bias", 0), "at least 1, got 0"),
    (learning_rate(lr_scale_func_adam), r"one of \['weight'.*got 'hidden'"),
    (learning_rate(lr_scale_func_sgd("to_output_scale")), r"one of \['weight'.*got 'hidden'"),
    (lambda: lr_scale_func_sgd("gmean"), "LinearReadout; got 'gmean'"),
    (grouped(HALF_SCALED), r"1.weight of shape \(3, 4\), 1.bias of shape \(3,\)"),
    (grouped([*HALF_SCALED.parameters()]), r"a parameter of shape \(3, 4\).*MupModule"),
    (grouped(nn.ModuleList(nn.Linear(2, 2) for _ in range(9))), "and 10 more"),
    (grouped(uu.Linear(3, 4), lr=None), "needs lr="),
    (grouped([{"lr": 1.0}]), r"needs 'params', got one with \['lr'\]"),
    (grouped(uu.Linear(3, 4), lr=0.0, weight_decay=0.1), "let a scheduler start at 0"),
    # formats
    (lambda: FPFormat(1, 3), "exponent_bits=1 is not between 2 and 8"),
    (lambda: FPFormat(4, -1), "mantissa_bits=-1 is not between 0 and 23"),
    (lambda: FPFormat(4, 3, rounding="up"), "rounding='up'.*'nearest'"),
    (lambda: FPFormat(4, 3, variant="nv"), "variant='nv'.*'fnuz'"),
    (lambda: FPFormat(4, 3, rounding="nearest", srbits=4), "leave srbits out"),
]  # fmt: skip
TYPE_ERRORS = [
    *((lambda m=m: U.silu(x(2), m), "silu: mult is a number")
      for m in (True, False, torch.tensor(1.0))),
    (lambda: apply_constraint(3, 1.0, 2.0), "int 3"),
    *((lambda s=s: scale_fwd(x(2), s), "0-d tensor without gradient")
      for s in (x(2), torch.ones((), requires_grad=True))),
    (lambda: U.register("silu", U.silu), "'silu'"),
    (lambda: uu.Parameter(x(2), "bias", 2.0), "an int; got 2.0"),
    (lambda: uu.Parameter(x(2), "bias", True), "an int; got True"),
    (lambda: uu.Parameter([0.0], "bias"), "takes a tensor"),
    (lambda: set_parameter_data(x(2), "bias"), r"uu\.Parameter; got a Tensor"),
    *((grouped(params), "ordered iterable")
      for params in (nn.Parameter(x(2)), {"params": []}, "weight", 3, {nn.Parameter(x(2))})),
    *((grouped([entry]), "a tensor or a")
      for entry in (3, ("name", 3), (x(2), "name"), None)),
    (lambda: FPFormat(4, 3).quantise(IDS), r"torch\.int64"),
]  # fmt: skip
OTHER_ERRORS = [
    (lambda: U.conv1d(x(2, 4, 9), x(6, 4, 3), stride=0), RuntimeError, "stride is not supported"),
    (lambda: U.glue, AttributeError, "no attribute 'glue'"),
    (lambda: U.unregister(torch.sin), KeyError, "not registered"),
    (lambda: registry.handler(torch.sin), KeyError, "register one"),
]
MESSAGES = [
    *((call, ValueError, text) for call, text in VALUE_ERRORS),
    *((call, TypeError, text) for call, text in TYPE_ERRORS),
    *OTHER_ERRORS,
]


@pytest.mark.parametrize(("call", "error", "text"), MESSAGES, ids=[row[2] for row in MESSAGES])
def test_the_message(call, error, text):
    with pytest.raises(error, match=text):
        call()
