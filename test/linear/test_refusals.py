"""What a GPU does not take is refused before it runs, with the reason and a way out."""

import importlib
import io
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

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
    convert_from_float8_training,
    convert_to_float8_inference,
    convert_to_float8_training,
    float8_linear,
    high_precision,
)
from float8.config import RECIPES
from float8.linear import bound_plan
from float8.linear.bound_plan import plan_on
from float8.linear.refusals import refuses_call, refuses_float8_input, refuses_layer


def _reason(recipe, *, tokens=32, k=64, n=48, dtype=torch.bfloat16, arch="sm_90"):
    layer = Float8Linear(k, n, config=RECIPES[recipe])
    return refuses_call(layer.config, layer.weight, tokens, dtype, arch, True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_hopper_takes_every_recipe_but_mx_formats_which_blackwell_takes(recipe):
    reason = _reason(recipe) or ""
    assert ("from sm_100" in reason and "blockwise" in reason) == (recipe == "mxfp8")
    assert _reason(recipe, arch="sm_100") is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"k": 24}, ("in_features=24", "pad_inner_dim=True", "module_filter_fn")),
        ({"n": 24}, ("out_features=24", "pad_inner_dim=True")),
        ({"tokens": 24}, ("24 tokens", "grad_weight", "pad_inner_dim=True")),
        ({"arch": "sm_80"}, ("sm_80 is not known to have float8 tensor cores", "emulate=True")),
    ],
)
def test_what_the_device_does_not_take_is_refused_with_a_way_out(arguments, words):
    reason = _reason("tensorwise", **arguments)
    assert reason is not None
    assert all(word in reason for word in words), reason


def test_a_frozen_weight_does_not_restrict_the_number_of_tokens():
    layer = Float8Linear(64, 48)
    layer.weight.requires_grad_(False)
    assert refuses_call(layer.config, layer.weight, 24, torch.bfloat16, "sm_90", True) is None
    layer.weight.requires_grad_(True)
    assert refuses_call(layer.config, layer.weight, 24, torch.bfloat16, "sm_90", False) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rowwise_products_are_written_in_bfloat16_alone_but_on_hopper(dtype):
    reason = _reason("rowwise", dtype=dtype, arch="sm_100")
    assert reason is not None
    assert "bfloat16 only" in reason
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        assert _reason(recipe, dtype=dtype) is None
    for recipe in ("tensorwise", "blockwise"):
        assert _reason(recipe, dtype=dtype, arch="sm_100") is None


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_any_number_of_tokens_is_taken_where_no_gradient_follows(tokens):
    """A last batch in evaluation, a token in generation: rows are no contraction there."""
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        layer = Float8Linear(64, 48, config=RECIPES[recipe])
        call = (layer.config, layer.weight, tokens, torch.bfloat16, "sm_90")
        assert refuses_call(*call, False) is None
        refused = refuses_call(*call, True)
        assert f"contraction={tokens} not a multiple of 16; pad the batch" in refused


@pytest.mark.parametrize("arch", ["sm_89", "sm_100"])
def test_blockwise_products_by_triton_run_in_any_size(arch):
    assert _reason("blockwise", tokens=3, k=24, n=7, arch=arch) is None


def test_blockwise_products_by_torch_do_not_change_to_another_gemm_unasked():
    assert "contraction=24" in _reason("blockwise", tokens=3, k=24, n=7, arch="sm_90")


def test_a_refusal_of_a_device_names_the_product_and_every_candidate():
    reason = _reason("blockwise", arch="gfx94")
    assert reason is not None
    for words in ("output: gfx94 does not run", "torch._scaled_mm", "Triton", "emulate=True"):
        assert words in reason


def test_what_no_device_multiplies_is_refused_at_conversion_unless_emulated():
    odd = CastConfig(granularity=Blockwise(1, 64), target_dtype=torch.float8_e4m3fn)
    weight = torch.empty(64, 64)
    reason = refuses_layer(weight, Float8LinearConfig(odd, odd, odd))
    assert reason is not None
    assert "emulate=True" in reason
    assert refuses_layer(weight, Float8LinearConfig(odd, odd, odd, emulate=True)) is None
    assert refuses_layer(weight.double(), Float8LinearConfig()) is not None


def test_an_input_in_float8_must_be_what_the_config_makes():
    x = torch.randn(2, 16, 32)
    make = Float8Tensor.from_high_precision
    cpu = torch.device("cpu")
    tensorwise, rowwise = (
        plan_on(RECIPES[name], cpu, x.dtype) for name in ("tensorwise", "rowwise")
    )
    fits = make(x, E4M3)
    assert refuses_float8_input(fits, tensorwise, True) is None
    assert refuses_float8_input(make(x, E4M3, Rowwise()), rowwise, False) is None
    said = refuses_float8_input(make(x, E5M2), tensorwise, True)
    assert re.search(r"in e5m2 with block .* casts inputs to e4m3 .*input.dequantize\(\)", said)
    assert "with block (-1, -1, -1)" in refuses_float8_input(fits, rowwise, False)
    assert "Pass those, freeze the weight" in refuses_float8_input(
        make(x, E4M3, Rowwise()), rowwise, True
    )
    off = CastConfig(scaling_type=ScalingType.DISABLED)
    plain = plan_on(Float8LinearConfig(off, off, off), cpu, x.dtype)
    assert "keeps inputs in high precision" in refuses_float8_input(fits, plain, True)


# --- transforms that do not see through a float8 layer


def _trained():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    return convert_to_float8_training(model)


TRANSFORMS = {
    "func.grad": lambda m, x: torch.func.grad(lambda p: torch.func.functional_call(m, p, x).sum())(
        dict(m.named_parameters())
    ),
    "func.vmap": lambda m, x: torch.func.vmap(m)(x[None]),
    "func.jvp": lambda m, x: torch.func.jvp(m, (x,), (x,)),
    "func.jacrev": lambda m, x: torch.func.jacrev(m)(x),
    "jit.trace": torch.jit.trace,
    "fx.symbolic_trace": lambda m, x: torch.fx.symbolic_trace(m),
    "onnx.export": lambda m, x: torch.onnx.export(m, (x,), io.BytesIO(), dynamo=False),
}


@pytest.fixture
def autocast_cache():
    """torch's ONNX exporter leaves it off where an export fails."""
    yield
    torch.set_autocast_cache_enabled(True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("autocast_cache")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_that_cannot_see_a_float8_layer_says_so(name):
    model, x = _trained(), torch.randn(16, 32)
    way_out = (
        r"^0: .*does not work on a float8 layer; run it in `with float8\.high_precision\(model"
    )
    with pytest.raises(RuntimeError, match=way_out):
        TRANSFORMS[name](model, x)
    if name != "onnx.export":  # which needs the package onnx
        with high_precision(model):
            TRANSFORMS[name](model, x)
        TRANSFORMS[name](convert_from_float8_training(model), x)
    assert torch.func.functional_call(_trained(), {}, x).shape == (16, 16)


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_scripted_after_conversion_back():
    model = _trained()
    words = (
        r"0: torch\.jit\.script does not work on a float8 layer; script what float8\.convert_from"
    )
    with pytest.raises(RuntimeError, match=words):
        torch.jit.script(model)
    torch.jit.script(convert_from_float8_training(model))


@pytest.mark.parametrize("safe", [False, True])
def test_adapters_merge_after_conversion_back(safe):
    """What PEFT's merge_and_unload does to the weight of a base layer."""
    model = convert_to_float8_inference(nn.Sequential(nn.Linear(32, 32)))
    delta = torch.randn(32, 32)

    def merge(layer):
        if safe:
            merged = layer.weight.data.clone()
            merged += delta
            layer.weight.data = merged
        else:
            layer.weight.data += delta

    with pytest.raises(NotImplementedError, match=r"merge_and_unload .* call float8\.convert_from"):
        merge(model[0])
    before = model[0].weight.dequantize()
    plain = convert_from_float8_training(model)
    merge(plain[0])
    assert torch.equal(plain[0].weight, before + delta)


def test_a_compiled_graph_is_shared_by_layers_of_other_names():
    """The checks of a call read the layer's name only to raise."""
    graphs = CompileCounter()
    layers = convert_to_float8_training(
        nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    )
    call = torch.compile(lambda layer, x: layer(x), backend=graphs, fullgraph=True)
    for layer in layers.values():
        call(layer, torch.randn(7, 32))
    assert graphs.frame_count == 1


# --- found by comparing with version 0.7


def test_a_float8_weight_needs_a_config_that_casts_weights():
    off, delayed = CastConfig(ScalingType.DISABLED), CastConfig(ScalingType.DELAYED)
    config = Float8LinearConfig(off, off, delayed, delayed, delayed, None)
    layer = Float8Linear(32, 32, config=config)
    layer.fqn = "head"
    weight = Float8Tensor.from_high_precision(layer.weight.detach(), E4M3)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=r"head: its weight is a Float8Tensor.*dequantize"):
        layer(torch.randn(16, 32))


@pytest.fixture
def on_family(monkeypatch):
    """CPU tensors take the path of a device family."""

    def use(family):
        for name in ("float8.kernels", "float8.kernels.casts", "float8.kernels.scaled_mm"):
            module = importlib.import_module(name)
            monkeypatch.setattr(module, "family_of", lambda device: family)
        bound_plan._bound_once.cache_clear()

    yield use
    bound_plan._bound_once.cache_clear()


def test_a_gpu_without_float8_is_refused_with_the_layers_name(on_family):
    on_family("sm_80")
    layer = Float8Linear(32, 32)
    layer.fqn = "head"
    with pytest.raises(ValueError, match=r"head: output: sm_80 is not known.*emulate=True"):
        layer(torch.randn(16, 32))
    assert float8_linear(torch.randn(0, 32), torch.randn(32, 32)).shape == (0, 32)


def test_a_product_that_no_gemm_runs_is_refused_without_the_layers_checks_too(on_family):
    pytest.importorskip("triton")
    on_family("sm_100")
    config = replace(RECIPES["rowwise"], enable_pre_and_post_forward=False)
    layer = Float8Linear(32, 32, config=config)
    with pytest.raises(ValueError, match=r"sm_100 does not run a rowwise product"):
        layer(torch.randn(16, 32))
