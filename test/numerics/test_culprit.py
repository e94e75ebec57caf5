"""What is said of a tensor that is not finite, and of a float8 layer's operands."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from float8.config import CastConfig, Float8LinearConfig, ScalingType
from float8.linear.delayed import sync_float8_amax_and_scale_history
from float8.linear.layer import Float8Linear
from float8.numerics.culprit import amax_of, finding, remarks_of

BAD = torch.tensor([[1.0, -7.0, math.nan], [math.inf, -math.inf, 2.0]])
LINEAR = ("blocks.0", nn.Linear(3, 3))


def test_a_finding_counts_what_is_there():
    found = finding(LINEAR, "output", "forward", BAD, {"input 0": BAD[0, :2]}, "blocks.1: output")
    assert (found.module, found.module_type, found.shape) == ("blocks.0", "Linear", (2, 3))
    assert (found.elements, found.nan, found.inf, found.first) == (6, 1, 2, (0, 2))
    assert found.amax == 7.0
    assert found.went_in == {"input 0": 7.0}
    text = str(found)
    assert "blocks.0 (Linear): output, in the forward: 1 NaN and 2 inf of 6 elements" in text
    assert "first at (0, 2)" in text
    assert "last seen, and finite: blocks.1: output" in text


def test_the_model_itself_has_a_name_too():
    found = finding(("", nn.ReLU()), "loss", "forward", torch.tensor(math.nan))
    assert str(found).startswith("the model (ReLU): loss, in the forward: 1 NaN of 1 elements")
    assert found.first == ()
    assert found.amax == 0.0


def test_an_origin_says_what_it_led_to():
    first = finding(LINEAR, "output", "forward", BAD)
    later = finding(("head", nn.Linear(2, 2)), "gradient of weight", "backward", BAD)
    text = str(first.that_led_to(later))
    assert "led to NaN or inf at head (Linear): gradient of weight in the backward" in text


def test_the_end_of_float16_is_said_where_it_was_passed():
    half = torch.tensor([math.inf, 1.0]).half()
    assert "65504" in str(finding(LINEAR, "output", "forward", half))
    assert "65504" not in str(finding(LINEAR, "output", "forward", half.float()))
    assert "65504" not in str(finding(LINEAR, "output", "forward", half * math.nan))


def test_amaxes_of_nothing_and_of_nan():
    assert amax_of(torch.zeros(0, 3)) == 0.0
    assert math.isnan(amax_of(BAD))
    assert amax_of(BAD[0, :2]) == 7.0


def layer(recipe: str) -> Float8Linear:
    torch.manual_seed(0)
    return Float8Linear(16, 16, config=Float8LinearConfig.from_recipe_name(recipe))


def test_nothing_is_said_of_other_modules():
    assert remarks_of(nn.Linear(3, 3), BAD) == ()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "unit", "delayed"])
def test_operands_are_described_in_every_recipe(recipe):
    x, g = torch.randn(8, 16), torch.randn(8, 16)
    input, weight, grad = remarks_of(layer(recipe), x, g)
    assert input.startswith(f"input: amax {float(x.abs().max()):.4g}, ")
    assert weight.startswith("weight: amax ")
    assert grad.startswith(f"grad_output: amax {float(g.abs().max()):.4g}, ")


def test_an_operand_that_was_not_finite_is_said_to_be():
    x = torch.randn(8, 16)
    x[3, 3] = math.inf
    assert (
        "dynamic e4m3 scale inf: not finite before its cast"
        in remarks_of(layer("tensorwise"), x)[0]
    )


def test_a_delayed_scale_says_how_much_it_saturates_and_a_broken_one_that_it_is_broken():
    delayed, x = layer("delayed"), torch.ones(8, 16)
    assert "dynamic (no history yet)" in remarks_of(delayed, x)[0]
    delayed(x).sum().backward()
    sync_float8_amax_and_scale_history(delayed)
    x[:4] *= 3  # beyond what the history has seen
    assert "delayed e4m3 scale 0.002232: 50.00% saturated" in remarks_of(delayed, x)[0]
    delayed.cast_input.scale.fill_(math.nan)
    assert "the scale itself is not finite and > 0" in remarks_of(delayed, x)[0]


def test_a_static_scale_is_the_one_that_is_set():
    static = CastConfig(ScalingType.STATIC, static_scale=0.25)
    fixed = Float8Linear(16, 16, config=Float8LinearConfig(cast_config_input=static))
    assert remarks_of(fixed, torch.ones(4, 16))[0] == "input: amax 1, static e4m3 scale 0.25"
