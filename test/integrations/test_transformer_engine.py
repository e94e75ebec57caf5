"""TransformerEngine's recipes: every argument arrives, in each spelling, or is refused by name.

It cannot be installed without its GPU libraries, so its objects here are stand-ins with the names,
fields and defaults of its ``common/recipe/__init__.py`` (2.20.2). ``DelayedScaling`` also has
``interval`` and ``override_linear_precision``, which versions before 2.0 have.
"""

import copy
import enum
from dataclasses import dataclass, field, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import linear_oracle
import pytest
import torch
from assertions import assert_bitwise, assert_error_within_baseline
from layer_check import run
from plans import B1, B128, DELAYED, E8M0, MX, POW2, TENSOR, cast, casts_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from float8 import Float8Linear, sync_float8_amax_and_scale_history
from float8.config import (
    RECIPES,
    CastConfig,
    DelayedScalingConfig,
    Float8LinearConfig,
    GemmConfig,
)
from float8.formats import E4M3, E5M2
from float8.granularity import Blockwise

te = Float8LinearConfig.from_te_recipe


def history(**others) -> DelayedScalingConfig:
    return DelayedScalingConfig(**{"history_len": 1024, "remember_nonfinite": True, **others})


class Format(enum.Enum):
    """As TransformerEngine's: members whose values are not their names."""

    E4M3 = (448, 448)
    HYBRID = (448, 57344)


def test_the_defaults_are_those_of_delayed_scaling():
    config = te()
    assert config.operand_casts == (CastConfig(DELAYED),) * 3
    assert config.delayed_scaling == history()
    assert config.enable_amax_init is False
    fast = (config.gemms.output, config.gemms.grad_input, config.gemms.grad_weight)
    assert [gemm.use_fast_accum for gemm in fast] == [True, None, None]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"margin": 2}, {"margin": 2}),
        ({"margin": -3}, {"margin": -3}),
        ({"interval": 16}, {}),
        ({"amax_history_len": 7}, {"history_len": 7}),
        ({"amax_compute_algo": "most_recent"}, {"amax_compute_algo": "most_recent"}),
        ({"reduce_amax": True, "fp8_dpa": False, "fp8_mha": False}, {}),
        ({"scaling_factor_compute_algo": None, "backward_override": None}, {}),
    ],
)
def test_each_argument_of_the_history_arrives(arguments, expected):
    assert te(**arguments).delayed_scaling == history(**expected)
    assert te(arguments) == te(**arguments)


@pytest.mark.parametrize("fmt", ["HYBRID", "hybrid", Format.HYBRID, "E4M3", "e4m3", Format.E4M3])
def test_the_format_is_that_of_grad_output(fmt):
    grad = E4M3 if "e4m3" in str(fmt).lower() else E5M2
    d4, dg = cast(TENSOR, scaling=DELAYED), cast(TENSOR, grad, DELAYED)
    assert casts_of(te(fp8_format=fmt).gemms) == [d4, d4, dg, d4, dg, d4]


def test_a_backward_in_high_precision_is_two_overrides():
    spelt = te(override_linear_precision=(False, True, True))
    assert te(backward_override="high_precision") == spelt


def test_a_backward_from_dequantised_operands_is_a_field():
    expected = replace(te(Float8BlockScaling()), dequantize_in_backward=True)
    assert te(Float8BlockScaling(), backward_override="dequantized") == expected


# --- spellings


# What `accelerate config` writes.
ACCELERATE = {
    "backend": "TE",
    "use_autocast_during_eval": True,
    "margin": 1,
    "interval": 4,
    "fp8_format": "E4M3",
    "amax_history_length": 32,
    "amax_compute_algorithm": "most_recent",
    "override_linear_precision": [False, False, True],
}


def test_the_block_of_an_accelerate_file_is_understood():
    expected = te(
        margin=1,
        interval=4,
        fp8_format="E4M3",
        amax_history_len=32,
        amax_compute_algo="most_recent",
        override_linear_precision=(False, False, True),
    )
    assert te(ACCELERATE) == te(**ACCELERATE) == expected


def test_an_override_that_is_switched_off_is_none():
    assert te({"override_linear_precision": False}) == te()


def test_a_mapping_and_keywords_add_up():
    assert te({"margin": 1}, amax_history_len=3, margin=None) == te(margin=1, amax_history_len=3)


# --- what is refused

REFUSED = {
    "a near miss": ({"amax_history": 3}, TypeError, "did you mean 'amax_history_len'?"),
    "an unknown one": ({"zzz": 3}, TypeError, "unknown argument 'zzz'.*known: margin, interval"),
    "e5m2": ({"fp8_format": "E5M2"}, ValueError, "fp8_format='E5M2' .*'HYBRID' or 'E4M3'"),
    "another algo": ({"amax_compute_algo": "mean"}, ValueError, "amax_compute_algo"),
    "own scales": (
        {"scaling_factor_compute_algo": max},
        ValueError,
        "counterpart in float8: None",
    ),
    "local amaxes": ({"reduce_amax": False}, ValueError, "reduce_amax=False .*: True"),
    "attention": ({"fp8_dpa": True}, ValueError, "fp8_dpa=True .*: False"),
    "another backward": ({"backward_override": "fp8"}, ValueError, "backward_override='fp8"),
    "two backwards": (
        {"backward_override": "dequantized", "override_linear_precision": (False, True, False)},
        ValueError,
        "dequantize_in_backward",
    ),
    "mx": ({"use_mxfp8_block_scaling": True}, ValueError, "use_mxfp8_block_scaling=True"),
    "torchao": ({"backend": "AO"}, ValueError, "backend='AO' .*: 'TE'"),
    "text as a number": ({"margin": "1"}, TypeError, "margin"),
    "a margin beyond all": ({"margin": 40}, ValueError, "margin .* within 32 of 0, got 40"),
    "one override": ({"override_linear_precision": True}, TypeError, "unpack"),
    "twice": (
        {"amax_history_len": 3, "amax_history_length": 4},
        ValueError,
        "amax_history_len is given twice",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_means_nothing_here_is_refused_by_name(case):
    arguments, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        te(**arguments)
    with pytest.raises(error, match=message):
        te(arguments)


def test_bad_numbers_are_refused_where_no_gemm_is_left_to_use_them_too():
    with pytest.raises(ValueError, match="history_len"):
        te(amax_history_len=0, override_linear_precision=(True, True, True))


# --- recipe objects


@dataclass
class DelayedScaling:
    margin: int = 0
    interval: int = -1
    fp8_format: Any = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    override_linear_precision: tuple = (False, False, False)
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Any = None
    _cached_repr: str = ""


def quantiser(power_2_scale: bool) -> SimpleNamespace:
    return SimpleNamespace(
        power_2_scale=power_2_scale,
        amax_epsilon=0.0,
        random_hadamard_transform=False,
        stochastic_rounding=False,
        fp4_2d_quantization=False,
    )


def gemm(is_precise: bool) -> SimpleNamespace:
    return SimpleNamespace(use_split_accumulator=is_precise)


@dataclass
class Float8CurrentScaling:
    fp8_quant_fwd_inp = quantiser(False)  # of the class, as there
    fp8_quant_fwd_weight = quantiser(False)
    fp8_quant_bwd_grad = quantiser(False)
    use_power_2_scales: bool = False
    fp8_format: Any = "HYBRID"
    fp8_gemm_fprop: Any = field(default_factory=lambda: gemm(False))
    fp8_gemm_dgrad: Any = field(default_factory=lambda: gemm(True))
    fp8_gemm_wgrad: Any = field(default_factory=lambda: gemm(True))
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Any = None


@dataclass
class Float8BlockScaling(Float8CurrentScaling):
    fp8_quant_fwd_inp = quantiser(True)
    fp8_quant_fwd_weight = quantiser(True)
    fp8_quant_bwd_grad = quantiser(True)
    use_power_2_scales: Any = field(default=None, init=False)  # no field of this one's instances
    use_f32_scales: bool = False
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_format: Any = "E4M3"
    fp8_gemm_fprop: Any = field(default_factory=lambda: gemm(True))


def test_a_delayed_recipe_is_its_arguments():
    assert te(DelayedScaling()) == te()
    arguments = {"margin": 1, "interval": 5, "amax_history_len": 3, "fp8_format": "E4M3"}
    assert te(DelayedScaling(**arguments)) == te(**arguments)
    wgrad = (False, False, True)
    assert te(DelayedScaling(override_linear_precision=wgrad)) == te(
        override_linear_precision=wgrad
    )


def test_current_scaling_is_the_dynamic_recipe():
    config = te(Float8CurrentScaling())
    precise = GemmConfig(use_fast_accum=False)  # for experts too, as its GroupedLinear
    gradients = {"gemm_config_grad_input": precise, "gemm_config_grad_weight": precise}
    assert config.gemms == Float8LinearConfig(**gradients).gemms
    assert not config.uses_delayed_scaling


def test_block_scaling_is_the_blockwise_recipe():
    x, w = cast(B1, scales=POW2), cast(B128, scales=POW2)
    plan = te(Float8BlockScaling()).gemms
    assert casts_of(plan) == [x, w, x, w, x, x]
    assert not any(g.use_fast_accum for g in (plan.output, plan.grad_input, plan.grad_weight))


def test_fields_of_a_dynamic_recipe_arrive():
    recipe = Float8BlockScaling(fp8_format="HYBRID", x_block_scaling_dim=2, w_block_scaling_dim=1)
    recipe.fp8_quant_bwd_grad = quantiser(True)
    recipe.backward_override = "high_precision"
    config = te(recipe)
    square = CastConfig(granularity=Blockwise(128, 128), scale_format=POW2)
    assert config.cast_config_input == square
    assert config.cast_config_weight.granularity == Blockwise(1, 128)
    assert config.gemms.grad_input.a is None and config.gemms.grad_weight.a is None
    accumulates = Float8CurrentScaling(fp8_gemm_fprop=gemm(True))
    assert te(accumulates).gemm_config_output == GemmConfig(use_fast_accum=False)
    assert te(Float8CurrentScaling(fp8_format="HYBRID")).gemms.grad_input.a == cast(TENSOR, E5M2)


@dataclass
class MXFP8BlockScaling:
    margin: int = 0
    fp8_format: Any = "E4M3"
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Any = None
    enable_2d_quantization: bool = False  # from 2.19 on


def test_mx_scaling_is_the_recipe_mxfp8():
    assert te(MXFP8BlockScaling()).gemms == RECIPES["mxfp8"].gemms
    assert te(MXFP8BlockScaling(enable_2d_quantization=True)).gemms == RECIPES["mxfp8_2d"].gemms
    plan = te(MXFP8BlockScaling(fp8_format="HYBRID")).gemms
    x, g = (cast(MX, fmt, scales=E8M0) for fmt in (E4M3, E5M2))
    assert casts_of(plan) == [x, x, g, x, g, x]
    plan = te(MXFP8BlockScaling(backward_override="high_precision")).gemms
    assert casts_of(plan) == [x, x, None, None, None, None]


def quantising(**fields: object) -> Float8CurrentScaling:
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = SimpleNamespace(**vars(quantiser(False)) | fields)
    return recipe


def named(kind: str) -> object:
    return type(kind, (), {})()


# (recipe, arguments beside it, what the message says)
REFUSED_RECIPES = [
    (MXFP8BlockScaling(margin=1), {}, "margin=1 of MXFP8BlockScaling"),
    (named("NVFP4BlockScaling"), {}, "NVFP4BlockScaling has no counterpart"),
    (named("CustomRecipe"), {}, r"CustomRecipe has no counterpart.*six cast_config_\*"),
    (
        Float8CurrentScaling(use_power_2_scales=True),
        {},
        "power-of-two scales, True",
    ),
    (
        Float8BlockScaling(use_f32_scales=True),
        {},
        "power-of-two scales, False",
    ),
    (quantising(amax_epsilon=1e-6), {}, "fp8_quant_fwd_inp=.*amax_epsilon"),
    (quantising(fp4_2d_quantization=True), {}, "fp8_quant_fwd_inp=.*fp4_2d_quantization"),
    (Float8CurrentScaling(), {"margin": 2}, "unknown argument 'margin' of Float8CurrentScaling"),
    (DelayedScaling(), {"margin": 2}, "margin is given twice, beside the DelayedScaling recipe"),
    ({"margin": 1}, {"margin": 2}, r"margin is given twice"),
]


@pytest.mark.parametrize(("recipe", "arguments", "message"), REFUSED_RECIPES)
def test_another_recipe_is_refused_with_a_reason(recipe, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        te(recipe, **arguments)


# --- what a layer computes


def results(override, recipe, x, linear, g):
    """`linear_oracle.expected` with some GEMMs in high precision."""
    table = linear_oracle.GEMMS[recipe]
    own = {
        name: None if is_off else operands
        for (name, operands), is_off in zip(table.items(), override, strict=True)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(linear_oracle.GEMMS, "overridden", own)
        return linear_oracle.expected("overridden", x, linear.weight.detach(), linear.bias, g)


@pytest.mark.parametrize("override", list(product([False, True], repeat=3)), ids=str)
def test_a_layer_computes_what_the_override_says(override):
    """First with a scale of 1, then with those of the first step's amaxes."""
    torch.manual_seed(3)
    linear = nn.Linear(40, 24, dtype=torch.bfloat16)
    x, g = torch.randn(17, 40).bfloat16(), torch.randn(17, 24).bfloat16()
    wanted = [results(override, recipe, x, linear, g) for recipe in ("unit", "tensorwise")]
    fprop, dgrad, wgrad = override
    config = te(override_linear_precision=list(override), amax_history_len=2)
    assert config == te(override_linear_precision=override, amax_history_len=2)
    layer = Float8Linear.from_float(linear, config)
    is_off = [fprop and wgrad, fprop and dgrad, dgrad and wgrad]
    for step, products in enumerate(wanted):
        for name, found in run(layer, x, g).items():
            want = products[name]
            replay = f"override {override}, step {step}"
            assert_error_within_baseline(
                found, want.exact.detach(), want.plain.detach(), 2.0, replay, name
            )
        for state, off, x_ in zip(layer.states, is_off, (x, layer.weight, g), strict=True):
            assert (state is None) == off
            assert off or state.current_amax == x_.abs().max()
        sync_float8_amax_and_scale_history(layer)
    assert (", input=high precision" in layer.extra_repr()) == fprop


def test_histories_of_second_uses_are_kept_compiled_and_recomputed_as_eagerly():
    """Those of a weight are written in the backward."""
    overrides = ((True, False, False), (False, True, False), (True, True, False))
    eager = nn.Sequential(
        *(
            Float8Linear(16, 16, config=te(override_linear_precision=o, amax_history_len=2))
            for o in overrides
        )
    )
    compiled, again = copy.deepcopy(eager), copy.deepcopy(eager)
    run_compiled = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for step in range(3):
        x, g = torch.randn(8, 16) * 4.0**step, torch.randn(8, 16)
        for model, forward in (
            (eager, eager),
            (compiled, run_compiled),
            (again, lambda x: checkpoint(again, x, use_reentrant=False)),
        ):
            model.zero_grad()
            forward(x.clone().requires_grad_()).backward(g)
            sync_float8_amax_and_scale_history(model)
        for other in (compiled, again):
            for a, b in zip(eager.buffers(), other.buffers(), strict=True):
                assert_bitwise(b, a, f"step {step}")
            for a, b in zip(eager.parameters(), other.parameters(), strict=True):
                assert_bitwise(b.grad, a.grad, f"step {step}")
