"""Smooth inputs: exact without rounding, and each channel keeps its precision."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise
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
    cached_weights,
    convert_to_float8_training,
    high_precision,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.estimate import estimate
from float8.kernels.sqnr import sqnr
from float8.linear import autograd, scaling, smoothing

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
M, K, N = 24, 48, 32


def exponents(most: int):
    """Of the channels: the factors of two by which they are larger than 1."""
    return torch.linspace(-most, most, K).round()


def operands(dtype=F32, most=12, seed=0):
    """x, w and g, for which no cast of ``x * s`` and ``w / s`` rounds; x's channels differ."""
    torch.manual_seed(seed)

    def few(*shape):  # E4M3 values within four octaves, the largest in every row and column
        x = torch.tensor([1.0, -1.5, 0.25, -0.125, 0.0, 1.75])[torch.randint(6, shape)]
        return x

    x, w, g = few(M, K), few(N, K), few(M, N)
    x[:, :] = torch.where(torch.arange(M)[:, None] == torch.arange(K) % M, 1.75, x)
    channels = 2.0 ** exponents(most)
    return (x * channels).to(dtype), (w / channels).to(dtype), g.to(dtype)


def layer_of(w, config):
    layer = Float8Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype, config=config)
    layer.weight.data.copy_(w)
    return layer


def run(layer, x, g):
    """The output and both gradients."""
    x = x.detach().clone().requires_grad_()
    layer.weight.grad = None
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad


def in_float64(x, w, g):
    x, w = (t.double().requires_grad_() for t in (x, w))
    y = F.linear(x, w)
    y.backward(g.double())
    return y.detach(), x.grad, w.grad


# --- the factors


def test_factors_bring_amaxes_to_one():
    amaxes = torch.tensor([1.0, 0.5, 0.75, 448.0, 1e-10, 3.1e12, math.nextafter(1, 2)])
    factors = float8.kernels.smoothing_factors(amaxes)
    for amax, factor in zip(amaxes.tolist(), factors.tolist(), strict=True):
        mantissa, exponent = math.frexp(amax)
        assert factor == 2.0 ** -(exponent - (mantissa == 0.5)), amax
        assert 0.5 < amax * factor <= 1
    extreme = torch.tensor([0.0, math.inf, math.nan, 2.0**-61, 2.0**-60, 2.0**100])
    expected = [1, 1, 1, 1, 2.0**60, 2.0**-60]
    assert float8.kernels.smoothing_factors(extreme).tolist() == expected


def test_scales_of_channels_are_split_again():
    """t and s are recovered but for a power of two, for all magnitudes of float32."""
    for amax in (1e-38, 1e-30, 3e-3, 1.0, 7e4, 3e30, 3e38):
        amaxes = amax * torch.tensor([[1.0, 1e-3, 0.0, 0.7, 1e-20]])
        factors = float8.kernels.smoothing_factors(amaxes)
        t = float8.kernels.scale_from_amax((amaxes * factors).max(), 448.0)
        scales = smoothing.channel_scales(t, factors)
        scale, found = smoothing.split(scales)
        assert_bitwise(scale * smoothing.inverse(found), scales, amax)
        assert (found.log2() % 1 == 0).all() and scale.shape == (1, 1)
    for bad in (math.inf, math.nan):
        scale, found = smoothing.split(smoothing.channel_scales(torch.tensor(bad), factors))
        assert scale.isnan() and found.isfinite().all()


# --- the layer


def check_exact(config, dtype=F32, most=12):
    x, w, g = operands(dtype, most)
    found = run(layer_of(w, config), x, g)
    for name, one, exact in zip(("y", "grad_x", "grad_w"), found, in_float64(x, w, g), strict=True):
        assert_bitwise(one, exact.to(dtype), f"check_exact({dtype}, {most})", name)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_nothing_is_lost_where_no_cast_rounds(config, dtype):
    """Output and gradients are those of float64, of channels that are 2^24 apart."""
    check_exact(config, dtype, 5 if dtype is F16 else 12)


def test_without_factors_channels_are_lost():
    with pytest.raises(AssertionError, match="replay"):
        check_exact(replace(SMOOTH, smooth_input=False))


FAULTS = {
    "inverse forgotten": (autograd, "inverse", lambda factors: factors),
    "gradient of x without its factors": (
        autograd,
        "smoothing_factors",
        lambda x: smoothing.smoothing_factors(x).roll(1, 1),
    ),
    "input as it is": (autograd, "smoothed", lambda x, factors: x),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault):
    place, name, wrong = FAULTS[fault]
    with mock.patch.object(place, name, wrong), pytest.raises(AssertionError, match="replay"):
        check_exact(SMOOTH)


@pytest.mark.parametrize("place", ["grad_x", "grad_w"])
def test_a_gradient_multiplied_the_wrong_way_is_seen(place):
    real = autograd.product

    def wrong(gemm, a, b, *others):
        out = real(gemm, a, b, *others)
        is_grad_x = out.shape == (M, K)
        is_grad_w = out.shape == (N, K)
        channels = 2.0 ** exponents(12)
        return out * channels if (is_grad_x, is_grad_w)[place == "grad_w"] else out

    check_exact(SMOOTH)
    with mock.patch.object(autograd, "product", wrong), pytest.raises(AssertionError, match=place):
        check_exact(SMOOTH)


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
    if fill == 0:
        for one, exact in zip(run(layer_of(w, SMOOTH), x, g), in_float64(x, w, g), strict=True):
            assert_bitwise(one, exact.float())
        return
    smooth, plain = (
        run(layer_of(w, c), x, g) for c in (SMOOTH, replace(SMOOTH, smooth_input=False))
    )
    for one, other in zip(smooth, plain, strict=True):
        assert torch.equal(one.isnan(), other.isnan())


@pytest.mark.parametrize("shape", [(0, K), (2, 0, K), (K,)])
def test_empty_inputs_and_vectors(shape):
    layer, x = Float8Linear(K, N, config=SMOOTH), torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], N)
    y.sum().backward()
    assert x.grad.shape == shape and layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("frozen", ["weight", "input", "both"])
def test_only_wanted_gradients(frozen):
    x, w, g = operands()
    layer = layer_of(w, SMOOTH)
    layer.weight.requires_grad_(frozen == "input")
    x.requires_grad_(frozen == "weight")
    y = layer(x)
    assert y.requires_grad == (frozen != "both")
    if y.requires_grad:
        y.backward(g)
    exact = in_float64(x.detach(), w, g)
    assert_bitwise(y.detach(), exact[0].float())
    for found, of in ((x.grad, exact[1]), (layer.weight.grad, exact[2])):
        assert found is None or torch.equal(found, of.float())
    assert (layer.weight.grad is not None, x.grad is not None) == (
        frozen == "input", frozen == "weight",
    )  # fmt: skip


def test_backward_keeps_one_byte_per_element_and_the_factors():
    x = torch.randn(256, 128, requires_grad=True)
    plain, smooth = (
        saved_bytes(lambda layer=layer: layer(x), layer)
        for layer in (Float8Linear(128, 64, config=c) for c in (RECIPES["tensorwise"], SMOOTH))
    )
    assert smooth - plain == 4 * 128


def test_checkpointing_has_the_same_bits():
    x, w, g = operands(BF16)
    for name, config in CONFIGS.items():
        layer = layer_of(w, config)
        expected = run(layer, x, g)
        leaf = x.clone().requires_grad_()
        layer.weight.grad = None
        checkpoint(layer, leaf, use_reentrant=False).backward(g)
        for one, other in ((leaf.grad, expected[1]), (layer.weight.grad, expected[2])):
            assert_bitwise(one, other, name)


@pytest.mark.parametrize(
    ("config", "backend"), [("tensorwise", "inductor"), ("rowwise_with_gw_hp", "aot_eager")]
)
def test_compiled_code_has_the_same_bits(config, backend):
    x, w, g = operands(BF16)
    layer = layer_of(w, CONFIGS[config])
    compiled = copy.deepcopy(layer)
    expected = run(layer, x, g)
    found = run_compiled(torch.compile(compiled, backend=backend, fullgraph=True), x, g)
    for one, other in zip((*found, compiled.weight.grad), expected, strict=True):
        assert_bitwise(one, other, (config, backend))


def run_compiled(layer, x, g):
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cast_config_weight": DELAYED}, "cast_config_weight is 'delayed.*only a dynamic scale"),
        (
            {"cast_config_weight": CastConfig(ScalingType.STATIC, static_scale=1.0)},
            "cast_config_weight is 'static.*set cast_config_weight=CastConfig()",
        ),
        (
            {"cast_config_input": CastConfig(ScalingType.STATIC, static_scale=1.0)},
            r"cast_config_input is 'static.*into \(0.5, 1\]",
        ),
        ({"enable_fsdp_float8_all_gather": True}, "gathers a weight that is cast already"),
        (
            {
                "cast_config_weight_for_grad_input": CastConfig(
                    granularity=Blockwise(128, 128), target_dtype=float8.E4M3.dtype
                )
            },
            "cast_config_weight_for_grad_input is .* only the channels of its own block",
        ),
    ],
)
def test_refuses_casts_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=f"smooth_input=True.* {message}"):
        Float8LinearConfig(**changes, smooth_input=True)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "unit", "delayed"])
def test_refuses_other_recipes(recipe):
    with pytest.raises(ValueError, match=r"smooth_input=True, and cast_config_(input|weight) is"):
        replace(RECIPES[recipe], smooth_input=True)


def test_refuses_an_input_that_no_gemm_casts():
    off = CastConfig(ScalingType.DISABLED)
    with pytest.raises(ValueError, match="an input that no GEMM casts needs no factors"):
        Float8LinearConfig(off, off, smooth_input=True)


def test_a_weight_in_float8_is_refused_by_name():
    model = convert_to_float8_training(nn.Sequential(nn.Linear(K, N)), config=SMOOTH)
    layer = model[0]
    layer.weight = nn.Parameter(
        Float8Tensor.from_high_precision(layer.weight.detach(), float8.E4M3), requires_grad=False
    )
    with pytest.raises(ValueError, match=r"0: its weight is a Float8Tensor, and smooth_input=True"):
        model(torch.randn(4, K))
    with pytest.raises(ValueError, match="smooth_input=False"):
        float8.convert_to_float8_inference(nn.Sequential(nn.Linear(K, N)), config=SMOOTH)


def test_a_float8_input_needs_scales_of_channels():
    layer, x = Float8Linear(K, N, config=SMOOTH), torch.randn(M, K)
    for wrong in (
        Float8Tensor.from_high_precision(x, float8.E4M3),
        Float8Tensor.from_high_precision(x, float8.E4M3, Rowwise()),
    ):
        with pytest.raises(ValueError, match="smooth_input=True, which takes inputs in high prec"):
            layer(wrong)
        with pytest.raises(ValueError, match="smooth_input=True, which takes inputs in high prec"):
            float8.float8_linear(wrong, layer.weight, config=SMOOTH)


@pytest.mark.parametrize("scales_only", [True, False])
def test_cached_weights_leaves_the_layer_out(scales_only):
    x, w, _ = operands()
    model = nn.Sequential(layer_of(w, SMOOTH), Float8Linear(N, 16))
    expected = model(x)
    with cached_weights(model, scales_only=scales_only):
        assert model[0].cached_weight is None and model[1].cached_weight is not None
        assert_bitwise(model(x).detach(), expected.detach())


def test_experts_refuse_it():
    offs = torch.tensor([4, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="grouped_mm: smooth_input=True is for linear layers"):
        float8.grouped_mm(torch.randn(8, 32), torch.randn(2, 32, 16), offs, config=SMOOTH)


def test_only_the_layers_of_the_filter_get_it():
    model = nn.ModuleDict({"up": nn.Linear(K, N), "down": nn.Linear(N, K)})
    base = Float8LinearConfig()
    smooth = replace(base, smooth_input=True)
    convert_to_float8_training(
        model, config=smooth, module_filter_fn=lambda module, fqn: fqn == "down"
    )
    convert_to_float8_training(model, config=base)
    assert model["down"].config.smooth_input and not model["up"].config.smooth_input
    assert base.key != smooth.key
    assert "smooth_input=True" in repr(model["down"]) and "smooth" not in repr(model["up"])


def test_an_inspection_sees_what_is_cast():
    """The smallest channels do not underflow in the report either."""
    x, w, g = operands()
    underflows = {}
    for config in (SMOOTH, replace(SMOOTH, smooth_input=False)):
        layer = nn.Sequential(layer_of(w, config))
        with float8.inspect(layer) as report:
            run(layer[0], x, g)
        rows = [row for row in report.casts if row.operand in ("input", "weight")]
        assert len(rows) == 2
        underflows[config.smooth_input] = [row.flushed for row in rows]
    assert max(underflows[True]) == 0 < min(underflows[False])


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(F16, None), (F32, BF16), (F32, F16)], ids=["f16", "bf16 ac", "f16 ac"]
)
def test_an_inspection_rounds_as_the_layer_does(dtype, autocast):
    """1.001 is 1 in bfloat16, which has another factor; 8 / s is beyond float16."""
    torch.manual_seed(0)
    layer = nn.Sequential(Float8Linear(K, N, bias=False, dtype=dtype, config=SMOOTH))
    x = torch.rand(M, K).to(dtype)
    x[0] = 1.001
    x[0, 0] = 6e4
    layer[0].weight.data[0, 0] = 8.0
    casts = []

    def cast(x, *args, **options):
        casts.append(x.abs().max().item())
        return scaling.cast_matrix(x, *args, **options)

    def call():
        return layer(x)

    with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
        wrapped = mock.Mock(wraps=scaling.cast_orientations)
        with mock.patch.multiple(autograd, cast_orientations=wrapped, cast_matrix=cast):
            call()
        casts.append(wrapped.call_args.args[0].abs().max().item())
        with float8.inspect(layer) as report:
            call()
    found = {row.operand: (row.amax, row.nonfinite) for row in report.casts}
    assert found == {"weight": (casts[0], 0), "input": (casts[1], 0)}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("by_gate", [False, True])
def test_the_sqnr_of_a_gradient_is_that_of_the_weight(recipe, by_gate):
    """The largest channel has a gradient that cancels, so that its error is most of all errors."""
    if by_gate and recipe == "rowwise":
        pytest.skip("a gate casts by tensor")
    torch.manual_seed(0)
    config = replace(RECIPES[recipe], smooth_input=True)
    layer = nn.Sequential(Float8Linear(K, N, bias=False, config=config))
    x, g = torch.randn(64, K), torch.randn(64, N)
    x[:, 0] = 1e3 * torch.randn(64)
    g -= x[:, :1] * (x[:, :1].T @ g) / x[:, 0].square().sum()
    values = x
    if by_gate:  # what arrives in float8 is taken for exact
        x = float8.SwiGLUCast(config)(torch.full_like(x, 30.0), x / 30)
        values = x.dequantize()
    exact = g.double().T @ values.double()
    with float8.inspect(layer) as report:
        layer(x).backward(g)
    (found,) = (c.gradient_sqnr for c in report.casts if c.gradient_sqnr is not None)
    expected = sqnr(exact, layer[0].weight.grad)
    assert expected < 10
    assert found == pytest.approx(expected, abs=1.5)


def test_no_time_is_predicted():
    (row,) = estimate([(4096, 512, 1024)], recipes=SMOOTH, device="H100").rows
    (found,) = row.recipes.values()
    assert "the time of smooth_input=True is not predicted" in found.refused
