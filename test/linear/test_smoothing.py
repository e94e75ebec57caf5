"""Smooth inputs: exact without rounding, and each channel keeps its precision."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_all_bitwise, assert_bitwise
from meter import saved_bytes
from shapes import pairs
from torch import nn
from torch.utils.checkpoint import checkpoint

import float8
from float8 import (
    Blockwise,
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    Rowwise,
    ScaleFormat,
    ScalingType,
    high_precision,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DELAYED = CastConfig(scaling_type=ScalingType.DELAYED)
POW2 = CastConfig(scale_format=ScaleFormat.POWER_OF_TWO)
CONFIGS = {
    "tensorwise": Float8LinearConfig(POW2, POW2, POW2, smooth_input=True),
    "delayed input": Float8LinearConfig(DELAYED, POW2, POW2, smooth_input=True),
    "rowwise": replace(RECIPES["rowwise"], smooth_input=True),
    "rowwise_with_gw_hp": replace(RECIPES["rowwise_with_gw_hp"], smooth_input=True),
}
SMOOTH = CONFIGS["tensorwise"]
PLAIN = replace(SMOOTH, smooth_input=False)
M, K, N = 24, 48, 32


def operands(dtype=F32, most=12):
    """x, w and g, for which no cast of ``x * s`` and ``w / s`` rounds; x's channels differ.

    The channels are larger than 1 by factors of two, up to 2^most.
    """
    torch.manual_seed(0)

    def few(*shape):  # E4M3 values within four octaves, the largest in every row and column
        return torch.tensor([1.0, -1.5, 0.25, -0.125, 0.0, 1.75])[torch.randint(6, shape)]

    x, w, g = few(M, K), few(N, K), few(M, N)
    x[:, :] = torch.where(torch.arange(M)[:, None] == torch.arange(K) % M, 1.75, x)
    channels = 2.0 ** torch.linspace(-most, most, K).round()
    return (x * channels).to(dtype), (w / channels).to(dtype), g.to(dtype)


def layer_of(w, config):
    linear = nn.Linear(*w.t().shape, bias=False, dtype=w.dtype)
    linear.weight.data.copy_(w)
    return Float8Linear.from_float(linear, config)


def run(layer, x, g, call=None):
    """The output and both gradients, of the layer or of a call of it."""
    x = x.detach().clone().requires_grad_()
    y = (layer if call is None else call)(x)
    return y.detach(), *torch.autograd.grad(y, (x, layer.weight), g)


def in_float64(x, w, g):
    x, w = (t.double().requires_grad_() for t in (x, w))
    y = F.linear(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), g.double())


# --- the factors


def test_factors_bring_amaxes_to_one():
    amaxes = torch.tensor([1.0, 0.5, 0.75, 448.0, 1e-10, 3.1e12, math.nextafter(1, 2)])
    factors = float8.kernels.smoothing_factors_from_amax(amaxes)
    assert (factors.log2() % 1 == 0).all()
    assert ((amaxes * factors > 0.5) & (amaxes * factors <= 1)).all()
    extreme = torch.tensor([0.0, math.inf, math.nan, 2.0**-61, 2.0**-60, 2.0**100])
    factors = float8.kernels.smoothing_factors_from_amax(extreme)
    assert factors.tolist() == [1, 1, 1, 1, 2.0**60, 2.0**-60]


# --- the layer


def check_exact(config, dtype=F32, most=12):
    x, w, g = operands(dtype, most)
    exact = [tensor.to(dtype) for tensor in in_float64(x, w, g)]
    assert_all_bitwise(run(layer_of(w, config), x, g), exact, f"check_exact({dtype}, {most})")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_nothing_is_lost_where_no_cast_rounds(config, dtype):
    """Output and gradients are those of float64, of channels that are 2^24 apart."""
    check_exact(config, dtype, 5 if dtype is F16 else 12)


def test_without_factors_channels_are_lost():
    with pytest.raises(AssertionError, match="replay"):
        check_exact(PLAIN)


@pairs(config=list(CONFIGS), dtype=[F32, BF16, F16])
def test_random_channels_keep_their_precision(config, dtype):
    """Each channel of each gradient is as precise as the others; without factors, some are 0."""
    torch.manual_seed(1)
    channels = 2.0 ** torch.linspace(-8, 6, K)
    x, w, g = torch.randn(2, M, K) * channels, torch.randn(N, K) / channels, torch.randn(2, M, N)
    x, w, g = (t.to(dtype) for t in (x, w, g))
    found = run(layer_of(w, CONFIGS[config]), x, g)
    exact = in_float64(x, w, g)
    for name, one, of in zip(("y", "grad_x", "grad_w"), found, exact, strict=True):
        difference, norm = (t.flatten(0, -2).norm(dim=0) for t in (one.double() - of, of))
        errors = difference / norm
        assert errors.max() < 0.2, (config, dtype, name, errors.max())
    assert found[0].shape == (2, M, N) and found[1].shape == x.shape


def test_a_sporadic_outlier_does_not_saturate_a_delayed_scale():
    x, w, g = torch.randn(M, K), torch.randn(N, K), torch.randn(M, N)
    outlier = x.clone()
    outlier[3, 5] = 3000.0
    errors = {}
    for smooth in (True, False):
        layer = layer_of(w, Float8LinearConfig(DELAYED, smooth_input=smooth))
        for _ in range(2):
            run(layer, x, g)
            sync_float8_amax_and_scale_history(layer)
        y, exact = run(layer, outlier, g)[0], F.linear(outlier, w)
        errors[smooth] = float((y - exact).norm() / exact.norm())
        amax = layer.cast_input.state.current_amax
        assert (0.5 < amax <= 1) if smooth else amax == 3000
    assert errors[True] < 0.05 < 0.9 < errors[False]


@pytest.mark.parametrize("fill", [0.0, math.inf, math.nan])
def test_channels_that_have_no_factor(fill):
    """A channel of zeros changes nothing; infinities and NaNs reach what they reach elsewhere."""
    x, w, g = operands()
    x[:, 7] = fill
    found, plain = run(layer_of(w, SMOOTH), x, g), run(layer_of(w, PLAIN), x, g)
    for one, exact, other in zip(found, in_float64(x, w, g), plain, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        if fill == 0:
            assert_bitwise(one, exact.float())


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_only_wanted_gradients(frozen):
    x, w, g = operands()
    layer, exact = layer_of(w, SMOOTH), in_float64(x, w, g)
    layer.weight.requires_grad_(frozen == "input")
    layer(x.requires_grad_(frozen == "weight")).backward(g)
    for found, wanted in zip((x.grad, layer.weight.grad), exact[1:], strict=True):
        assert found is None or torch.equal(found, wanted.float())
    assert (x.grad is None) == (frozen == "input") != (layer.weight.grad is None)
    layer(torch.randn(2, 0, K, requires_grad=True)).sum().backward()


def test_backward_keeps_one_byte_per_element_and_the_factors():
    x = torch.randn(256, 128, requires_grad=True)
    plain, smooth = (
        saved_bytes(lambda layer=layer: layer(x), layer)
        for layer in (Float8Linear(128, 64, config=c) for c in (RECIPES["tensorwise"], SMOOTH))
    )
    assert smooth - plain == 4 * 128


@pairs(config=list(CONFIGS), how=["checkpointed", "compiled"])
def test_checkpointed_and_compiled_it_has_the_same_bits(config, how):
    x, w, g = operands(BF16)
    layer = layer_of(w, CONFIGS[config])
    wrapped = {
        "checkpointed": lambda x: checkpoint(layer, x, use_reentrant=False),
        "compiled": torch.compile(layer, backend="aot_eager", fullgraph=True),
    }[how]
    assert_all_bitwise(run(layer, x, g, wrapped), run(layer, x, g), (config, how))


def test_autocast_and_the_functional_form():
    x, w, g = operands()
    layer = layer_of(w, SMOOTH)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == BF16
    assert_bitwise(y, in_float64(x, w, g)[0].to(BF16))
    assert_bitwise(float8.float8_linear(x, w, config=SMOOTH), in_float64(x, w, g)[0].float())
    with high_precision(layer):
        assert_bitwise(layer(x), F.linear(x, layer.weight))


# --- beside other options


STATIC, OFF = CastConfig(ScalingType.STATIC, static_scale=1.0), CastConfig(ScalingType.DISABLED)
SQUARE = CastConfig(granularity=Blockwise(128, 128), target_dtype=float8.E4M3.dtype)
X, W = torch.ones(M, K), torch.ones(N, K)


def _x8(*granularity):
    return Float8Tensor.from_high_precision(X, float8.E4M3, *granularity)


def _with_float8_weight():
    layer = Float8Linear.from_float(nn.Linear(K, N), SMOOTH, fqn="up")
    weight = Float8Tensor.from_high_precision(layer.weight.detach(), float8.E4M3)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _config(**changes):
    return lambda: Float8LinearConfig(**changes, smooth_input=True)


OFFS = torch.tensor([4, M], dtype=torch.int32)
REFUSED = [
    (_config(cast_config_weight=DELAYED), "cast_config_weight is 'delayed"),
    (_config(cast_config_weight=STATIC), "cast_config_weight is 'static"),
    (_config(cast_config_input=STATIC), "cast_config_input is 'static"),
    (_config(enable_fsdp_float8_all_gather=True), "gathers"),
    (_config(cast_config_weight_for_grad_input=SQUARE), "cast_config_weight_for_grad_input is"),
    (_config(cast_config_input=OFF, cast_config_weight=OFF), "no GEMM casts"),
    *(
        (lambda r=r: replace(RECIPES[r], smooth_input=True), "cast_config_(input|weight) is")
        for r in ("blockwise", "mxfp8", "unit", "delayed")
    ),
    (lambda: _with_float8_weight()(X), "^up: .*Float8Tensor, and smooth_input=True"),
    (
        lambda: float8.convert_to_float8_inference(nn.Sequential(nn.Linear(K, N)), config=SMOOTH),
        "smooth_input=False",
    ),
    (lambda: layer_of(W, SMOOTH)(_x8()), "has smooth_input=True; pass input.dequantize"),
    (lambda: layer_of(W, SMOOTH)(_x8(Rowwise())), "has smooth_input=True"),
    (lambda: float8.float8_linear(_x8(), W, config=SMOOTH), "has smooth_input=True"),
    (
        lambda: float8.grouped_mm(X, torch.randn(2, K, N), OFFS, config=SMOOTH),
        "grouped_mm: smooth_input=True",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_it_does_not_go_with_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(("dtype", "autocast"), [(F16, None), (F32, BF16), (F32, F16)])
def test_an_inspection_rounds_as_the_layer_does(dtype, autocast):
    """1.001 is 1 in bfloat16, which has another factor; 8 / s is beyond float16."""
    layer = nn.Sequential(Float8Linear(K, N, bias=False, dtype=dtype, config=SMOOTH))
    x = torch.rand(M, K).to(dtype)
    x[0], x[0, 0] = 1.001, 6e4
    layer[0].weight.data[0, 0] = 8.0
    with (
        torch.autocast("cpu", autocast or BF16, enabled=autocast is not None),
        float8.inspect(layer) as report,
    ):
        layer(x)
    rounded_x, rounded_w = (t.to(autocast or dtype).double() for t in (x, layer[0].weight.data))
    factors = 2.0 ** -rounded_x.abs().amax(0).log2().ceil()
    expected = {"input": rounded_x * factors, "weight": (rounded_w / factors)}
    for row in report.casts:
        assert row.amax == expected[row.operand].abs().max() and row.nonfinite == 0
