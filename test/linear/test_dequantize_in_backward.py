"""Backward from the dequantised operands that forward multiplied, in high precision.

The oracle casts by `linear_oracle` and multiplies in float64. Every way in which a layer may have
its operands leads to the same bits.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import fake_cuda
import grouped_oracle
import linear_oracle
import pytest
import torch
from assertions import assert_all_bitwise, assert_bitwise, assert_error_within_baseline
from layer_check import run
from meter import saved_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

import float8
from float8 import Float8Linear, Float8LinearConfig, Float8Tensor, cached_weights, float8_linear
from float8.config import RECIPES
from float8.estimate import roofline
from float8.linear import layer as layer_module
from float8.linear.autograd import Call
from float8.linear.float8_weight import cast_again
from float8.linear.plan import plan_for
from float8.linear.refusals import reason_against_call

# Without the recipe whose operands have casts of second uses.
NAMES = [name for name in RECIPES if name != "rowwise_with_gw_hp"]
CONFIGS = {name: replace(RECIPES[name], dequantize_in_backward=True) for name in NAMES}
EVERY_RECIPE = pytest.mark.parametrize("recipe", NAMES)


def operands(m: int = 48, k: int = 160, n: int = 96, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(0)
    x, g = torch.randn(m, k), torch.randn(m, n) * 1e-3
    x *= 5.0 ** -(torch.arange(m) % 4).unsqueeze(1)  # rows differ, which separates granularities
    return nn.Linear(k, n, dtype=dtype), x.to(dtype), g.to(dtype)


def results(layer, x, g):
    return tuple(run(layer, x, g).values())


def dequantized(x, operand, dtype):
    """The values of a float8 operand in float64, rounded to the compute dtype."""
    values, scale = linear_oracle._cast(x, operand, None)
    return (values * scale).to(dtype)


@pytest.mark.parametrize("shape", [(48, 160, 96), (5, 123, 37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_RECIPE
def test_gradients_are_products_of_what_forward_multiplied(recipe, dtype, shape):
    linear, x, g = operands(*shape, dtype)
    layer = Float8Linear.from_float(copy.deepcopy(linear), CONFIGS[recipe])
    plain = Float8Linear.from_float(linear, recipe)
    of_x, of_w = linear_oracle.GEMMS[recipe]["output"]
    w = linear.weight.detach()
    for _ in range(2):  # delayed: the first step is dynamic, the second uses the history
        found, expected = run(layer, x, g), run(plain, x, g)
        x8, w8 = dequantized(x, of_x, dtype), dequantized(w, of_w, dtype)
        assert_bitwise(found["output"], expected["output"], recipe)
        assert_bitwise(found["grad_bias"], expected["grad_bias"], recipe)
        for name, a, b in (("grad_input", g, w8), ("grad_weight", g.t(), x8)):
            exact = a.double() @ b.double()
            assert_error_within_baseline(found[name], exact, a @ b, 2.0, recipe, name)
        float8.after_step(layer)
        float8.after_step(plain)
    assert layer.state_dict().keys() <= plain.state_dict().keys()
    assert not any("grad_output" in key for key in layer.state_dict())


def test_a_weight_that_backward_reads_in_high_precision_is_caught(monkeypatch):
    def faulty(saved, call):
        dequantizes = call.plan.grad_input.b is None
        return (saved[0].t(), None) if dequantizes else cast_again(saved, call)

    monkeypatch.setattr(layer_module, "Call", partial(Call, read_weight=faulty))
    with pytest.raises(AssertionError, match="grad_input"):
        test_gradients_are_products_of_what_forward_multiplied(
            "rowwise", torch.bfloat16, (48, 160, 96)
        )


# How a layer is run: (layer, x) -> its output.
WAYS = {
    "aot_eager": lambda layer, x: torch.compile(layer, backend="aot_eager", fullgraph=True)(x),
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "in batches": lambda layer, x: layer(x.view(2, 24, -1)).view(48, -1),
}


@pytest.mark.parametrize("way", WAYS)
@EVERY_RECIPE
def test_every_way_has_the_same_bits(recipe, way):
    linear, x, g = operands()
    layer = Float8Linear.from_float(linear, CONFIGS[recipe])
    expected = results(layer, x, g)

    class Wrapped(nn.Module):
        weight, bias = layer.weight, layer.bias

        def forward(self, x):
            return WAYS[way](layer, x)

    assert_all_bitwise(results(Wrapped(), x, g), expected, (recipe, way))


@pytest.mark.slow
def test_inductor_has_the_same_bits():
    linear, x, g = operands()
    layer = Float8Linear.from_float(linear, CONFIGS["blockwise"])
    expected = results(layer, x, g)
    layer.compile(fullgraph=True)
    assert_all_bitwise(results(layer, x, g), expected)


@EVERY_RECIPE
def test_a_cached_weight_has_the_same_bits(recipe):
    linear, x, g = operands()
    layer = Float8Linear.from_float(linear, CONFIGS[recipe])
    for _ in range(2):
        expected = results(layer, x, g)
        with cached_weights(layer):
            assert_all_bitwise(results(layer, x, g), expected, recipe)
        float8.after_step(layer)


@EVERY_RECIPE
def test_a_resident_weight_and_an_input_in_float8_have_the_same_bits(recipe):
    linear, x, g = operands()
    config, cast = CONFIGS[recipe], RECIPES[recipe].cast_config_input
    expected = run(Float8Linear.from_float(copy.deepcopy(linear), config), x, g)
    x8 = Float8Tensor.from_high_precision(
        x, float8.E4M3, cast.granularity, cast.static_scale, cast.scale_format
    )
    leaf = linear.weight.detach().clone().requires_grad_()
    if recipe != "delayed":
        out = float8_linear(x8, leaf, linear.bias, config)
        out.backward(g)
        assert_all_bitwise((out, leaf.grad), (expected["output"], expected["grad_weight"]))
    resident = float8.convert_to_float8_inference(nn.Sequential(linear), config=config)
    leaf = x.clone().requires_grad_()
    out = resident(leaf)
    out.backward(g)
    assert_all_bitwise((out, leaf.grad), (expected["output"], expected["grad_input"]), recipe)


@EVERY_RECIPE
def test_the_input_is_saved_in_float8_as_estimated(recipe):
    linear, x, _ = operands()
    layer = Float8Linear.from_float(linear, CONFIGS[recipe])
    (m, k), n, x = x.shape, linear.out_features, x.requires_grad_()
    plan = plan_for(layer.config, "cpu", torch.bfloat16)
    estimated = roofline.saved_bytes(roofline.Shape(m, k, n), plan, roofline.Use())
    saved = saved_bytes(lambda: layer(x), layer)
    buffers = 2 * 4 * (recipe == "delayed")
    assert saved == estimated + buffers and saved <= 0.65 * x.nbytes


@pytest.mark.parametrize("recipe", [r for r in NAMES if r != "delayed"])
def test_experts_read_what_forward_multiplied(recipe):
    torch.manual_seed(0)
    x, w, g = torch.randn(100, 64), torch.randn(4, 64, 96), torch.randn(100, 96)
    ends = [30, 30, 77, 90]
    x[90:] = g[90:] = torch.nan
    leaves = x.requires_grad_(), w.requires_grad_()
    offs = torch.tensor(ends, dtype=torch.int32)
    float8.grouped_mm(*leaves, offs, CONFIGS[recipe]).backward(g)
    of_x, of_w = linear_oracle.GEMMS[recipe]["output"]
    x8 = x.detach().clone()
    x8[:90] = dequantized(x8[:90], of_x, x.dtype)
    w8 = torch.stack([dequantized(each.t(), of_w, w.dtype).t() for each in w.detach()])
    high = dict.fromkeys(("output", "grad_input", "grad_weight"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(linear_oracle.GEMMS, "none", high)
        expected = grouped_oracle.expected("none", x8, w8, ends, g)
    for name, leaf in zip(("grad_input", "grad_weight"), leaves, strict=True):
        product = expected[name]
        assert_error_within_baseline(leaf.grad, product.exact, product.plain, 2.0, recipe, name)


# --- on a GPU


@EVERY_RECIPE
def test_a_gpu_multiplies_once_in_float8(recipe):
    """The scales stay in the order in which they can be dequantised."""
    arch = "sm_100" if "mxfp8" in recipe else "sm_90"
    with fake_cuda.fake_cuda(arch):
        x, w, g = (fake_cuda.empty(*shape) for shape in ((64, 128), (96, 128), (64, 96)))
        results = fake_cuda.step(CONFIGS[recipe], x, w, g)
    assert (results.grad_x.shape, results.grad_w.shape) == (x.shape, w.shape)
    assert sum(t is not None and t.shape == x.t().shape for t in results.saved) == 1
    assert not any(t is not None and t.shape == x.shape for t in results.saved)


def test_experts_in_mx_formats_are_refused_on_a_gpu():
    plan = plan_for(CONFIGS["mxfp8"], "sm_100", torch.bfloat16, grouped=True)
    reason = reason_against_call(plan, 64, 64, 64, True, True)
    assert "leave dequantize_in_backward out" in reason


def test_what_has_no_meaning_is_refused():
    off = float8.CastConfig(float8.ScalingType.DISABLED)
    for config, words in (
        (RECIPES["rowwise_with_gw_hp"], "cast_config_(input|weight)_for.*leave it None"),
        (replace(RECIPES["tensorwise"], smooth_input=True), "smooth_input"),
        (Float8LinearConfig(off, off, off), "lacks one"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(config, dequantize_in_backward=True)


def test_a_layer_says_it():
    text = repr(Float8Linear(16, 16, config=CONFIGS["tensorwise"]))
    assert "dequantize_in_backward=True" in text and "grad_output=" not in text
