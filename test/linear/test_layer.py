"""`Float8Linear` and `float8_linear`: their results, what they save, and what they run."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise
from layer_check import EMULATED, check_layer, run, skip_if_refused
from meter import GemmCounter, saved_bytes
from shapes import pairs
from torch import nn

from float8 import (
    E4M3,
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    GemmConfig,
    LayerNormCast,
    RMSNormCast,
    ScalingType,
    float8_linear,
    high_precision,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.linear.layer import Float8CastingLinear
from float8.unit_scaling.modules.layers import Float8UnitLinear, Float8UnitLinearReadout

OFF = CastConfig(scaling_type=ScalingType.DISABLED)
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)
PRODUCTS = ("output", "grad_input", "grad_weight")


def layer_of(recipe="tensorwise", **options) -> Float8Linear:
    return Float8Linear(64, 48, config=RECIPES[recipe], **options)


def data(dtype=torch.float32):
    return torch.randn(32, 64).to(dtype), torch.randn(32, 48).to(dtype)


def assert_same(found, expected, replay, names=None):
    for name in expected if names is None else names:
        assert_bitwise(found[name], expected[name], replay, name)


# --- numbers


@pairs(
    name=list(EMULATED),
    shape=[(48, 160, 96), (5, 123, 7), (1, 16, 16)],
    dtype=[torch.float32, torch.bfloat16],
)
def test_emulation_multiplies_what_no_hardware_does(name, shape, dtype):
    check_layer(name, shape, dtype)
    with pytest.raises(ValueError, match=r"GEMM.*hardware.*, or set emulate=True"):
        replace(EMULATED[name], emulate=False)


INVARIANT = {"rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "mxfp8_2d", "unit", "delayed"}


@EVERY_RECIPE
def test_a_token_does_not_depend_on_its_batch_where_the_page_says_so(recipe):
    """`docs/recipes.md` has the table. Of delayed scaling in evaluation, after its first steps."""
    layer = layer_of(recipe)
    x = torch.randn(64, 64)
    x[40] *= 300  # another token, whose amax the scale of a tensor would have
    for _ in range(16):
        layer(x)
        sync_float8_amax_and_scale_history(layer)
    with torch.no_grad():
        whole = layer.eval()(x)
        alone = torch.cat([layer(x[i : i + n]) for i, n in ((0, 16), (16, 1), (17, 15))])
    assert torch.equal(whole[:32], alone) == (recipe in INVARIANT)
    x[40, 3] = torch.nan
    for each, reaches in ((layer, {"tensorwise"}), (layer_of(recipe), {"tensorwise", "delayed"})):
        out = each(x)
        assert out[40].isnan().all()
        assert out[:32].isnan().all() if recipe in reaches else out[:32].isfinite().all()


@EVERY_RECIPE
def test_float32_gradients_of_a_bfloat16_weight_add_up(recipe):
    """256 + 1 stays 256 in bfloat16, in which nn.Linear adds up, too."""
    layer = layer_of(recipe, dtype=torch.bfloat16)
    for dtype, total in ((torch.bfloat16, 256), (torch.float32, 257)):
        for p in layer.parameters():
            p.grad = None
            p.grad_dtype = dtype
        for g in (8.0, 1 / 32):
            layer(torch.ones(32, 64, dtype=torch.bfloat16)).backward(
                torch.full((32, 48), g, dtype=torch.bfloat16)
            )
        for p in layer.parameters():
            assert p.grad.dtype == dtype
            assert bool((p.grad == total).all())


@pairs(
    recipe=list(RECIPES),
    shape=[(48, 160, 96), (1, 16, 16), (5, 123, 7), (130, 257, 131), (3, 1, 1)],
    dtype=[torch.bfloat16, torch.float32, torch.float16],
    bias=[True, False],
)
def test_output_and_gradients_are_those_of_the_quantised_operands(recipe, shape, dtype, bias):
    check_layer(recipe, shape, dtype, bias, seed=1)


@pytest.mark.cuda
@EVERY_RECIPE
@pytest.mark.parametrize("shape", [(64, 256, 128), (256, 1024, 512)])
def test_results_hold_on_float8_tensor_cores(recipe, shape):
    skip_if_refused(RECIPES[recipe])
    check_layer(recipe, shape, torch.bfloat16, seed=3, device="cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "by hand"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_few_tokens_run_on_float8_tensor_cores(recipe, tokens):
    """As generation has them; in training their gradients contract them, padded.

    "By hand" leaves fast accumulation at its default, which products of blocks do not have.
    """
    config = RECIPES["blockwise" if recipe == "by hand" else recipe]
    skip_if_refused(config)
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


@EVERY_RECIPE
def test_results_depend_neither_on_strides_nor_on_gradient_mode_nor_on_earlier_runs(recipe):
    layer, x, g = layer_of(recipe), torch.randn(64, 32).t(), torch.randn(48, 32).t()
    expected = run(layer, x.contiguous(), g.contiguous())
    assert_same(run(layer, x.contiguous(), g.contiguous()), expected, recipe)
    # The gradient of the bias is a plain sum, whose order follows the strides.
    assert_same(run(layer, x, g), expected, recipe, PRODUCTS)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = layer(x)
        assert not out.requires_grad
        assert_bitwise(out, expected["output"], recipe)
    layer(x).sum().backward()  # a grad_output with strides of 0


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (2, 1, 3, 64), (0, 64), (2, 0, 64)])
@EVERY_RECIPE
def test_inputs_of_any_rank_and_empty_batches(recipe, shape):
    layer, x = layer_of(recipe), torch.randn(shape, requires_grad=True)
    out = layer(x)
    assert out.shape == (*shape[:-1], 48)
    out.backward(torch.randn_like(out))
    assert x.grad.shape == x.shape
    if 0 in shape:
        assert not layer.weight.grad.any() and not layer.bias.grad.any()
    meta = layer_of(recipe, device="meta")
    assert meta(torch.empty(shape, device="meta")).shape == out.shape


@EVERY_RECIPE
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_inputs_are_seen_in_the_output_and_in_the_gradient(recipe, bad):
    x, g = data()
    x[3, 5] = bad
    found = run(layer_of(recipe), x, g)
    assert found["output"][3].isnan().all()
    assert not found["grad_weight"][:, 5].isfinite().any()


@EVERY_RECIPE
def test_zeros_stay_zeros(recipe):
    layer, (x, g) = layer_of(recipe, bias=False), data()
    found = run(layer, torch.zeros(32, 64), g)
    assert not found["output"].any() and not found["grad_weight"].any()
    found = run(layer, x, torch.zeros(32, 48))
    assert not found["grad_input"].any() and not found["grad_weight"].any()


# --- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EVERY_RECIPE
def test_autocast_rounds_to_its_dtype_first_and_returns_gradients_in_the_parameters(recipe, dtype):
    layer, x = layer_of(recipe), torch.randn(32, 64, requires_grad=True)
    rounded, g = copy.deepcopy(layer).to(dtype), torch.randn(32, 48).to(dtype)
    with torch.autocast("cpu", dtype):
        out = layer(x)
        if recipe != "delayed":
            assert_bitwise(float8_linear(x, layer.weight, layer.bias, RECIPES[recipe]), out)
    out.backward(g)
    want = run(rounded, x.to(dtype), g)
    assert out.dtype == dtype and x.grad.dtype == layer.weight.grad.dtype == torch.float32
    found = {"output": out, "grad_input": x.grad, "grad_weight": layer.weight.grad}
    assert_same({name: t.to(dtype) for name, t in found.items()}, want, recipe, PRODUCTS)


def test_a_backward_inside_float16_autocast_computes_the_same():
    layer, (x, g) = layer_of(), data()
    want = run(layer, x, g)
    layer.zero_grad()
    out = layer(x.requires_grad_())
    with torch.autocast("cpu", torch.float16):
        out.backward(g)
    assert_bitwise(x.grad, want["grad_input"])
    assert_bitwise(layer.weight.grad, want["grad_weight"])


# --- what runs, and what is saved


@EVERY_RECIPE
@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("w_grad", [True, False])
def test_only_products_whose_result_is_wanted_run(recipe, x_grad, w_grad):
    layer, (x, g) = layer_of(recipe), data()
    full = run(copy.deepcopy(layer), x, g)
    layer.weight.requires_grad_(w_grad)
    with GemmCounter() as counter:
        layer(x.requires_grad_(x_grad)).backward(g)
    assert counter.products == 1 + x_grad + w_grad
    found = {"grad_input": x.grad, "grad_weight": layer.weight.grad, "grad_bias": layer.bias.grad}
    wanted = [name for name, t in found.items() if t is not None]
    assert len(wanted) == 1 + x_grad + w_grad
    assert_same(found, full, recipe, wanted)


@EVERY_RECIPE
@pytest.mark.parametrize("shape", [(512, 1024, 64), (256, 512, 384)])
def test_backward_saves_one_byte_per_input_element_and_its_scales(recipe, shape):
    m, k, n = shape
    plain = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    x = torch.randn(m, k, dtype=torch.bfloat16, requires_grad=True)
    layer = Float8Linear.from_float(plain, RECIPES[recipe])
    found = saved_bytes(lambda: layer(x * 1), layer)
    if recipe == "rowwise_with_gw_hp":  # the input as it came
        assert found == 2 * m * k
    else:
        assert m * k <= found <= 1.04 * m * k
    layer.weight.requires_grad_(False)
    assert saved_bytes(lambda: layer(x * 1), layer) <= 4 * max(n, 128)  # scales of the weight


@pytest.mark.parametrize(
    "gemms", [c for n in range(4) for c in itertools.combinations(PRODUCTS, n)]
)
def test_each_gemm_can_be_switched_off_alone(gemms):
    output, grad_input, grad_weight = (OFF if name in gemms else CastConfig() for name in PRODUCTS)
    config = Float8LinearConfig(
        output,
        output,
        grad_input,
        cast_config_weight_for_grad_input=grad_input,
        cast_config_input_for_grad_weight=grad_weight,
        cast_config_grad_output_for_grad_weight=grad_weight,
    )
    plain, (x, g) = nn.Linear(64, 48), data()
    layers = Float8Linear.from_float(plain, config), plain, Float8Linear.from_float(plain)
    found, exact, float8 = (run(layer, x, g) for layer in layers)
    for name in gemms:
        assert torch.allclose(found[name], exact[name], rtol=1e-5, atol=1e-5), name
    assert_same(found, float8, str(gemms), set(PRODUCTS) - set(gemms))


def test_a_second_use_with_its_own_cast_is_cast_for_itself():
    config = Float8LinearConfig(
        cast_config_input_for_grad_weight=CastConfig(target_dtype=torch.float8_e5m2),
        cast_config_grad_output_for_grad_weight=CastConfig(target_dtype=torch.float8_e4m3fn),
    )
    plain, (x, g) = nn.Linear(64, 48), data()
    found, same = (run(Float8Linear.from_float(plain, c), x, g) for c in (config, None))
    assert_same(found, same, config, ("output", "grad_input"))
    assert not torch.equal(found["grad_weight"], same["grad_weight"])


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "delayed"])
def test_the_functional_form_is_the_layer(recipe):
    layer, x = layer_of(recipe), torch.randn(2, 16, 64)
    g = torch.randn(2, 16, 48)
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    leaf = x.clone().requires_grad_()
    out = float8_linear(leaf, weight, bias, RECIPES[recipe])
    grads = torch.autograd.grad(out, (leaf, weight, bias), g)
    found = dict(zip((*PRODUCTS, "grad_bias"), (out, *grads), strict=True))
    assert_same(found, run(layer, x, g), recipe)


# --- operands that are in float8 already


def _with_transpose(x8):
    """The same tensor as a kernel makes it: with the codes of its transpose."""
    data, scale = x8.float8_data, x8.scale
    data_t = data.flatten(0, -2).view(torch.uint8).t().contiguous().view(data.dtype)
    return Float8Tensor(data, scale, x8.block, x8.dtype, data_t)


@pytest.mark.parametrize("operand", ["input", "input with its transpose", "weight"])
def test_an_operand_in_float8_is_multiplied_as_it_is(operand):
    """A weight as FSDP2 gathers it: both GEMMs read its codes."""
    layer, w = layer_of(dtype=torch.bfloat16), torch.randn(48, 64).bfloat16()
    layer.weight.data.copy_(w)
    x, g = torch.randn(2, 16, 64).bfloat16(), torch.randn(2, 16, 48).bfloat16()
    expected = run(layer, x, g)
    if operand == "weight":
        w = Float8Tensor.from_high_precision(w, E4M3)
        layer.weight = nn.Parameter(w)
    else:
        x = Float8Tensor.from_high_precision(x, E4M3)
        x = _with_transpose(x) if "transpose" in operand else x
    found = run(layer, x, g)
    assert type(found["grad_input"]) is type(found["grad_weight"]) is torch.Tensor
    assert_same(found, expected, operand)
    x, w = (t.dequantize() if isinstance(t, Float8Tensor) else t for t in (x, w))
    with high_precision(layer):
        assert_bitwise(layer(x), F.linear(x, w, layer.bias))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *((Float8Linear, (16, 32)), (Float8CastingLinear, (16, 32))),
        *((Float8UnitLinear, (16, 32)), (Float8UnitLinearReadout, (16, 32))),
        *((RMSNormCast, (16,)), (LayerNormCast, (16,))),
    ],
)
def test_a_module_that_was_not_converted_runs_and_becomes_plain(kind, sizes):
    module, x = kind(*sizes), torch.randn(5, 16)
    plain = copy.deepcopy(module).to_float()
    assert type(plain) is kind.plain_type
    assert vars(plain).keys() == vars(kind.plain_type(*sizes)).keys()
    assert module(x).shape == plain(x).shape
    with high_precision(module):
        assert_bitwise(plain(x), module(x))
