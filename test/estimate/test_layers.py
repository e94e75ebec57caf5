"""Which layers are predicted, and what a device refuses, in the library's own words."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from float8.config import RECIPES, CastConfig, Float8LinearConfig
from float8.convert.convert import convert_to_float8_training
from float8.estimate.casts import Use
from float8.estimate.devices import BF16, DEVICES
from float8.estimate.layers import Layer, layers_of, padded, refuses
from float8.estimate.roofline import Shape
from float8.granularity import Blockwise
from float8.kernels.scaled_mm import SUPPORT

H100, B200, MI300X = DEVICES["H100"], DEVICES["B200"], DEVICES["MI300X"]
CPU = replace(H100, name="some CPU", arch="cpu")
TENSORWISE, ROWWISE = RECIPES["tensorwise"], RECIPES["rowwise"]


class OwnLinear(nn.Linear):
    """Not exactly nn.Linear: conversion leaves it alone."""


def names_of(model: nn.Module) -> list[str]:
    return [layer.name for layer in layers_of(model, 64)]


def test_a_models_layers_have_its_sizes_and_the_batchs_tokens():
    model = nn.ModuleDict({"up": nn.Linear(32, 128), "down": nn.Linear(128, 32, bias=False)})
    assert [(each.name, each.shape) for each in layers_of(model, 48)] == [
        ("up", Shape(48, 32, 128)),
        ("down", Shape(48, 128, 32)),
    ]


def test_a_layer_under_two_names_counts_once():
    tied = nn.Linear(16, 16)
    assert names_of(nn.ModuleDict({"a": tied, "b": nn.Sequential(tied)})) == ["a"]


def test_what_conversion_leaves_alone_is_left_out():
    model = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(16, 2), "own": OwnLinear(16, 16), "a": nn.Linear(4, 4)}
    )
    assert names_of(model) == ["a"]


def test_float8_layers_count_and_the_model_may_be_a_layer_itself():
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 32)))
    assert names_of(model) == ["0", "1"]
    assert names_of(nn.Linear(16, 16)) == ["Linear"]


def test_layers_without_weights_are_left_out():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].out_features = 0
    assert names_of(model) == ["0"]


def test_a_layer_remembers_its_dtype_and_whether_it_trains():
    layer = nn.Linear(16, 16, dtype=torch.float16, device="meta").requires_grad_(False)
    assert layers_of(layer, 16) == [Layer("Linear", Shape(16, 16, 16), torch.float16, False)]


def test_shapes_may_be_given_instead():
    shapes = [(8, 16, 32), Shape(1, 2, 3)]
    assert [layer.shape for layer in layers_of(shapes, None)] == [Shape(8, 16, 32), Shape(1, 2, 3)]


@pytest.mark.parametrize(
    ("model", "tokens", "said"),
    [
        (nn.Linear(4, 4), None, "tokens=None must be an integer >= 1"),
        (nn.Linear(4, 4), 0, "tokens=0 must be an integer >= 1: rows"),
        (nn.Linear(4, 4), 1.5, "tokens=1.5 must"),
        (nn.Linear(4, 4), True, "tokens=True must"),
        (nn.Linear(4, 4), 2**31, "tokens=2147483648 must"),
        ((8, 16, 32), None, "a shape is .* got 8 in the list of shapes"),
        (nn.ReLU(), 16, "ReLU has no nn.Linear"),
        (nn.Sequential(OwnLinear(4, 4)), 16, "Sequential has no nn.Linear"),
        ([(1, 2, 3)], 16, "tokens=16 beside shapes"),
        ([], None, "no shapes given"),
        ([(1, 2)], None, r"a shape is \(M, K, N\).*\(1, 2\)"),
        ([(16, 0, 16)], None, "integers >= 1"),
    ],
)
def test_bad_input_is_named(model, tokens, said):
    with pytest.raises(ValueError, match=said):
        layers_of(model, tokens)


@pytest.mark.parametrize("model", ["gpt2", None, nn.Linear, 3])
def test_a_model_is_a_module_or_shapes(model):
    said = re.escape(f"model={model!r} must be a module")
    with pytest.raises(TypeError, match=said):
        layers_of(model, 16)


# --- refusals

CUBE = Layer("cube", Shape(64, 64, 64))


@pytest.mark.parametrize("device", [H100, B200, MI300X, CPU], ids=lambda device: device.name)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp"])
def test_what_runs_everywhere_is_refused_nowhere(device, recipe):
    assert refuses(CUBE, RECIPES[recipe], device, Use()) is None


@pytest.mark.parametrize("device", [H100, B200, MI300X], ids=lambda device: device.name)
def test_products_run_where_the_support_table_says(device, monkeypatch):
    table = SUPPORT[device.arch]
    assert refuses(CUBE, ROWWISE, device, Use()) is None
    monkeypatch.setitem(table, "rowwise", "a reason of its own")
    assert "a reason of its own" in refuses(CUBE, ROWWISE, device, Use())
    assert refuses(CUBE, ROWWISE, CPU, Use()) is None


@pytest.mark.parametrize(
    ("shape", "use", "said"),
    [
        (Shape(64, 50, 64), Use(), "output GEMM.*contraction=50 not a multiple of 16"),
        (Shape(64, 64, 50), Use(), "output GEMM.*columns=50 not a multiple of 16"),
        (Shape(50, 64, 64), Use(), "grad_weight GEMM.*contraction=50 not a multiple of 16"),
        (Shape(50, 64, 64), Use(training=False), None),
        (Shape(50, 64, 64), Use(weight_trains=False), None),
    ],
)
def test_sizes_are_refused_for_the_products_that_run(shape, use, said):
    reason = refuses(Layer("l", shape), TENSORWISE, H100, use)
    assert (reason is None) if said is None else re.search(said, reason)
    assert refuses(Layer("l", shape), replace(TENSORWISE, pad_inner_dim=True), H100, use) is None
    assert refuses(Layer("l", shape), TENSORWISE, CPU, use) is None


def test_a_rowwise_product_is_written_in_float16_on_hopper_alone():
    half = replace(CUBE, dtype=torch.float16)
    assert "bfloat16 only" in refuses(half, RECIPES["rowwise"], B200, Use())
    assert refuses(half, TENSORWISE, B200, Use()) is None
    for dtype in (torch.float16, torch.float32):
        assert refuses(replace(CUBE, dtype=dtype), RECIPES["rowwise"], H100, Use()) is None


def test_float64_is_refused_everywhere():
    double = replace(CUBE, dtype=torch.float64)
    for device in (H100, CPU):
        assert "torch.float64" in refuses(double, TENSORWISE, device, Use())


def test_blocks_without_hardware_are_refused_unless_emulated():
    mx = CastConfig(granularity=Blockwise(1, 32), target_dtype=torch.float8_e4m3fn)
    config = Float8LinearConfig(mx, mx, mx)
    assert "no hardware multiplies" in refuses(CUBE, config, CPU, Use())
    emulated = replace(config, emulate=True)
    assert refuses(CUBE, emulated, CPU, Use()) is None
    assert "emulate=True is plain PyTorch" in refuses(CUBE, emulated, H100, Use())


def test_a_device_that_lacks_figures_says_so():
    poor = replace(H100, products={BF16: H100.products[BF16]})
    assert (
        refuses(CUBE, TENSORWISE, poor, Use()) == "H100 SXM has no figures for tensorwise products"
    )


def test_padding_is_to_multiples_of_16_where_hardware_wants_it():
    shape, pads = Shape(50, 33, 16), replace(TENSORWISE, pad_inner_dim=True)
    assert padded(shape, pads, H100) == Shape(64, 48, 16)
    assert padded(shape, TENSORWISE, H100) == padded(shape, pads, CPU) == shape
