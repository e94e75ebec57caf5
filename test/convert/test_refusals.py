"""What conversions refuse: the error names the layer and the way out, and nothing is changed."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.utils.prune as prune
from torch import nn

import float8.unit_scaling as uu
from float8 import (
    Blockwise,
    CastConfig,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_inference,
    convert_to_float8_training,
)
from float8.config import RECIPES
from float8.convert import filters as f
from float8.convert import register_linear_type

OFF = CastConfig(scaling_type=ScalingType.DISABLED)
E4M3_CAST = CastConfig(target_dtype=torch.float8_e4m3fn)
E5M2_CAST = CastConfig(target_dtype=torch.float8_e5m2)
ODD_CAST = CastConfig(granularity=Blockwise(1, 64))
NO_HARDWARE = Float8LinearConfig(ODD_CAST, ODD_CAST, E4M3_CAST)
NO_OUTPUT = Float8LinearConfig(
    OFF,
    OFF,
    cast_config_input_for_grad_weight=CastConfig(),
    cast_config_weight_for_grad_input=CastConfig(),
)
NO_GRAD_INPUT = Float8LinearConfig(
    cast_config_grad_output=OFF,
    cast_config_weight_for_grad_input=OFF,
    cast_config_grad_output_for_grad_weight=CastConfig(),
)
TWO_FORMATS = Float8LinearConfig(
    cast_config_weight=E5M2_CAST, cast_config_weight_for_grad_input=CastConfig()
)
GATHER = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
ROWWISE = RECIPES["rowwise"]


def training(config=None, filter_fn=None):
    return lambda m: convert_to_float8_training(m, config=config, module_filter_fn=filter_fn)


def inference(scales=None, config=None):
    return lambda m: convert_to_float8_inference(m, scales, config=config)


def plain(model):
    """Leave the model as it is."""


# (prepare the model, call, the message)
VALUE_ERRORS = [
    (lambda m: m[2].double(), training(), "2: weight is torch.float64"),
    (plain, training(NO_HARDWARE), "0: output: no hardware.*emulate=True"),
    (plain, inference(config=GATHER), "0: enable_fsdp_float8_all_gather=True is for"),
    (plain, inference(config=NO_OUTPUT), "0: its output GEMM runs in high precision"),
    (plain, inference(config=NO_GRAD_INPUT), "0: its grad_input GEMM runs in high precision"),
    (plain, inference(config=TWO_FORMATS), "0: .*[eE]5[mM]2"),
    (
        lambda m: prune.l1_unstructured(m[2], "weight", 0.5),
        inference(),
        r"2: its weight is no plain Parameter.*prune\.remove",
    ),
    (plain, inference({"0": 1.0, "2": 1.0}, ROWWISE), "static scales are for tensorwise"),
    (training(ROWWISE), inference({"0": 1.0, "2": 1.0}), "static scales are for tensorwise"),
    *(
        (prepare, inference(scales), message)
        for prepare in (plain, training())
        for scales, message in (
            ({"0": 1.0}, "2: it has no scale"),
            ({"0": 1.0, "2": 1.0, "3": 1.0}, "3: static_scales has .*, and there is no layer"),
            ({"0": 1.0, "2": math.inf}, "2: .*finite and > 0, got inf"),
        )
    ),
]
TYPE_ERRORS = [
    (plain, training(CastConfig()), "config must be a Float8LinearConfig, got a CastConfig"),
    (plain, inference(config=7), "config must be"),
]


def facts_of(model):
    layers = [(id(m), type(m), getattr(m, "config", None)) for m in model.modules()]
    return layers, [id(p) for p in model.parameters()]


@pytest.mark.parametrize(
    ("error", "prepare", "call", "message"),
    [(ValueError, *case) for case in VALUE_ERRORS] + [(TypeError, *case) for case in TYPE_ERRORS],
)
def test_the_error_says_why_and_nothing_is_changed(error, prepare, call, message):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 160), nn.GELU(), nn.Linear(160, 32)).bfloat16()
    prepare(model)
    before = facts_of(model)
    beginning = "nothing was converted.*" if error is ValueError else ""
    with pytest.raises(error, match="(?s)" + beginning + message):
        call(model)
    assert facts_of(model) == before


@pytest.mark.parametrize("call", [training(), inference()])
def test_a_module_says_itself_why_its_model_cannot_be_converted(call):
    transformed = uu.transforms.simulate_fp8(nn.Linear(32, 32))
    for model in (transformed, nn.Sequential(nn.Linear(32, 32), transformed)):
        before = facts_of(model)
        with pytest.raises(ValueError, match="nothing was converted: the model is transformed"):
            call(model)
        assert facts_of(model) == before


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: f.skip_names(["a", "b"]), TypeError, r"string, as in skip_names\(\*names\)"),
        *(
            (lambda bad=bad: register_linear_type(bad), TypeError, "a subclass of nn.Linear, got")
            for bad in (nn.Conv2d, nn.Linear(1, 1))
        ),
    ],
)
def test_filters_and_registrations_refuse_what_they_cannot_use(call, error, message):
    with pytest.raises(error, match=message):
        call()
