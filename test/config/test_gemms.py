"""A config resolves into three GEMMs; what no hardware multiplies is refused."""

from __future__ import annotations

import pytest
import torch
from plans import DELAYED, OFF, POW2, SECOND_USES, STATIC, TENSOR, cast, casts_of

from float8.config import RECIPES, CastConfig, Float8LinearConfig, GemmConfig
from float8.granularity import Blockwise, Rowwise
from float8.linear.plan import plan_for

BY_128 = CastConfig(granularity=Blockwise(1, 128))


@pytest.mark.parametrize("override", SECOND_USES)
def test_a_second_use_changes_its_gemm_alone(override):
    special = CastConfig(scale_format=POW2, target_dtype=torch.float8_e4m3fn)
    before = casts_of(Float8LinearConfig().gemms)
    after = casts_of(Float8LinearConfig(**{override: special}).gemms)
    changed = [i for i in range(6) if before[i] != after[i]]
    assert changed == [SECOND_USES[override]]
    assert after[changed[0]] == cast(TENSOR, scales=POW2)


@pytest.mark.parametrize(
    ("first", "second", "reuses"),
    [
        (CastConfig(), CastConfig(), True),
        (CastConfig(), CastConfig(scale_format=POW2), False),
        (CastConfig(), CastConfig(target_dtype=torch.float8_e4m3fn), True),  # the default, spelt
        (CastConfig(), CastConfig(target_dtype=torch.float8_e5m2), False),
        (CastConfig(STATIC, static_scale=1.0), CastConfig(STATIC, static_scale=2.0), False),
        (CastConfig(), CastConfig(granularity=Rowwise()), False),
        (BY_128, CastConfig(granularity=Blockwise(128, 1)), True),
        (CastConfig(granularity=Blockwise(128, 128)), None, True),
        (BY_128, None, False),
    ],
)
def test_bytes_are_shared_where_they_are_the_same(first, second, reuses):
    config = Float8LinearConfig(
        cast_config_input=first,
        cast_config_input_for_grad_weight=second,
        cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn),
    )
    assert plan_for(config, "cpu", torch.bfloat16).x.shares_data is reuses


def test_a_delayed_second_use_alone_keeps_the_operands_history():
    delayed = CastConfig(DELAYED)
    config = Float8LinearConfig(
        cast_config_input=OFF,
        cast_config_weight=OFF,
        cast_config_weight_for_grad_input=CastConfig(),
        cast_config_input_for_grad_weight=delayed,
    )
    assert config.operand_casts == (delayed, OFF, CastConfig())
    assert config.uses_delayed_scaling
    assert config.gemms.output.a is None
    assert config.gemms.grad_weight.b == cast(TENSOR, scaling=DELAYED)


def test_a_delayed_second_use_may_be_spelt_out():
    delayed = CastConfig(DELAYED)
    spelt = Float8LinearConfig(delayed, delayed, delayed, cast_config_input_for_grad_weight=delayed)
    assert spelt.gemms == RECIPES["delayed"].gemms


def test_the_gemm_configs_reach_their_gemms():
    names = ("output", "grad_input", "grad_weight")
    for fast in names:
        gemms = {f"gemm_config_{name}": GemmConfig(name == fast) for name in names}
        plan = Float8LinearConfig(**gemms).gemms
        assert [getattr(plan, name).use_fast_accum for name in names] == [n == fast for n in names]


@pytest.mark.parametrize("asked", [None, True, False])
def test_only_for_experts_sums_of_gradients_are_left_open(asked):
    """The kernel of experts knows how many terms they have; no plan depends on tokens."""
    own = GemmConfig(asked)
    config = Float8LinearConfig(gemm_config_output=own, gemm_config_grad_weight=own)
    for grouped, expected in (
        (True, [asked, None, asked]),
        (False, [bool(asked), False, bool(asked)]),
    ):
        plan = plan_for(config, "sm_90", torch.bfloat16, grouped=grouped)
        assert [gemm.use_fast_accum for gemm in plan.gemms] == expected


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (3, 5)], ids=str)
def test_products_of_blocks_have_no_fast_accumulation(block):
    """Torch raises for it (CUDABlas.cpp), and it is the default of the first product."""
    blocks = CastConfig(granularity=Blockwise(*block), target_dtype=torch.float8_e4m3fn)
    plan = Float8LinearConfig(blocks, blocks, blocks).gemms
    assert not any(g.use_fast_accum for g in (plan.output, plan.grad_input, plan.grad_weight))
    assert Float8LinearConfig().gemms.output.use_fast_accum
