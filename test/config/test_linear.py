"""A recipe resolves once into what its row says, and a config is a value."""

from __future__ import annotations

import copy

import pytest
import torch
from plans import B1, B128, DELAYED, E8M0, MX, POW2, ROW, STATIC, TENSOR, cast, casts_of

from float8.config import RECIPES, CastConfig, DelayedScalingConfig, Float8LinearConfig
from float8.formats import E4M3, E5M2
from float8.linear.plan import plan_for

R, B, SQUARE = (cast(block, scales=POW2) for block in (ROW, B1, B128))
MX8, MX8_2D = (cast(block, scales=E8M0) for block in (MX, (32, 32)))
T4, T5 = cast(TENSOR), cast(TENSOR, E5M2)
S4, S5 = (cast(TENSOR, fmt, STATIC, static="1.0") for fmt in (E4M3, E5M2))
D4, D5 = cast(TENSOR, scaling=DELAYED), cast(TENSOR, E5M2, DELAYED)
ALL, NONE, OUTPUT = (True,) * 3, (False,) * 3, (True, None, None)
# recipe -> the casts of (x, w), (g, w), (g, x); which second uses share bytes; fast accumulation
PLANS = {
    "tensorwise": ([T4, T4, T5, T4, T5, T4], ALL, OUTPUT),
    "delayed": ([D4, D4, D5, D4, D5, D4], ALL, OUTPUT),
    "rowwise": ([R] * 6, NONE, OUTPUT),
    "rowwise_with_gw_hp": ([R, R, R, cast(TENSOR, scales=POW2), None, None], NONE, OUTPUT),
    "blockwise": ([B, SQUARE, B, SQUARE, B, B], (False, True, False), NONE),
    "mxfp8": ([MX8] * 6, NONE, NONE),
    "mxfp8_2d": ([MX8, MX8_2D, MX8, MX8_2D, MX8, MX8], (False, True, False), NONE),
    "unit": ([S4, S4, S5, S4, S5, S4], ALL, OUTPUT),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_the_three_gemms_that_its_row_says(recipe):
    config = Float8LinearConfig.from_recipe_name(recipe)
    expected, reuses, fast = PLANS[recipe]
    assert casts_of(config.gemms) == expected
    plan = plan_for(config, "cpu", torch.bfloat16)
    assert (plan.x.shares_data, plan.w.shares_data, plan.g.shares_data) == reuses
    assert tuple(gemm.use_fast_accum for gemm in config.gemms.all) == fast


@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
def test_one_delayed_operand_needs_sync(operand):
    own = {f"cast_config_{operand}": CastConfig(DELAYED)}
    config = Float8LinearConfig(**own, delayed_scaling=DelayedScalingConfig(4))
    assert config.uses_delayed_scaling
    assert [name for name in RECIPES if RECIPES[name].uses_delayed_scaling] == ["delayed"]


# --- a config is a value


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_a_copy_down_to_its_parts(recipe):
    before = copy.deepcopy(RECIPES[recipe])
    config = Float8LinearConfig.from_recipe_name(recipe)
    assert config == before
    assert config.gemms == before.gemms
    # As scripts for torchao change a frozen config.
    object.__setattr__(config, "emulate", True)
    object.__setattr__(config.cast_config_input, "scale_format", "changed")
    object.__setattr__(config.gemm_config_output, "use_fast_accum", "changed")
    object.__setattr__(config.delayed_scaling, "margin", 7)
    object.__setattr__(config.gemms.grad_input, "a", "changed")
    assert RECIPES[recipe] == before == Float8LinearConfig.from_recipe_name(recipe)
    assert RECIPES[recipe].gemms == before.gemms
