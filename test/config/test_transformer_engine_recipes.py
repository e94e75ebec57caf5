"""TransformerEngine's recipe objects are read as they are, by their names and fields.

It cannot be installed without its GPU libraries, so the objects here are stand-ins with the names,
fields and defaults that its documentation gives (2.15).
"""

import copy
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import linear_oracle
import pytest
import torch
from assertions import assert_bitwise, assert_error_within_baseline
from layer_check import run
from plans import B1, B128, TENSOR, cast, casts_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from float8 import Float8Linear, convert_to_float8_training, sync_float8_amax_and_scale_history
from float8.config import CastConfig, Float8LinearConfig, GemmConfig
from float8.formats import E5M2
from float8.granularity import Blockwise

te = Float8LinearConfig.from_te_recipe


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
    _cached_repr: str = ""


def quantiser(power_2_scale: bool, **others) -> SimpleNamespace:
    return SimpleNamespace(power_2_scale=power_2_scale, amax_epsilon=0.0, **others)


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
    assert config.plan == Float8LinearConfig().plan
    assert not config.uses_delayed_scaling


def test_block_scaling_is_the_blockwise_recipe():
    x, w = cast(B1, pow2=True), cast(B128, pow2=True)
    plan = te(Float8BlockScaling()).plan
    assert casts_of(plan) == [x, w, x, w, x, x]
    assert not any(g.use_fast_accum for g in (plan.output, plan.grad_input, plan.grad_weight))


def test_fields_of_a_dynamic_recipe_arrive():
    recipe = Float8BlockScaling(fp8_format="HYBRID", x_block_scaling_dim=2, w_block_scaling_dim=1)
    recipe.fp8_quant_bwd_grad = quantiser(True)
    recipe.backward_override = "high_precision"
    config = te(recipe)
    square = CastConfig(granularity=Blockwise(128, 128), power_of_two_scale=True)
    assert config.cast_config_input == square
    assert config.cast_config_weight.granularity == Blockwise(1, 128)
    assert config.plan.grad_input.a is None and config.plan.grad_weight.a is None
    accumulates = Float8CurrentScaling(fp8_gemm_fprop=gemm(True))
    assert te(accumulates).gemm_config_output == GemmConfig(use_fast_accum=False)
    assert te(Float8CurrentScaling(fp8_format="HYBRID")).plan.grad_input.a == cast(TENSOR, E5M2)


class MXFP8BlockScaling:
    pass


class NVFP4BlockScaling:
    pass


class CustomRecipe:
    pass


class Float8CurentScaling:
    pass


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (MXFP8BlockScaling(), "a scale per 32 elements.*Float8BlockScaling"),
        (NVFP4BlockScaling(), "4-bit formats are not supported"),
        (CustomRecipe(), "write a Float8LinearConfig"),
        (Float8CurentScaling(), "did you mean 'Float8CurrentScaling'"),
        ("HYBRID", "str: what it means here is not known.*or a mapping of arguments"),
        (
            Float8CurrentScaling(use_power_2_scales=True),
            "use_power_2_scales=True and .* contradict",
        ),
        (Float8BlockScaling(use_f32_scales=True), "use_f32_scales=True and .* contradict"),
    ],
)
def test_another_recipe_is_refused_with_a_reason(recipe, message):
    with pytest.raises(ValueError, match=message):
        te(recipe)


@pytest.mark.parametrize("extra", ["amax_epsilon", "random_hadamard_transform"])
def test_what_a_quantiser_does_beyond_scaling_is_refused(extra):
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = quantiser(False)
    setattr(recipe.fp8_quant_fwd_inp, extra, 1e-6)
    with pytest.raises(ValueError, match=f"fp8_quant_fwd_inp=.*{extra}"):
        te(recipe)


@pytest.mark.parametrize(
    ("name", "value"), [("margin", 2), ("interval", 3), ("amax_history_len", 16)]
)
def test_arguments_of_a_history_conflict_with_a_dynamic_recipe(name, value):
    with pytest.raises(ValueError, match="its scales are dynamic") as error:
        te(Float8CurrentScaling(), **{name: value})
    assert f"{name}={value}" in str(error.value) and "Float8CurrentScaling" in str(error.value)


def test_a_field_that_is_not_known_is_refused():
    recipe = DelayedScaling()
    recipe.sparsity = 2
    with pytest.raises(TypeError, match="unknown argument 'sparsity'"):
        te(recipe)
    with pytest.raises(ValueError, match="margin is given twice: 0 in the DelayedScaling recipe"):
        te(DelayedScaling(), margin=2)


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
    config = te(override_linear_precision=override, amax_history_len=2)
    layer = convert_to_float8_training(linear, config=config)
    for step, products in enumerate(wanted):
        for name, found in run(layer, x, g).items():
            want = products[name]
            replay = f"override {override}, step {step}"
            assert_error_within_baseline(
                found, want.exact.detach(), want.plain.detach(), 2.0, replay, name
            )
        sync_float8_amax_and_scale_history(layer)


@pytest.mark.parametrize("override", list(product([False, True], repeat=3)), ids=str)
def test_a_history_is_kept_by_the_operands_that_are_cast(override):
    fprop, dgrad, wgrad = override
    config = te(override_linear_precision=override, amax_history_len=2)
    layer = convert_to_float8_training(nn.Linear(16, 8), config=config)
    x, g = torch.randn(4, 16), torch.randn(4, 8)
    run(layer, x, g)
    amaxes = [t.abs().max() for t in (x, layer.weight, g)]
    is_off = [fprop and wgrad, fprop and dgrad, dgrad and wgrad]
    for module, off, amax in zip(layer.casts, is_off, amaxes, strict=True):
        assert (module.state is None) == off
        assert off or module.state.current_amax == amax
    assert (", input=high precision" in layer.extra_repr()) == (fprop and not wgrad)


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
