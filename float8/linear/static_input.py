"""A layer that casts its inputs with a constant scale: its config, and its cast.

Static scales are calibrated (`float8.calibrate`), or read from a checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from float8.config import CastConfig, DelayedScalingConfig, Float8LinearConfig, ScalingType
from float8.formats import E4M3
from float8.granularity import WHOLE
from float8.linear.delayed import set_cast
from float8.linear.scaling import Cast


def with_static_input(config: Float8LinearConfig, scale: float | Tensor) -> Float8LinearConfig:
    """A config whose inputs are cast with this scale.

    ``config`` casts inputs with one scale per tensor. ``scale`` is finite and > 0,
    ``value = data * scale``; a tensor has one element. Raises ValueError for another scale, and for
    inputs in high precision or with several scales.
    """
    if isinstance(scale, Tensor) and scale.numel() != 1:
        raise ValueError(f"an input has one static scale, got a tensor of {tuple(scale.shape)}")
    value = float(scale)
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"an input's scale must be finite and > 0, got {value}")
    cast = config.plan.output.a
    if cast is None or any(extent != WHOLE for extent in cast.block):
        what = "in high precision" if cast is None else f"with a scale for each {cast.block}"
        raise ValueError(
            f"its config casts inputs {what}, and static scales are for tensorwise inputs; "
            "convert_from_float8_training first, to convert it with another config"
        )
    target = config.cast_config_input.target_dtype
    static = CastConfig(ScalingType.STATIC, target_dtype=target, static_scale=value)
    is_delayed = any(c.scaling_type is ScalingType.DELAYED for c in config.operand_casts[1:])
    delayed = config.delayed_scaling if is_delayed else DelayedScalingConfig()
    return replace(config, cast_config_input=static, delayed_scaling=delayed)


def set_input_cast(layer: Any, config: Float8LinearConfig) -> None:
    """Give a layer a config that differs from its own in the cast of the input alone."""
    cast = config.cast_config_input  # static
    layer.config = config
    set_cast(layer, "cast_input", Cast(cast, E4M3))
