"""torchao's names and configurations in this library's terms.

`from_torchao` translates a ``torchao.float8.Float8LinearConfig``; it imports torchao when called.
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

from dataclasses import MISSING, fields
from typing import Any

from float8.config import CastConfig, Float8LinearConfig, GemmConfig, ScalingType
from float8.formats import E4M3, ScaleFormat
from float8.granularity import Blockwise, Granularity, Rowwise, Tensorwise

SCALING_TYPES = {"dynamic": ScalingType.DYNAMIC, "disabled": ScalingType.DISABLED}
GRANULARITIES: dict[str, Granularity] = {"tensorwise": Tensorwise(), "axiswise": Rowwise()}
SCALE_FORMATS = {"rceil": ScaleFormat.E8M0, "floor": ScaleFormat.E8M0_FLOOR}
SECOND_USES = {
    "cast_config_input": "cast_config_input_for_grad_weight",
    "cast_config_weight": "cast_config_weight_for_grad_input",
    "cast_config_grad_output": "cast_config_grad_output_for_grad_weight",
}
GEMMS = ("gemm_config_output", "gemm_config_grad_input", "gemm_config_grad_weight")
SAME = ("enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate")
# Rounding is part of each cast in float8. Backward always casts the weight again.
OTHERS = ("round_scales_to_power_of_2", "force_recompute_fp8_weight_in_bwd")
KNOWN = {*SECOND_USES, *SECOND_USES.values(), *GEMMS, *SAME, *OTHERS}


def from_torchao(cls: type[Float8LinearConfig], config: Any) -> Float8LinearConfig:
    """The config that does what a ``torchao.float8.Float8LinearConfig`` does.

    Args:
        config: of torchao, as ``torchao.float8.Float8LinearConfig.from_recipe_name(name)``; or the
            ``MXFP8TrainingOpConfig`` of ``torchao.prototype.moe_training.config``.

    Raises:
        ImportError: torchao is not installed; the message has the command that installs it.
        TypeError: ``config`` is something else.
        ValueError: a field is set that has no counterpart in float8; the message names it.
    """
    try:
        from torchao.float8 import Float8LinearConfig as TorchaoConfig
    except ImportError as error:
        raise ImportError(
            "Float8LinearConfig.from_torchao needs torchao: pip install 'float8[torchao]'"
        ) from error
    if type(config).__name__ == "MXFP8TrainingOpConfig":
        return _of_mx(cls, config)
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
    return cls(**found)


def _of_mx(cls: type[Float8LinearConfig], config: Any) -> Float8LinearConfig:
    # Results have the compute dtype, and groups any size: out_dtype and the padding say nothing.
    mode = config.scale_calculation_mode.value
    if mode not in SCALE_FORMATS:
        raise ValueError(
            f"torchao's scale_calculation_mode={mode!r} has no counterpart in float8: use "
            f"{' or '.join(SCALE_FORMATS)}"
        )
    mx = CastConfig(
        granularity=Blockwise(1, 32), target_dtype=E4M3.dtype, scale_format=SCALE_FORMATS[mode]
    )
    off = CastConfig(ScalingType.DISABLED) if config.wgrad_with_hp else None
    return cls(
        mx,
        mx,
        mx,
        cast_config_input_for_grad_weight=off,
        cast_config_grad_output_for_grad_weight=off,
        gemm_config_output=GemmConfig(),
        emulate=config.kernel_preference.value == "emulated",
    )


def _refuse_unknown(config: Any) -> None:
    unknown = [f for f in fields(config) if f.name not in KNOWN]
    is_set = [
        f.name for f in unknown if f.default is MISSING or getattr(config, f.name) != f.default
    ]
    if is_set:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in is_set)
        raise ValueError(
            f"torchao's {values} has no counterpart in float8: leave it at its default"
        )


def _cast(name: str, cast: Any, is_pow2: bool) -> CastConfig:
    for value, known in (
        (cast.scaling_type, SCALING_TYPES),
        (cast.scaling_granularity, GRANULARITIES),
    ):
        if value.value not in known:
            raise ValueError(f"torchao's {name} has {value}, which has no counterpart in float8")
    scaling_type = SCALING_TYPES[cast.scaling_type.value]
    if scaling_type is ScalingType.DISABLED:
        return CastConfig(scaling_type)
    granularity = GRANULARITIES[cast.scaling_granularity.value]
    scale_format = ScaleFormat.POWER_OF_TWO if is_pow2 else ScaleFormat.FLOAT32
    return CastConfig(scaling_type, granularity, cast.target_dtype, scale_format)


Float8LinearConfig.from_torchao = classmethod(from_torchao)  # type: ignore[assignment]
