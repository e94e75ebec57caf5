"""A torchao config arrives at casts that give torchao's own codes, products and gradients."""

from dataclasses import fields, replace

import pytest
import torch
from assertions import assert_bitwise
from layer_check import run
from plans import POW2, ROW, TENSOR, cast, casts_of
from torch import nn

from float8 import Float8Linear, convert_to_float8_training
from float8.config import RECIPES, CastConfig, Float8LinearConfig, GemmConfig, ScalingType
from float8.formats import E5M2
from float8.integrations.conversion import as_config
from float8.integrations.torchao import KNOWN

ao = pytest.importorskip("torchao.float8")
aoc = pytest.importorskip("torchao.float8.config")
AoCast, AoGemm, AoScaling = aoc.CastConfig, aoc.Float8GemmConfig, aoc.ScalingType
AoLinear = pytest.importorskip("torchao.float8.float8_linear").Float8Linear

RECIPE_NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
ours = Float8LinearConfig.from_torchao


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_a_recipe_of_torchao_is_ours_of_that_name(name):
    config = as_config(ao.Float8LinearConfig.from_recipe_name(name))
    assert config.gemms == RECIPES[name].gemms
    assert not config.uses_delayed_scaling


def data(name: str, dtype: torch.dtype) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """Random; with tensorwise scales integers, whose scales are exact and whose sums are too."""
    torch.manual_seed(5)
    linear = nn.Linear(72, 40, bias=False, dtype=dtype)
    if name != "tensorwise":
        return linear, torch.randn(33, 72).to(dtype), torch.randn(33, 40).to(dtype)
    small = [torch.randint(-7, 8, shape).to(dtype) for shape in ((40, 72), (33, 72), (33, 40))]
    for values, largest in zip(small, (448, 448, 57344), strict=True):
        values[0, 0] = largest  # the format's largest: a scale of 1
    linear.weight.data.copy_(small[0])
    return linear, small[1], small[2]


@pytest.mark.parametrize("name", RECIPE_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_output_and_gradients_have_the_bits_of_torchaos_emulation(name, dtype):
    config = replace(ao.Float8LinearConfig.from_recipe_name(name), emulate=True)
    linear, x, g = data(name, dtype)
    theirs = run(AoLinear.from_float(linear, config), x, g)
    found = run(Float8Linear.from_float(linear, ours(config)), x, g)
    for result, expected in theirs.items():
        assert_bitwise(found[result], expected, (name, dtype), result)


# --- each field

AXIS = aoc.ScalingGranularity.AXISWISE


def test_every_field_of_torchaos_config_is_read():
    assert {f.name for f in fields(ao.Float8LinearConfig)} == KNOWN


def test_casts_and_second_uses_arrive():
    config = ours(
        ao.Float8LinearConfig(
            cast_config_input=AoCast(scaling_granularity=AXIS),
            cast_config_weight=AoCast(),
            cast_config_grad_output=AoCast(target_dtype=torch.float8_e5m2),
            cast_config_input_for_grad_weight=AoCast(AoScaling.DISABLED),
            cast_config_weight_for_grad_input=AoCast(scaling_granularity=AXIS),
            cast_config_grad_output_for_grad_weight=AoCast(
                AoScaling.DISABLED, target_dtype=torch.float8_e5m2
            ),
        )
    )
    t4, r4 = cast(TENSOR), cast(ROW)
    assert casts_of(config.gemms) == [r4, t4, cast(TENSOR, E5M2), r4, None, None]
    assert config.cast_config_input_for_grad_weight == CastConfig(ScalingType.DISABLED)


def test_an_equal_second_use_is_left_to_the_first():
    same = ours(ao.Float8LinearConfig(cast_config_input_for_grad_weight=AoCast()))
    assert same.cast_config_input_for_grad_weight is None
    assert same.gemms == Float8LinearConfig().gemms


@pytest.mark.parametrize("name", ["output", "grad_input", "grad_weight"])
@pytest.mark.parametrize("fast", [False, True])
def test_each_gemm_accumulates_as_it_says(name, fast):
    config = ours(ao.Float8LinearConfig(**{f"gemm_config_{name}": AoGemm(use_fast_accum=fast)}))
    assert getattr(config, f"gemm_config_{name}") == GemmConfig(use_fast_accum=fast or None)


@pytest.mark.parametrize("name", ["enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate"])
def test_flags_keep_their_names(name):
    assert getattr(ours(ao.Float8LinearConfig(**{name: True})), name) is True


def test_rounding_is_of_every_cast():
    config = ours(ao.Float8LinearConfig(round_scales_to_power_of_2=True))
    assert all(c.scale_format is POW2 for c in casts_of(config.gemms))


def test_what_changes_nothing_there_changes_nothing_here():
    deprecated = ao.Float8LinearConfig(force_recompute_fp8_weight_in_bwd=True)
    assert ours(deprecated) == ours(ao.Float8LinearConfig())


# --- what is refused


def test_a_layer_of_torchao_is_left_alone():
    model = nn.Sequential(nn.Linear(16, 16))
    ao.convert_to_float8_training(model)
    with pytest.warns(UserWarning, match="0: its type is Float8Linear, not nn.Linear"):
        convert_to_float8_training(model)


@pytest.mark.parametrize("config", [Float8LinearConfig(), "rowwise", None])
def test_what_is_no_torchao_config_is_refused(config):
    with pytest.raises((TypeError, ValueError)):
        ours(config)
