"""Predictions of models and shapes: which layers, what a device refuses, and which gain."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from float8 import register_experts
from float8.config import RECIPES, Float8LinearConfig
from float8.convert.convert import convert_to_float8_training
from float8.estimate import DEVICES, estimate, faster_layers
from float8.estimate.devices import BF16
from float8.estimate.predict import Layer, predict, reason_against
from float8.estimate.roofline import Shape, Use, layer_seconds
from float8.formats import ScaleFormat
from float8.kernels.products import SUPPORT
from float8.linear.layer import Float8Linear
from float8.linear.plan import plan_for

TOKENS = 16384


def model() -> nn.Module:
    """A block of a large model, which costs nothing on the meta device, and a small gate."""
    with torch.device("meta"):
        layers = nn.ModuleDict(
            {
                "w1": nn.Linear(8192, 28672, bias=False),
                "w2": nn.Linear(28672, 8192, bias=False),
                "gate": nn.Linear(8192, 8, bias=False),
                "low_rank": nn.Linear(8192, 16, bias=False),
            }
        )
    return layers.bfloat16()


def test_large_layers_gain_small_ones_lose_and_odd_ones_are_refused():
    w1, w2, gate, low_rank = estimate(model(), TOKENS, "H100", ["tensorwise"]).rows
    assert w1.recipes["tensorwise"].speedup > 1 and w2.recipes["tensorwise"].speedup > 1
    assert low_rank.recipes["tensorwise"].speedup < 1
    assert gate.recipes["tensorwise"].speedup == 1
    assert "columns=8 not a multiple of 16" in gate.recipes["tensorwise"].refused


def test_frozen_weights_are_seen_in_the_model():
    frozen = model()
    frozen["w1"].requires_grad_(False)
    thawed, cold = (estimate(m, TOKENS, "H100", ["delayed"]).rows[0] for m in (model(), frozen))
    assert cold.bf16_s == pytest.approx(thawed.bf16_s * 2 / 3, rel=0.05)
    assert cold.recipes["delayed"].seconds.total < thawed.recipes["delayed"].seconds.total
    # It saved the weight's scale, 4 bytes, which nn.Linear does not have.
    assert thawed.recipes["delayed"].saved_bytes > 0 >= cold.recipes["delayed"].saved_bytes >= -4


def test_padding_costs_what_the_padded_shape_costs():
    pads, layer = replace(RECIPES["tensorwise"], pad_inner_dim=True), Layer("", Shape(1000, 33, 16))
    expected = layer_seconds(
        H100, Shape(1008, 48, 16), plan_for(pads, H100.arch, torch.bfloat16), Use()
    )
    assert predict(layer, pads, H100, Use()).seconds == expected


def test_float32_weights_are_converted_before_they_are_cast():
    in_bf16, in_float32 = (estimate(m, TOKENS).rows[0] for m in (model(), model().float()))
    assert in_bf16.bf16_s == in_float32.bf16_s
    once = H100.pass_seconds("convert", (4 + 2) * 8192 * 28672)
    for recipe, prediction in in_float32.recipes.items():
        less = in_bf16.recipes[recipe].seconds.casts
        assert prediction.seconds.casts - less == pytest.approx(2 * once)


# --- recipes


@pytest.mark.parametrize(("recipes", "error"), [(["rowwize"], ValueError), ([3], TypeError)])
def test_bad_recipes_are_refused(recipes, error):
    with pytest.raises(error, match=r"estimate: .*(rowwize|got 3)"):
        estimate([(64,) * 3], recipes=recipes)


# --- the filter


@pytest.mark.parametrize("recipe", ["tensorwise", RECIPES["rowwise"]])
def test_faster_layers_converts_only_what_gains(recipe):
    config = recipe if isinstance(recipe, Float8LinearConfig) else RECIPES[recipe]
    converted = convert_to_float8_training(
        model(), config=config, module_filter_fn=faster_layers(recipe, TOKENS)
    )
    assert {n for n, m in converted.named_modules() if isinstance(m, Float8Linear)} == {"w1", "w2"}


def test_the_filter_and_the_table_agree():
    with torch.device("meta"):
        layers = nn.ModuleList(nn.Linear(k, n) for k in (64, 1024, 8192) for n in (64, 1024, 8192))
    for tokens in (256, 4096, 65536):
        for recipe in RECIPES:
            takes = faster_layers(recipe, tokens)
            rows = estimate(layers, tokens, recipes=[recipe]).rows
            for row, layer in zip(rows, layers, strict=True):
                assert takes(layer, row.layer) == (row.recipes[recipe].speedup > 1)


class Experts(nn.Module):
    """Two stacks of weights, (E, N, K)."""

    def __init__(self, K: int, N: int, E: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.empty(s)) for s in ((E, N, K), (E, K, N)))

    def forward(self, x, offs):
        raise NotImplementedError


register_experts(Experts)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"])
@pytest.mark.parametrize("device", ["H100", "B200", "MI300X"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_layer_that_is_predicted_to_be_slower_is_taken(recipe, device, dtype):
    """Small and large layers and experts, few and many tokens; both answers occur."""
    with torch.device("meta"):
        model = nn.ModuleDict(
            {f"{K} {N}": nn.Linear(K, N) for K in (128, 1024, 8192) for N in (16, 1024, 8192)}
            | {f"{K} {E}": Experts(K, 1536, E) for K in (256, 4096) for E in (8, 128)}
        ).to(dtype)
    taken = set()
    for tokens in (64, 1024, 16384, 2**18):
        takes = faster_layers(recipe, tokens, device, experts_per_token=2)
        for name, module in model.items():
            rows = estimate(module, tokens, device, recipe, experts_per_token=2).rows
            predictions = [row.recipes[recipe] for row in rows]
            runs = not any(each.refused for each in predictions)
            own_s = sum(each.seconds.total for each in predictions) if runs else 0.0
            gains = runs and own_s < sum(row.bf16_s for row in rows)
            assert takes(module, name) == gains, (name, tokens)
            taken.add(gains)
    assert False in taken
    assert True in taken or device == "MI300X" or (device, recipe) == ("H100", "mxfp8")


def test_what_a_device_refuses_is_not_taken(monkeypatch):
    w1 = model()["w1"]
    assert faster_layers("tensorwise", TOKENS, "B200")(w1, "")
    assert not faster_layers("tensorwise", TOKENS + 8, "B200")(w1, ""), "not a multiple of 16"
    monkeypatch.setitem(SUPPORT["sm_100"], "tensorwise", "for this test")
    assert not faster_layers("tensorwise", TOKENS, "B200")(w1, "")
    assert faster_layers("tensorwise", TOKENS, "H100")(w1, "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokens": 0}, "must be an integer >= 1, got 0"),
        ({"tokens": 16, "device": "TPU"}, "unknown device 'TPU'"),
        (
            {"tokens": 16, "cached_microbatches": -1},
            "cached_microbatches must be an integer >= 0, got -1",
        ),
    ],
)
def test_bad_filters_are_refused_before_they_are_used(options, said):
    with pytest.raises(ValueError, match=said):
        faster_layers("tensorwise", **options)


H100, B200, MI300X = DEVICES["H100"], DEVICES["B200"], DEVICES["MI300X"]
TENSORWISE = RECIPES["tensorwise"]


class OwnLinear(nn.Linear):
    """Not exactly nn.Linear: conversion leaves it alone."""


def names_of(model: nn.Module) -> list[str]:
    return [row.layer for row in estimate(model, 64).rows]


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


@pytest.mark.parametrize(
    ("model", "tokens", "said"),
    [
        (nn.Linear(4, 4), None, r"tokens \(.*\) must be an integer >= 1, got None"),
        (nn.Linear(4, 4), True, "must be an integer >= 1, got True"),
        (nn.Linear(4, 4), 0, "must be an integer >= 1, got 0"),
        (nn.Sequential(OwnLinear(4, 4)), 16, "has an nn.Linear"),
        ([(1, 2, 3)], 16, "shapes without tokens"),
        ([], None, r"\(M, K, N\)"),
        ([(16, 0, 16)], None, "K must be an integer >= 1, got 0"),
    ],
)
def test_bad_input_is_named(model, tokens, said):
    with pytest.raises((TypeError, ValueError), match=said):
        estimate(model, tokens)


# --- refusals

CUBE = Layer("cube", Shape(64, 64, 64))


@pytest.mark.parametrize("device", [H100, B200, MI300X], ids=lambda device: device.name)
def test_products_run_where_the_support_table_says(device, monkeypatch):
    table = SUPPORT[device.arch]
    assert reason_against(CUBE, TENSORWISE, device, Use()) is None
    monkeypatch.setitem(table, "tensorwise", "a reason of its own")
    assert "a reason of its own" in reason_against(CUBE, TENSORWISE, device, Use())


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
    reason = reason_against(Layer("l", shape), TENSORWISE, H100, use)
    assert (reason is None) if said is None else re.search(said, reason)
    assert (
        reason_against(Layer("l", shape), replace(TENSORWISE, pad_inner_dim=True), H100, use)
        is None
    )


def test_a_rowwise_product_is_written_in_float16_on_hopper_and_as_mx():
    half, row = replace(CUBE, dtype=torch.float16), RECIPES["rowwise"].cast_config_input
    row = replace(row, scale_format=ScaleFormat.FLOAT32)
    assert "bfloat16 only" in reason_against(half, Float8LinearConfig(row, row, row), B200, Use())
    assert reason_against(half, TENSORWISE, B200, Use()) is None
    for dtype in (torch.float16, torch.float32):
        for device in (H100, B200):
            assert (
                reason_against(replace(CUBE, dtype=dtype), RECIPES["rowwise"], device, Use())
                is None
            )


def test_a_device_that_lacks_figures_says_so():
    poor = replace(H100, products={BF16: H100.products[BF16]})
    assert (
        reason_against(CUBE, TENSORWISE, poor, Use())
        == "H100 SXM has no figures for tensorwise GEMMs"
    )


def test_casts_on_an_amd_gpu_are_priced_as_plain_pytorch():
    """Counted by `test_roofline`'s meter: 49 bytes of an operand cast both ways, 44 of one way."""
    (row,) = estimate([(8192,) * 3], device="MI300X", recipes="tensorwise").rows
    moved = (49 + 2 * 44 + 49) * 8192**2
    assert row.recipes["tensorwise"].seconds.casts == pytest.approx(moved / 5.3e12 / 0.83, rel=0.05)
