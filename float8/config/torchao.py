"""torchao's configuration of a float8 linear layer, translated; torchao is imported when asked for.

Its ``Float8LinearConfig`` speaks of the same operands and GEMMs under the same names, with two
differences: one flag rounds all scales to powers of two, and AXISWISE means one scale per row of
what a GEMM reads, here `Rowwise`. What the two libraries then compute differs in four places:

- a tensorwise scale is ``max(format) / amax`` there and its reciprocal here, each rounded once, so
  that codes differ where a value lies within that rounding of the middle of two codes; scales that
  are powers of two are equal, and so are all codes;
- an amax below 1e-12 counts as 1e-12 there, and as itself here, down to a scale of 2^-126: smaller
  tensors are flushed there;
- a bias is added after the output has been rounded there, and before that here;
- emulated, a bfloat16 product is also rounded before it is scaled here, which shows where scales
  are no powers of two.

With power-of-two scales and no bias outputs and gradients have the same bits.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from float8.config.casts import CastConfig, ScalingType
from float8.config.plan import GemmConfig
from float8.granularity import Granularity, Rowwise, Tensorwise

SCALING_TYPES = {"dynamic": ScalingType.DYNAMIC, "disabled": ScalingType.DISABLED}
GRANULARITIES: dict[str, Granularity] = {"tensorwise": Tensorwise(), "axiswise": Rowwise()}
SECOND_USES = {
    "cast_config_input": "cast_config_input_for_grad_weight",
    "cast_config_weight": "cast_config_weight_for_grad_input",
    "cast_config_grad_output": "cast_config_grad_output_for_grad_weight",
}
GEMMS = ("gemm_config_output", "gemm_config_grad_input", "gemm_config_grad_weight")
SAME = ("enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate")
# Rounding is part of each cast here. Backward always casts the weight again.
OTHERS = ("round_scales_to_power_of_2", "force_recompute_fp8_weight_in_bwd")
KNOWN = {*SECOND_USES, *SECOND_USES.values(), *GEMMS, *SAME, *OTHERS}


def fields_of_torchao(config: Any) -> dict[str, Any]:
    """The fields of our config that does what a torchao config does.

    Args:
        config: a ``torchao.float8.Float8LinearConfig``.

    Raises:
        ImportError: torchao is not installed.
        TypeError: ``config`` is something else.
        ValueError: a field is set that has no counterpart here.
    """
    try:
        from torchao.float8 import Float8LinearConfig as TorchaoConfig
    except ImportError as error:
        raise ImportError(
            "Float8LinearConfig.from_torchao needs torchao: pip install 'float8[torchao]'"
        ) from error
    if not isinstance(config, TorchaoConfig):
        raise TypeError(
            f"from_torchao takes a torchao.float8.Float8LinearConfig, got {config!r}; a recipe's "
            "is torchao.float8.Float8LinearConfig.from_recipe_name(name)"
        )
    _refuse_unknown(config)
    found: dict[str, Any] = {name: getattr(config, name) for name in SAME}
    for name in GEMMS:
        found[name] = GemmConfig(use_fast_accum=getattr(config, name).use_fast_accum)
    is_pow2 = config.round_scales_to_power_of_2
    for first, second in SECOND_USES.items():
        found[first] = _cast(first, getattr(config, first), is_pow2)
        other = _cast(second, getattr(config, second), is_pow2)
        found[second] = None if other == found[first] else other
    return found


def _refuse_unknown(config: Any) -> None:
    unknown = [f for f in fields(config) if f.name not in KNOWN]
    is_set = [
        f.name for f in unknown if f.default is MISSING or getattr(config, f.name) != f.default
    ]
    if is_set:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in is_set)
        raise ValueError(f"torchao's {values} has no counterpart here: leave it at its default")


def _cast(name: str, cast: Any, is_pow2: bool) -> CastConfig:
    if cast.scaling_type.value not in SCALING_TYPES:
        raise ValueError(f"torchao's {name} has {cast.scaling_type}, which has no counterpart here")
    if cast.scaling_granularity.value not in GRANULARITIES:
        raise ValueError(
            f"torchao's {name} has {cast.scaling_granularity}, which has no counterpart here"
        )
    scaling_type = SCALING_TYPES[cast.scaling_type.value]
    if scaling_type is ScalingType.DISABLED:
        return CastConfig(scaling_type)
    return CastConfig(
        scaling_type, GRANULARITIES[cast.scaling_granularity.value], cast.target_dtype, is_pow2
    )
