"""The casts of a layer's operands: `Cast`, and with delayed scaling `DelayedCast`.

`Float8Linear` has one for each operand, under ``cast_input``, ``cast_weight`` and
``cast_grad_output``. A `DelayedCast` has state, and is a child module (`float8.linear.delayed`).
"""

from __future__ import annotations

import torch
from torch import nn

from float8.config import CastConfig, DelayedScalingConfig, ScalingType
from float8.formats import Format
from float8.linear.delayed import DelayedCast
from float8.linear.scaling import Cast

__all__ = ["Cast", "DelayedCast", "make_cast", "set_cast"]


def make_cast(
    config: CastConfig,
    default_format: Format,
    delayed: DelayedScalingConfig,
    amax_init: bool = True,
    device: torch.device | str | None = None,
) -> Cast:
    """The cast that ``config.scaling_type`` names."""
    if config.scaling_type is ScalingType.DELAYED:
        return DelayedCast(config, default_format, delayed, amax_init, device)
    return Cast(config, default_format)


def set_cast(owner: nn.Module, name: str, cast: Cast) -> None:
    """Give a module a cast under a name: a child where it has state, else an attribute."""
    owner._modules.pop(name, None)
    setattr(owner, name, cast.train(owner.training) if isinstance(cast, DelayedCast) else cast)
