"""`Float8Linear`: its results, what it saves, what it runs, what it refuses."""

import copy
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise
from layer_check import check_layer, run
from meter import GemmCounter, saved_bytes
from torch import nn

from float8 import (
    E4M3,
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    GemmConfig,
    ScalingType,
    convert_to_float8_training,
    float8_linear,
    high_precision,
    kernels,
)
from float8.config import RECIPES
from float8.distributed.float8_gather import GatheredWeight

OFF = CastConfig(scaling_type=ScalingType.DISABLED)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(48, 160, 96), (1, 16, 16), (5, 123, 7), (130, 257, 131), (3, 1, 1)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_the_quantised_operands(recipe, shape, bias):
    check_layer(recipe, shape, torch.bfloat16, bias, seed=1)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_results_hold_in_every_dtype(recipe, dtype):
    check_layer(recipe, (48, 160, 96), dtype, seed=2)


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(64, 256, 128), (256, 1024, 512)])
def test_results_hold_on_float8_tensor_cores(recipe, shape):
    check_layer(recipe, shape, torch.bfloat16, seed=3, device="cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "by hand"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_few_tokens_run_on_float8_tensor_cores(recipe, tokens):
    """As generation has them; in training their gradients contract them, padded.

    "By hand" leaves fast accumulation at its default, which products of blocks do not have.
    """
    config = RECIPES["blockwise" if recipe == "by hand" else recipe]
    if recipe == "by hand":
        config = replace(config, gemm_config_output=GemmConfig(use_fast_accum=True))
    linear = nn.Linear(256, 128, dtype=torch.bfloat16, device="cuda")
    x, g = (torch.randn(tokens, n, dtype=torch.bfloat16, device="cuda") for n in (256, 128))
    with torch.no_grad():
        out = Float8Linear.from_float(linear, config=config)(x)
        exact = Float8Linear.from_float(linear, config=replace(config, emulate=True))(x)
    assert (out - exact).float().norm() <= 0.01 * exact.float().norm()
    padded, emulated = (
        run(Float8Linear.from_float(linear, config=replace(config, **option)), x, g)
        for option in ({"pad_inner_dim": True}, {"emulate": True})
    )
    for name, mine in padded.items():
        assert (mine - emulated[name]).float().norm() <= 0.02 * emulated[name].float().norm(), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_layer_is_deterministic(recipe):
    layer = Float8Linear(64, 48, config=RECIPES[recipe])
    x, g = torch.randn(32, 64), torch.randn(32, 48)
    first, second = run(layer, x, g), run(layer, x, g)
    for name in first:
        assert_bitwise(first[name], second[name], recipe, name)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (2, 1, 3, 64), (0, 64), (2, 0, 64)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_inputs_of_any_rank_and_empty_batches(recipe, shape):
    layer = Float8Linear(64, 48, config=RECIPES[recipe])
    x = torch.randn(shape, requires_grad=True)
    out = layer(x)
    assert out.shape == (*shape[:-1], 48)
    out.backward(torch.randn_like(out))
    assert x.grad.shape == x.shape
    if 0 in shape:
        assert not layer.weight.grad.any() and not layer.bias.grad.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_strides_do_not_matter(recipe):
    layer = Float8Linear(64, 48, config=RECIPES[recipe])
    x, g = torch.randn(64, 32).t(), torch.randn(48, 32).t()
    straight, strided = run(layer, x.contiguous(), g.contiguous()), run(layer, x, g)
    for name in straight:
        if name != "grad_bias":  # a plain sum, whose order follows the strides
            assert_bitwise(strided[name], straight[name], recipe, name)
    layer(torch.randn(32, 64)).sum().backward()  # a grad_output with strides of 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("w_grad", [True, False])
def test_only_products_whose_result_is_wanted_run(recipe, x_grad, w_grad):
    layer = Float8Linear(64, 48, config=RECIPES[recipe])
    layer.weight.requires_grad_(w_grad)
    x, g = torch.randn(32, 64, requires_grad=x_grad), torch.randn(32, 48)
    full = run(copy.deepcopy(layer).requires_grad_(), x, g)
    with GemmCounter() as counter:
        layer(x).backward(g)
    assert counter.products == 1 + x_grad + w_grad
    if x_grad:
        assert_bitwise(x.grad, full["grad_input"])
    if w_grad:
        assert_bitwise(layer.weight.grad, full["grad_weight"])
    assert_bitwise(layer.bias.grad, full["grad_bias"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_is_the_same(recipe, mode):
    layer = Float8Linear(64, 48, config=RECIPES[recipe])
    x = torch.randn(32, 64)
    with mode():
        out = layer(x)
    assert not out.requires_grad
    assert_bitwise(out, layer(x))


# Bytes saved for backward, of bf16 nn.Linear's; the input's scales come on top.
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("shape", [(512, 1024, 64), (256, 512, 384)])
def test_backward_saves_one_byte_per_input_element(recipe, shape):
    m, k, n = shape
    plain = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    x = torch.randn(m, k, dtype=torch.bfloat16, requires_grad=True)
    baseline = saved_bytes(lambda: plain(x * 1), plain)
    layer = Float8Linear.from_float(plain, RECIPES[recipe])
    found = saved_bytes(lambda: layer(x * 1), layer)
    assert baseline == 2 * m * k
    assert found <= 0.52 * baseline


def test_high_precision_grad_weight_saves_the_input_as_it_came():
    layer = Float8Linear(64, 48, dtype=torch.bfloat16, config=RECIPES["rowwise_with_gw_hp"])
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    assert saved_bytes(lambda: layer(x * 1), layer) == 2 * 32 * 64


def test_a_frozen_weight_saves_no_input():
    layer = Float8Linear(64, 48)
    layer.weight.requires_grad_(False)
    x = torch.randn(32, 64, requires_grad=True)
    assert saved_bytes(lambda: layer(x * 1), layer) <= 4  # the weight's scale


def _disabled(*gemms):
    """A config with some GEMMs in high precision."""
    on = CastConfig()
    g_on = CastConfig()
    first = {name: OFF if "output" in gemms else on for name in ("input", "weight")}
    return Float8LinearConfig(
        first["input"],
        first["weight"],
        OFF if "grad_input" in gemms else g_on,
        cast_config_weight_for_grad_input=OFF if "grad_input" in gemms else on,
        cast_config_input_for_grad_weight=OFF if "grad_weight" in gemms else on,
        cast_config_grad_output_for_grad_weight=OFF if "grad_weight" in gemms else g_on,
    )


@pytest.mark.parametrize(
    "gemms",
    [
        c
        for n in range(4)
        for c in itertools.combinations(("output", "grad_input", "grad_weight"), n)
    ],
)
def test_each_gemm_can_be_switched_off_alone(gemms):
    plain = nn.Linear(64, 48)
    layer = Float8Linear.from_float(plain, _disabled(*gemms))
    all_on = Float8Linear.from_float(plain, RECIPES["tensorwise"])
    x, g = torch.randn(32, 64), torch.randn(32, 48)
    found, exact, float8 = run(layer, x, g), run(plain, x, g), run(all_on, x, g)
    for name in ("output", "grad_input", "grad_weight"):
        if name in gemms:
            assert torch.allclose(found[name], exact[name], rtol=1e-5, atol=1e-5), name
        else:
            assert_bitwise(found[name], float8[name], str(gemms), name)


def test_a_second_use_with_its_own_cast_is_cast_for_itself():
    second = CastConfig(target_dtype=torch.float8_e5m2)
    config = Float8LinearConfig(
        cast_config_input_for_grad_weight=second,
        cast_config_grad_output_for_grad_weight=CastConfig(target_dtype=torch.float8_e4m3fn),
    )
    x, g = torch.randn(32, 64), torch.randn(32, 48)
    plain = nn.Linear(64, 48)
    found = run(Float8Linear.from_float(plain, config), x, g)
    same = run(Float8Linear.from_float(plain), x, g)
    assert_bitwise(found["output"], same["output"])
    assert_bitwise(found["grad_input"], same["grad_input"])
    assert not torch.equal(found["grad_weight"], same["grad_weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_rounds_to_its_dtype_first_and_returns_gradients_in_the_parameters(recipe, dtype):
    layer = Float8Linear(64, 48, config=RECIPES[recipe])
    rounded = copy.deepcopy(layer).to(dtype)
    x, g = torch.randn(32, 64, requires_grad=True), torch.randn(32, 48).to(dtype)
    with torch.autocast("cpu", dtype):
        out = layer(x)
    out.backward(g)
    want = run(rounded, x.to(dtype), g)
    assert out.dtype == dtype and x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert_bitwise(out.detach(), want["output"], recipe)
    assert_bitwise(x.grad.to(dtype), want["grad_input"], recipe)
    assert_bitwise(layer.weight.grad.to(dtype), want["grad_weight"], recipe)


def test_a_backward_inside_float16_autocast_computes_the_same():
    layer = Float8Linear(64, 48)
    x, g = torch.randn(32, 64), torch.randn(32, 48)
    want = run(layer, x, g)
    x.requires_grad_()
    layer.zero_grad()
    out = layer(x)
    with torch.autocast("cpu", torch.float16):
        out.backward(g)
    assert_bitwise(x.grad, want["grad_input"])
    assert_bitwise(layer.weight.grad, want["grad_weight"])


def test_the_functional_form_respects_autocast():
    layer = Float8Linear(64, 48)
    x = torch.randn(32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = float8_linear(x, layer.weight, layer.bias), layer(x)
    assert out.dtype == torch.bfloat16
    assert_bitwise(out.detach(), expected.detach())


def test_without_gradients_only_the_output_is_cast_for():
    layer = Float8Linear(64, 48, config=RECIPES["rowwise"])
    x = torch.randn(32, 64)
    with mock.patch("float8.kernels.cast", wraps=kernels.cast) as cast, torch.no_grad():
        layer(x)
    assert cast.call_count == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_meta_inputs_give_shapes(recipe):
    layer = Float8Linear(64, 48, device="meta", config=RECIPES[recipe])
    assert layer(torch.empty(2, 3, 64, device="meta")).shape == (2, 3, 48)


def test_autocast_does_not_touch_a_layer_that_is_in_its_dtype_already():
    layer = Float8Linear(64, 48, dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer(x)
    assert_bitwise(inside, layer(x))


def test_an_overflowing_grad_scaler_step_is_skipped():
    layer = Float8Linear(16, 16)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for x, changes in ((torch.randn(8, 16), True), (torch.full((8, 16), float("inf")), False)):
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(layer(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(layer.weight, before) is not changes
        assert layer.weight.isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_inputs_are_seen_in_the_output_and_in_the_gradient(recipe, bad):
    layer = Float8Linear(64, 48, config=RECIPES[recipe])
    x, g = torch.randn(32, 64), torch.randn(32, 48)
    x[3, 5] = bad
    found = run(layer, x, g)
    assert found["output"][3].isnan().all()
    assert not found["grad_weight"][:, 5].isfinite().any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_stay_zeros(recipe):
    layer = Float8Linear(64, 48, bias=False, config=RECIPES[recipe])
    found = run(layer, torch.zeros(32, 64), torch.randn(32, 48))
    assert not found["output"].any() and not found["grad_weight"].any()
    found = run(layer, torch.randn(32, 64), torch.zeros(32, 48))
    assert not found["grad_input"].any() and not found["grad_weight"].any()


def test_a_layer_called_twice_accumulates_both_uses():
    layer = Float8Linear(32, 32)
    x, g = torch.randn(8, 32), torch.randn(8, 32)
    middle = layer(x).detach().requires_grad_()
    layer(middle).backward(g)
    second = layer.weight.grad.clone()
    layer.weight.grad = None
    layer(x).backward(middle.grad)
    expected = second + layer.weight.grad
    layer.weight.grad = None
    layer(layer(x)).backward(g)
    assert torch.allclose(layer.weight.grad, expected, rtol=1e-6)


def test_double_backward_is_refused_clearly():
    layer, x = Float8Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"no second derivative(.|\n)*high_precision"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with high_precision(layer):
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        grad.sum().backward()


def test_vmap_is_refused_with_the_way_out():
    with pytest.raises(RuntimeError, match=r"torch\.func .*high_precision\(model\)"):
        torch.func.vmap(Float8Linear(16, 16))(torch.randn(2, 4, 16))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(4, 64, dtype=torch.int64), TypeError, r"up\.w1: input is torch\.int64"),
        (torch.ones(4, 64, dtype=torch.float64), TypeError, r"up\.w1: input is torch\.float64"),
        (torch.ones(4, 64, dtype=torch.complex64), TypeError, r"up\.w1: input is torch\.complex64"),
        (torch.ones(4, 64, dtype=torch.bfloat16), TypeError, r"up\.w1: (.|\n)*torch\.autocast"),
        (torch.ones(4, 65), ValueError, r"up\.w1: input has shape \(4, 65\), expected \(..., 64\)"),
        (torch.ones(()), ValueError, r"up\.w1: input has shape \(\)"),
    ],
)
def test_bad_inputs_name_the_layer_and_the_fix(x, error, message):
    model = nn.ModuleDict({"up": nn.ModuleDict({"w1": nn.Linear(64, 48)})})
    layer = convert_to_float8_training(model)["up"]["w1"]
    with pytest.raises(error, match=message):
        layer(x)


def test_checks_can_be_left_to_the_kernels():
    layer = Float8Linear(64, 48, config=Float8LinearConfig(enable_pre_and_post_forward=False))
    x = torch.randn(4, 64)
    assert_bitwise(layer(x), Float8Linear.from_float(layer.to_float())(x))
    with pytest.raises(RuntimeError):
        layer(torch.randn(4, 65))


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "delayed"])
def test_the_functional_form_is_the_layer(recipe):
    layer = Float8Linear(64, 48, config=RECIPES[recipe])
    x, g = torch.randn(2, 16, 64, requires_grad=True), torch.randn(2, 16, 48)
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    out = float8_linear(x, weight, bias, RECIPES[recipe])
    out.backward(g)
    grad, x.grad = x.grad, None
    expected = layer(x)
    expected.backward(g)
    assert_bitwise(out.detach(), expected.detach())
    assert_bitwise(grad, x.grad)
    assert_bitwise(weight.grad, layer.weight.grad)
    assert_bitwise(bias.grad, layer.bias.grad)


@pytest.mark.parametrize(
    ("x", "w", "config", "error", "message"),
    [
        ((4, 8), (8, 8), RECIPES["delayed"], ValueError, "keeps no amax history"),
        ((4, 9), (8, 8), None, ValueError, r"float8_linear: input has shape \(4, 9\)"),
        ((4, 8), (8,), None, ValueError, "must be"),
    ],
)
def test_the_functional_form_refuses_bad_input(x, w, config, error, message):
    with pytest.raises(error, match=message):
        float8_linear(torch.randn(x), torch.randn(w), None, config)


def test_the_functional_form_refuses_mixed_dtypes():
    with pytest.raises(TypeError, match=r"bfloat16 and weight torch\.float32"):
        float8_linear(torch.randn(4, 8).bfloat16(), torch.randn(8, 8))
    with pytest.raises(ValueError, match=r"weight is torch\.float64"):
        float8_linear(torch.randn(4, 8).double(), torch.randn(8, 8).double())


def test_shape_and_config_of_a_new_layer():
    layer = Float8Linear(64, 48, bias=False, dtype=torch.bfloat16, config=RECIPES["rowwise"])
    assert layer.weight.shape == (48, 64) and layer.bias is None
    assert layer.config is RECIPES["rowwise"]
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    with high_precision(layer):
        assert_bitwise(layer(x), F.linear(x, layer.weight))


def _with_transpose(x8):
    """The same tensor as a kernel makes it: with the codes of its transpose."""
    data, scale = x8.float8_data, x8.scale
    data_t = data.flatten(0, -2).view(torch.uint8).t().contiguous().view(data.dtype)
    return Float8Tensor(data, scale, x8.block, x8.dtype, data_t)


@pytest.mark.parametrize("transposed", [False, True])
def test_an_input_in_float8_is_multiplied_as_it_is(transposed):
    layer = Float8Linear(32, 48, dtype=torch.bfloat16, config=RECIPES["tensorwise"])
    x = torch.randn(2, 16, 32, dtype=torch.bfloat16)
    g = torch.randn(2, 16, 48, dtype=torch.bfloat16)
    plain = x.clone().requires_grad_()
    expected = layer(plain)
    grad_x, grad_w = torch.autograd.grad(expected, (plain, layer.weight), g)
    x8 = Float8Tensor.from_high_precision(x, E4M3)
    x8 = (_with_transpose(x8) if transposed else x8).requires_grad_()
    with mock.patch("float8.kernels.cast", wraps=kernels.cast) as cast:
        out = layer(x8)
        assert cast.call_count == 1, "the weight alone is cast"
    found_x, found_w = torch.autograd.grad(out, (x8, layer.weight), g)
    assert_bitwise(out, expected)
    assert_bitwise(found_w, grad_w)
    assert type(found_x) is torch.Tensor
    assert_bitwise(found_x, grad_x)
    with high_precision(layer):
        reference = torch.nn.functional.linear(x8.dequantize(), layer.weight, layer.bias)
        assert_bitwise(layer(x8), reference)


def test_an_input_in_float8_that_does_not_fit_is_refused_by_name():
    layer = Float8Linear.from_float(torch.nn.Linear(32, 48), RECIPES["rowwise"], fqn="ffn.w1")
    x8 = Float8Tensor.from_high_precision(torch.randn(16, 32), E4M3)
    with pytest.raises(ValueError, match=r"ffn.w1: input is a Float8Tensor in e4m3 with block"):
        layer(x8)
    with pytest.raises(ValueError, match=r"float8_linear: input is a Float8Tensor in e4m3"):
        float8_linear(x8, layer.weight, config=RECIPES["rowwise"])


def test_a_compiled_float8_input_keeps_its_gradients():
    layer = Float8Linear(32, 48, config=RECIPES["tensorwise"])
    x, g = torch.randn(16, 32, requires_grad=True), torch.randn(16, 48)

    def run(x):
        return layer(Float8Tensor.from_high_precision(x, E4M3))

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    wanted = (x, layer.weight)
    for found, expected in zip(
        torch.autograd.grad(compiled(x), wanted, g),
        torch.autograd.grad(run(x), wanted, g),
        strict=True,
    ):
        assert_bitwise(found, expected)


def test_a_weight_in_float8_is_multiplied_as_it_is():
    """As FSDP2 gathers it: both GEMMs read its codes, and nothing but the input is saved."""
    torch.manual_seed(0)
    layer = Float8Linear(32, 48).bfloat16()
    x, g = torch.randn(16, 32).bfloat16(), torch.randn(16, 48).bfloat16()
    expected = run(layer, x, g)
    weight = Float8Tensor.from_high_precision(layer.weight.detach(), E4M3)
    layer.weight = nn.Parameter(weight)
    for what, found in run(layer, x, g).items():
        assert_bitwise(found, expected[what])
    layer.weight.grad = None
    with mock.patch("float8.linear.autograd.cast_matrix", side_effect=AssertionError("cast again")):
        layer(x).backward(g)
    assert layer.weight.grad.dtype == torch.bfloat16
    with high_precision(layer):
        assert_bitwise(layer(x), F.linear(x, weight.dequantize(), layer.bias))


def test_a_weight_gathered_in_float8_for_another_dtype_is_refused_by_name():
    layer = convert_to_float8_training(nn.Sequential(nn.Linear(32, 48)))
    weight = Float8Tensor.from_high_precision(layer[0].weight.detach(), E4M3)
    gathered = GatheredWeight(weight.float8_data, weight.scale, weight.block, weight.dtype)
    layer[0].weight = nn.Parameter(gathered)
    with (
        pytest.raises(ValueError, match=r"^0: .*float32 and is used in torch.bfloat16.*Mixed"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        layer(torch.randn(16, 32))
