"""The casts of a layer's operands: `DynamicCast`, `DelayedCast`, `StaticCast`, `NoCast`.

Each is a module that turns a high-precision tensor into a `Float8Tensor` (`NoCast` returns it as it
is). `Float8Linear` owns one per operand, under ``cast_input``, ``cast_weight`` and
``cast_grad_output``. Only `DelayedCast` has state: see `float8.linear.delayed`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from float8.config import CastConfig, DelayedScalingConfig, ScalingType
from float8.formats import Format
from float8.linear.delayed import DelayedCast
from float8.linear.scaling import Cast

__all__ = ["Cast", "DelayedCast", "DynamicCast", "NoCast", "StaticCast", "make_cast"]


class DynamicCast(Cast):
    """The scale comes from the tensor itself."""

    def _scale(self) -> None:
        return None


class StaticCast(Cast):
    """The scale is a constant."""

    def _scale(self) -> float | None:
        return self.config.static_scale


class NoCast(Cast):
    """The operand stays in high precision."""

    def forward(self, x: Tensor) -> Tensor:
        """``x``, as it is."""
        return x


def make_cast(
    config: CastConfig,
    default_format: Format,
    delayed: DelayedScalingConfig,
    amax_init: bool = True,
    device: torch.device | str | None = None,
) -> Cast:
    """The `Cast` that ``config.scaling_type`` names."""
    if config.scaling_type is ScalingType.DELAYED:
        return DelayedCast(config, default_format, delayed, amax_init, device)
    stateless = {
        ScalingType.DYNAMIC: DynamicCast,
        ScalingType.STATIC: StaticCast,
        ScalingType.DISABLED: NoCast,
    }
    return stateless[config.scaling_type](config, default_format)
