"""A config resolves once into three GEMMs, says what contradicts, and is never changed."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from float8.config import (
    RECIPES,
    CastConfig,
    DelayedScalingConfig,
    Float8LinearConfig,
    GemmConfig,
    LinearPlan,
    OperandCast,
    ScalingType,
)
from float8.formats import E4M3, E5M2
from float8.granularity import Blockwise, Rowwise, Tensorwise

DYNAMIC, DELAYED = ScalingType.DYNAMIC, ScalingType.DELAYED
STATIC, DISABLED = ScalingType.STATIC, ScalingType.DISABLED
OFF = CastConfig(DISABLED)
TENSOR, ROW, B1, B128 = (-1, -1), (1, -1), (1, 128), (128, 128)


def cast(block, fmt=E4M3, scaling=DYNAMIC, pow2=False, static=None) -> OperandCast:
    return OperandCast(scaling, fmt, block, pow2, static)


def casts_of(plan: LinearPlan) -> list[OperandCast | None]:
    gemms = (plan.output, plan.grad_input, plan.grad_weight)
    return [operand for gemm in gemms for operand in (gemm.a, gemm.b)]


ROW_POW2, B1_POW2, B128_POW2 = (cast(b, pow2=True) for b in (ROW, B1, B128))
T4, T5 = cast(TENSOR), cast(TENSOR, E5M2)
S4, S5 = (cast(TENSOR, fmt, STATIC, static="1.0") for fmt in (E4M3, E5M2))
D4, D5 = cast(TENSOR, scaling=DELAYED), cast(TENSOR, E5M2, DELAYED)
# recipe -> the casts of (x, w), (g, w), (g, x); which second uses share bytes; fast accumulation
PLANS = {
    "tensorwise": ([T4, T4, T5, T4, T5, T4], (True, True, True), (True, False, False)),
    "delayed": ([D4, D4, D5, D4, D5, D4], (True, True, True), (True, False, False)),
    "rowwise": ([ROW_POW2] * 6, (False, False, False), (True, False, False)),
    "rowwise_with_gw_hp": (
        [ROW_POW2, ROW_POW2, ROW_POW2, cast(TENSOR, pow2=True), None, None],
        (False, False, False),
        (True, False, False),
    ),
    "blockwise": (
        [B1_POW2, B128_POW2, B1_POW2, B128_POW2, B1_POW2, B1_POW2],
        (False, True, False),
        (False, False, False),
    ),
    "unit": ([S4, S4, S5, S4, S5, S4], (True, True, True), (True, False, False)),
}


def test_the_table_below_speaks_of_every_recipe():
    assert set(PLANS) == set(RECIPES)


@pytest.mark.parametrize("recipe", PLANS)
def test_a_recipe_is_the_three_gemms_that_its_row_says(recipe):
    plan = Float8LinearConfig.from_recipe_name(recipe).plan
    expected, reuses, fast = PLANS[recipe]
    assert casts_of(plan) == expected
    assert (plan.reuses_input, plan.reuses_weight, plan.reuses_grad_output) == reuses
    gemms = (plan.output, plan.grad_input, plan.grad_weight)
    assert tuple(gemm.use_fast_accum for gemm in gemms) == fast


@pytest.mark.parametrize("name", ["tensor-wise", "", "Tensorwise"])
def test_an_unknown_recipe_lists_the_known(name):
    with pytest.raises(ValueError, match="unknown recipe") as error:
        Float8LinearConfig.from_recipe_name(name)
    assert repr(name) in str(error.value)
    assert all(known in str(error.value) for known in RECIPES)


def test_a_recipe_is_not_used_up():
    first = Float8LinearConfig.from_recipe_name("rowwise")
    _ = first.plan
    assert Float8LinearConfig.from_recipe_name("rowwise") == first
    assert Float8LinearConfig() == RECIPES["tensorwise"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_the_delayed_recipe_needs_sync(recipe):
    assert RECIPES[recipe].uses_delayed_scaling == (recipe == "delayed")


@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
def test_one_delayed_operand_needs_sync(operand):
    config = Float8LinearConfig(**{f"cast_config_{operand}": CastConfig(DELAYED)})
    assert config.uses_delayed_scaling


# --- a config is a value


def test_a_shared_cast_is_as_three_written_out():
    shared = CastConfig(power_of_two_scale=True)
    three = [CastConfig(power_of_two_scale=True) for _ in range(3)]
    assert Float8LinearConfig(shared, shared, shared).plan == Float8LinearConfig(*three).plan


def test_the_default_format_is_the_operands_own():
    plan = Float8LinearConfig(*[CastConfig()] * 3).plan
    assert [c.format for c in casts_of(plan)] == [E4M3, E4M3, E5M2, E4M3, E5M2, E4M3]


def test_replace_behaves_as_written_out():
    row = CastConfig(granularity=Rowwise(), target_dtype=torch.float8_e4m3fn)
    block = replace(row, granularity=Blockwise(1, 128), power_of_two_scale=True)
    assert block == CastConfig(
        granularity=Blockwise(1, 128), target_dtype=torch.float8_e4m3fn, power_of_two_scale=True
    )
    assert row.granularity == Rowwise()


@pytest.mark.parametrize("recipe", RECIPES)
def test_replacing_a_cast_resolves_anew(recipe):
    config = RECIPES[recipe]
    _ = config.plan  # which is cached, and must not travel along
    changed = replace(config, cast_config_input=CastConfig(STATIC, static_scale=2.0))
    written_out = Float8LinearConfig(
        **{
            f.name: getattr(config, f.name)
            for f in fields(config)
            if f.init and f.name != "cast_config_input"
        },
        cast_config_input=CastConfig(STATIC, static_scale=2.0),
    )
    assert changed == written_out
    assert changed.plan == written_out.plan
    assert changed.plan.output.a == OperandCast(STATIC, E4M3, TENSOR, static_scale="2.0")
    assert config.plan.output.a != changed.plan.output.a


def test_replacing_checks_again():
    with pytest.raises(ValueError, match="delayed scaling keeps one scale per tensor"):
        replace(CastConfig(granularity=Rowwise()), scaling_type=DELAYED)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_config_survives_copying_and_is_a_key(recipe):
    config = RECIPES[recipe]
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config)):
        assert twin == config
        assert hash(twin) == hash(config)
        assert twin.plan == config.plan


@pytest.mark.parametrize(
    "value", [CastConfig(), Float8LinearConfig(), GemmConfig(), DelayedScalingConfig()]
)
def test_a_config_is_frozen(value):
    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(value)[0].name, None)


# --- second uses

SECOND_USES = {
    # override -> the GEMM and the side that it changes
    "cast_config_weight_for_grad_input": 3,
    "cast_config_grad_output_for_grad_weight": 4,
    "cast_config_input_for_grad_weight": 5,
}


@pytest.mark.parametrize("override", SECOND_USES)
def test_a_second_use_changes_its_gemm_alone(override):
    special = CastConfig(power_of_two_scale=True, target_dtype=torch.float8_e4m3fn)
    before = casts_of(Float8LinearConfig().plan)
    after = casts_of(Float8LinearConfig(**{override: special}).plan)
    changed = [i for i in range(6) if before[i] != after[i]]
    assert changed == [SECOND_USES[override]]
    assert after[changed[0]] == cast(TENSOR, pow2=True)


def test_a_second_use_takes_the_first_ones_cast_in_its_own_orientation():
    row = CastConfig(granularity=Rowwise())
    plan = Float8LinearConfig(row, row, row).plan
    assert {c.block for c in casts_of(plan)} == {ROW}  # one scale per row of what it reads
    assert (plan.reuses_input, plan.reuses_weight, plan.reuses_grad_output) == (False,) * 3


@pytest.mark.parametrize(
    ("first", "second", "reuses"),
    [
        (CastConfig(), CastConfig(), True),
        (CastConfig(), CastConfig(power_of_two_scale=True), False),
        (CastConfig(), CastConfig(target_dtype=torch.float8_e4m3fn), True),  # the default, spelt
        (CastConfig(), CastConfig(target_dtype=torch.float8_e5m2), False),
        (CastConfig(STATIC, static_scale=1.0), CastConfig(STATIC, static_scale=2.0), False),
        (CastConfig(), CastConfig(granularity=Rowwise()), False),
        (
            CastConfig(granularity=Blockwise(1, 128)),
            CastConfig(granularity=Blockwise(128, 1)),
            True,
        ),
        (CastConfig(granularity=Blockwise(128, 128)), None, True),
        (CastConfig(granularity=Blockwise(1, 128)), None, False),
    ],
)
def test_bytes_are_shared_where_they_are_the_same(first, second, reuses):
    config = Float8LinearConfig(
        cast_config_input=first,
        cast_config_input_for_grad_weight=second,
        cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn),
    )
    assert config.plan.reuses_input is reuses


def test_a_delayed_second_use_may_be_spelt_out_but_not_added():
    delayed = CastConfig(DELAYED)
    spelt = Float8LinearConfig(delayed, delayed, delayed, cast_config_input_for_grad_weight=delayed)
    assert spelt.plan == RECIPES["delayed"].plan
    for operand, second in (
        ("input", "cast_config_input_for_grad_weight"),
        ("weight", "cast_config_weight_for_grad_input"),
        ("grad_output", "cast_config_grad_output_for_grad_weight"),
    ):
        with pytest.raises(ValueError, match=f"{second}: a delayed second use") as error:
            Float8LinearConfig(**{second: delayed})
        assert f"cast_config_{operand}" in str(error.value)


@pytest.mark.parametrize(
    ("gemm", "settings"),
    [
        (
            "output",
            {
                "cast_config_input": OFF,
                "cast_config_weight": OFF,
                "cast_config_input_for_grad_weight": CastConfig(),
                "cast_config_weight_for_grad_input": CastConfig(),
            },
        ),
        (
            "grad_input",
            {
                "cast_config_grad_output": OFF,
                "cast_config_weight_for_grad_input": OFF,
                "cast_config_grad_output_for_grad_weight": CastConfig(),
            },
        ),
        (
            "grad_weight",
            {
                "cast_config_grad_output_for_grad_weight": OFF,
                "cast_config_input_for_grad_weight": OFF,
            },
        ),
    ],
)
def test_each_gemm_can_be_switched_off_alone(gemm, settings):
    plan = Float8LinearConfig(**settings).plan
    for name in ("output", "grad_input", "grad_weight"):
        product = getattr(plan, name)
        assert (product.a is None) == (product.b is None) == (name == gemm)


def test_the_gemm_configs_reach_their_gemms():
    fast = GemmConfig(use_fast_accum=True)
    for name in ("output", "grad_input", "grad_weight"):
        off = {f"gemm_config_{g}": GemmConfig() for g in ("output", "grad_input", "grad_weight")}
        plan = Float8LinearConfig(**{**off, f"gemm_config_{name}": fast}).plan
        for other in ("output", "grad_input", "grad_weight"):
            assert getattr(plan, other).use_fast_accum == (other == name)


# --- what contradicts itself

BAD_CASTS = {
    "scaling type": (
        {"scaling_type": "dynamic"},
        TypeError,
        "must be a ScalingType, got 'dynamic'",
    ),
    "granularity": ({"granularity": "row"}, TypeError, "must be a Granularity, got 'row'"),
    "granularity class": ({"granularity": Rowwise}, TypeError, "must be a Granularity"),
    "dtype": ({"target_dtype": torch.float16}, TypeError, "float16 is not a float8 format"),
    "delayed rowwise": (
        {"scaling_type": DELAYED, "granularity": Rowwise()},
        ValueError,
        r"delayed scaling keeps one scale per tensor, got granularity Rowwise\(\); use Tensorwise",
    ),
    "static blockwise": (
        {"scaling_type": STATIC, "granularity": Blockwise(1, 128), "static_scale": 1.0},
        ValueError,
        "static scaling keeps one scale per tensor",
    ),
    "static without": ({"scaling_type": STATIC}, ValueError, "static_scale belongs to"),
    "dynamic with": ({"static_scale": 1.0}, ValueError, "static_scale belongs to"),
    "delayed with": (
        {"scaling_type": DELAYED, "static_scale": 1.0},
        ValueError,
        "static_scale belongs to",
    ),
    "not a power of two": (
        {"scaling_type": STATIC, "static_scale": 3.0, "power_of_two_scale": True},
        ValueError,
        "power_of_two_scale is set, static_scale=3.0 is not",
    ),
}


@pytest.mark.parametrize("case", BAD_CASTS)
def test_a_cast_that_contradicts_itself_is_refused(case):
    arguments, error, message = BAD_CASTS[case]
    with pytest.raises(error, match=message):
        CastConfig(**arguments)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e39])
def test_a_static_scale_is_a_positive_float32_with_a_finite_reciprocal(scale):
    with pytest.raises(ValueError, match="static_scale must be a float32 that is finite and > 0"):
        CastConfig(STATIC, static_scale=scale)


@pytest.mark.parametrize("scale", [2.0**-126, 0.5, 1.0, 2.0**100])
def test_a_power_of_two_is_a_static_power_of_two_scale(scale):
    config = CastConfig(STATIC, static_scale=scale, power_of_two_scale=True)
    assert config.resolve(E4M3).static_scale == repr(scale)


BAD_LINEARS = {
    "output": (
        {"cast_config_input": OFF, "cast_config_input_for_grad_weight": CastConfig()},
        ("the output GEMM", "cast_config_input", "cast_config_weight", "no hardware"),
    ),
    "grad_input": (
        {"cast_config_weight_for_grad_input": OFF},
        ("the grad_input GEMM", "cast_config_weight_for_grad_input", "cast_config_grad_output"),
    ),
    "grad_weight": (
        {"cast_config_input_for_grad_weight": OFF},
        ("the grad_weight GEMM", "cast_config_input_for_grad_weight", "Disable both"),
    ),
    "e5m2 output": (
        {
            "cast_config_input": CastConfig(target_dtype=torch.float8_e5m2),
            "cast_config_weight": CastConfig(target_dtype=torch.float8_e5m2),
        },
        ("the output GEMM", "E5M2 by E5M2", "cast_config_input", "target_dtype"),
    ),
    "e5m2 grad_input": (
        {"cast_config_weight_for_grad_input": CastConfig(target_dtype=torch.float8_e5m2)},
        ("the grad_input GEMM", "E5M2 by E5M2", "cast_config_weight_for_grad_input"),
    ),
    "e5m2 grad_weight": (
        {"cast_config_input_for_grad_weight": CastConfig(target_dtype=torch.float8_e5m2)},
        ("the grad_weight GEMM", "E5M2 by E5M2", "cast_config_input_for_grad_weight"),
    ),
    "e5m2fnuz": (
        {"cast_config_input_for_grad_weight": CastConfig(target_dtype=torch.float8_e5m2fnuz)},
        ("E5M2 by E5M2",),
    ),
}


@pytest.mark.parametrize("case", BAD_LINEARS)
def test_a_gemm_that_no_hardware_runs_is_refused_by_its_fields(case):
    arguments, words = BAD_LINEARS[case]
    with pytest.raises(ValueError, match="GEMM") as error:
        Float8LinearConfig(**arguments)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"history_len": 0}, ValueError, "history_len must be an integer >= 1, got 0"),
        ({"history_len": 1.5}, ValueError, "history_len"),
        ({"amax_compute_algo": "mean"}, ValueError, "'max' or 'most_recent', got 'mean'"),
        ({"margin": 0.5}, ValueError, "margin is an exponent of two, an integer .*, got 0.5"),
        ({"margin": 33}, ValueError, "within 32 of 0, got 33"),
        ({"margin": -33}, ValueError, "within 32 of 0, got -33"),
    ],
)
def test_a_delayed_config_that_makes_no_sense_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        DelayedScalingConfig(**arguments)


# --- words


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CastConfig(), "dynamic tensorwise default"),
        (RECIPES["rowwise"].cast_config_input, "dynamic rowwise e4m3 pow2"),
        (CastConfig(granularity=Blockwise(1, 128)), "dynamic 1x128 default"),
        (
            CastConfig(STATIC, target_dtype=torch.float8_e5m2, static_scale=0.5),
            "static tensorwise e5m2 scale=0.5",
        ),
        (CastConfig(DELAYED, Tensorwise()), "delayed tensorwise default"),
        (OFF, "high precision"),
    ],
)
def test_a_cast_in_a_few_words(config, words):
    assert config.short_str == words


def test_transposing_a_cast_twice_changes_nothing():
    block = cast(B1, E5M2, pow2=True)
    assert block.transposed().block == (128, 1)
    assert block.transposed() != block
    assert block.transposed().transposed() == block
