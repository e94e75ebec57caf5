"""torchao's names and configurations in this library's terms.

`from_torchao` translates a ``torchao.float8.Float8LinearConfig``, by the names of its fields and
the values of its enums; torchao is not imported.
That config has the same operands and GEMMs under the same names, with two differences: one flag
rounds all scales to powers of two, and AXISWISE means one scale per row of what a GEMM reads, here
`Rowwise`. The results of the two libraries then differ in four places:

- a tensorwise scale is ``max(format) / amax`` there and its reciprocal here, each rounded once.
  Data differ where a value lies within that rounding of the middle of two float8 values. Scales
  that are powers of two are equal, and so are all data;
- an amax below 1e-12 counts as 1e-12 there, and as itself here, down to a scale of 2^-126: smaller
  tensors become zero there;
- a bias is added after the output has been rounded there, and before that here;
- emulated, a bfloat16 product is also rounded before it is scaled here, which shows where scales
  are no powers of two.

With power-of-two scales and no bias outputs and gradients have the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from float8.config import CastConfig, Float8LinearConfig, GemmConfig, ScalingType
from float8.config.linear import SECOND_USES
from float8.formats import ScaleFormat
from float8.granularity import Granularity, Rowwise, Tensorwise

T = TypeVar("T")

SCALING_TYPES = {"dynamic": ScalingType.DYNAMIC, "disabled": ScalingType.DISABLED}
GRANULARITIES: dict[str, Granularity] = {"tensorwise": Tensorwise(), "axiswise": Rowwise()}
GEMM_CONFIGS = ("gemm_config_output", "gemm_config_grad_input", "gemm_config_grad_weight")
SAME = ("enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate")
# Rounding is part of each cast in float8. Backward always casts the weight again.
OTHERS = ("round_scales_to_power_of_2", "force_recompute_fp8_weight_in_bwd")
KNOWN = {*SECOND_USES, *SECOND_USES.values(), *GEMM_CONFIGS, *SAME, *OTHERS}


def from_torchao(cls: type[Float8LinearConfig], config: Any) -> Float8LinearConfig:
    """The config that does what a ``torchao.float8.Float8LinearConfig`` does.

    Args:
        config: of torchao, as ``torchao.float8.Float8LinearConfig.from_recipe_name(name)``.

    Raises:
        TypeError: ``config`` is something else.
        ValueError: a field has a value without counterpart in float8; the message names it.
    """
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name not in KNOWN and (f.default is MISSING or value != f.default):
            _counterpart({}, f.name, value)
    found: dict[str, Any] = {name: getattr(config, name) for name in SAME}
    for name in GEMM_CONFIGS:
        # torchao's False, a default, is for layers: its experts have fast sums.
        found[name] = GemmConfig(use_fast_accum=getattr(config, name).use_fast_accum or None)
    is_pow2 = config.round_scales_to_power_of_2
    for first, second in SECOND_USES.items():
        found[first] = _cast(first, getattr(config, first), is_pow2)
        other = _cast(second, getattr(config, second), is_pow2)
        found[second] = None if other == found[first] else other
    return cls(**found)


def _counterpart(table: Mapping[str, T], name: str, value: Any) -> T:
    """What a table has for a value, or for that of an enum's member, of the field ``name``."""
    key = getattr(value, "value", value)
    if key not in table:
        known = f": take {' or '.join(table)}" if table else ": leave it at its default"
        raise ValueError(f"torchao's {name}={key!r} has no counterpart in float8{known}")
    return table[key]


def _cast(name: str, cast: Any, is_pow2: bool) -> CastConfig:
    scaling_type = _counterpart(SCALING_TYPES, f"{name}.scaling_type", cast.scaling_type)
    granularity = _counterpart(GRANULARITIES, f"{name}.granularity", cast.scaling_granularity)
    if scaling_type is ScalingType.DISABLED:
        return CastConfig(scaling_type)
    scale_format = ScaleFormat.POWER_OF_TWO if is_pow2 else ScaleFormat.FLOAT32
    return CastConfig(scaling_type, granularity, cast.target_dtype, scale_format)


Float8LinearConfig.from_torchao = classmethod(from_torchao)  # type: ignore[assignment]
