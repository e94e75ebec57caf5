"""``mxfp4_weights=True``: a layer whose weight is that of the oracle, projected before the call.

Output and gradients have the bits of a layer without the option that has the projected weight; the
gradient of the weight passes straight through. Recipes and forms of a layer do not interact with
the projection, so each of them is compared once.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import mxfp4_oracle
import pytest
import torch
from assertions import assert_all_bitwise, assert_bitwise
from layer_check import run
from torch import nn

import float8
from float8 import CastConfig, Float8Linear, Float8LinearConfig, ScaleFormat, ScalingType
from float8.config import RECIPES
from float8.numerics import inspect

POW2 = CastConfig(scale_format=ScaleFormat.POWER_OF_TWO)
OFF = CastConfig(ScalingType.DISABLED)
DELAYED = replace(POW2, scaling_type=ScalingType.DELAYED)
NAMES = ("mxfp8", "mxfp8_2d", "blockwise", "rowwise", "rowwise_with_gw_hp")
PLAIN = {
    **{name: RECIPES[name] for name in NAMES},
    "tensorwise pow2": Float8LinearConfig(cast_config_weight=POW2),
    "delayed pow2": Float8LinearConfig(cast_config_weight=DELAYED),
    "high precision": Float8LinearConfig(OFF, OFF, OFF),
    "dequantised": replace(RECIPES["blockwise"], dequantize_in_backward=True),
}
EVERY_CONFIG = pytest.mark.parametrize("name", PLAIN)


def config_of(name: str) -> Float8LinearConfig:
    return replace(PLAIN[name], mxfp4_weights=True)


def operands(k: int = 160, n: int = 96, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(0)
    linear = nn.Linear(k, n, dtype=dtype)
    x, g = torch.randn(48, k), torch.randn(48, n) * 1e-3
    return linear, x.to(dtype), g.to(dtype)


def projected(linear: nn.Linear, dtype: torch.dtype | None = None) -> nn.Linear:
    """A copy with the oracle's weight, of the weight in a compute dtype."""
    new = copy.deepcopy(linear)
    weight = linear.weight.detach()
    new.weight.data = mxfp4_oracle.project(weight.to(dtype or weight.dtype)).to(weight.dtype)
    return new


def results(layer, x, g):
    return tuple(run(layer, x, g).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@EVERY_CONFIG
def test_it_is_the_layer_of_the_projected_weight(name, dtype):
    linear, x, g = operands(dtype=dtype)
    layer = Float8Linear.from_float(copy.deepcopy(linear), config_of(name))
    expected = Float8Linear.from_float(projected(linear), PLAIN[name])
    assert_all_bitwise(results(layer, x, g), results(expected, x, g), name)
    assert_bitwise(layer.weight, linear.weight, name)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_2d", "blockwise", "rowwise"])
def test_both_products_multiply_mxfp4_values(name):
    """With an input and a gradient of one 1 per row, the products are the weight itself."""
    torch.manual_seed(0)
    linear = nn.Linear(160, 96, bias=False)
    weight = projected(linear).weight.detach()
    layer = Float8Linear.from_float(linear, config_of(name))
    assert torch.equal(layer(torch.eye(160)), weight.t())
    x = torch.zeros(96, 160).requires_grad_()
    layer(x).backward(torch.eye(96))
    assert torch.equal(x.grad, weight)


def test_autocast_projects_the_rounded_weight():
    linear, x, g = operands(dtype=torch.float32)
    layer = Float8Linear.from_float(copy.deepcopy(linear), config_of("mxfp8"))
    expected = Float8Linear.from_float(projected(linear, torch.bfloat16), PLAIN["mxfp8"])
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = (results(each, x, g.bfloat16()) for each in (layer, expected))
    assert_all_bitwise(found, wanted)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["mxfp8", "blockwise"])
def test_compiled_it_has_the_bits_of_eager(name, backend):
    linear, x, g = operands(dtype=torch.float32)
    layer = Float8Linear.from_float(linear, config_of(name))
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = x.requires_grad_()
    out = compiled(x)
    grads = torch.autograd.grad(out, (x, layer.weight), g)
    expected = results(layer, x, g)
    assert_all_bitwise((out, *grads), expected[:3], (name, backend))


@pytest.mark.parametrize("name", ["mxfp8", "blockwise", "dequantised"])
def test_cached_weights_follow_the_optimizer(name):
    linear, x, g = operands()
    layer, other = (
        Float8Linear.from_float(copy.deepcopy(linear), config_of(name)) for _ in range(2)
    )
    optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (layer, other)]
    with float8.cached_weights(layer):
        for _ in range(2):
            assert_all_bitwise(results(layer, x, g), results(other, x, g), name)
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize("name", ["mxfp8", "blockwise", "rowwise"])
def test_inference_has_the_weights_that_were_trained(name):
    linear, x, _ = operands()
    layer = Float8Linear.from_float(linear, config_of(name))
    expected = layer(x).detach()
    resident = float8.convert_to_float8_inference(layer)
    assert_bitwise(resident(x).detach(), expected, name)


@pytest.mark.parametrize("name", ["mxfp8", "blockwise", "rowwise"])
def test_experts_are_projected_along_the_contraction(name):
    torch.manual_seed(0)
    w = torch.randn(3, 64, 96).bfloat16()  # (E, N, K)
    x, g = torch.randn(40, 96).bfloat16(), torch.randn(40, 64).bfloat16()
    offs = torch.tensor([16, 16, 40], dtype=torch.int32)
    found = []
    for config, weight in (
        (config_of(name), w),
        (config_of(name), w.mT.contiguous().mT),
        (PLAIN[name], mxfp4_oracle.project(w)),
    ):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = float8.grouped_mm(leaves[0], leaves[1].mT, offs, config)
        out.backward(g)
        found.append((out.detach(), *(leaf.grad for leaf in leaves)))
    assert_all_bitwise(found[0], found[2], name)
    assert_all_bitwise(found[1], found[2], name)


def test_statistics_are_those_of_the_projected_weight():
    """Which float8 keeps: no other weight has no error."""
    linear, x, _ = operands()
    layer = Float8Linear.from_float(linear, config_of("mxfp8"))
    with inspect(layer) as report:
        layer(x)
    (row,) = (row for row in report._rows if row.operand == "weight")
    assert row.sqnr == math.inf


REFUSED = [
    (lambda: replace(RECIPES["tensorwise"], mxfp4_weights=True), "cast_config_weight is"),
    (lambda: replace(RECIPES["unit"], mxfp4_weights=True), "POWER_OF_TWO"),
    (
        lambda: replace(
            RECIPES["rowwise"], cast_config_weight_for_grad_input=CastConfig(), mxfp4_weights=True
        ),
        "cast_config_weight_for_grad_input is",
    ),
    (lambda: replace(config_of("rowwise"), smooth_input=True), "smooth_input"),
    (lambda: replace(config_of("tensorwise pow2"), enable_fsdp_float8_all_gather=True), "gather"),
    (
        lambda: Float8Linear(48, 32, config=config_of("mxfp8"))(torch.ones(32, 48)),
        "in_features=48",
    ),
    (
        lambda: float8.grouped_mm(
            torch.ones(16, 40),
            torch.ones(1, 40, 32),
            torch.tensor([16], dtype=torch.int32),
            config_of("rowwise"),
        ),
        "in_features=40",
    ),
]


@pytest.mark.parametrize(("make", "says"), REFUSED)
def test_what_would_train_other_weights_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_static_power_of_two_is_taken():
    one = replace(RECIPES["unit"].cast_config_weight, scale_format=ScaleFormat.POWER_OF_TWO)
    unit = replace(RECIPES["unit"], cast_config_weight=one)
    linear, x, g = operands()
    layer = Float8Linear.from_float(copy.deepcopy(linear), replace(unit, mxfp4_weights=True))
    expected = Float8Linear.from_float(projected(linear), unit)
    assert_all_bitwise(results(layer, x, g), results(expected, x, g))
    assert "mxfp4_weights=True" in repr(layer)
