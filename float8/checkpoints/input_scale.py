"""The static scale of a layer's input, for layouts that store one.

It is, in this order:

1. what the user gives by the layer's name, as `float8.numerics.Calibration.static_scales` does;
2. the constant of a layer whose input cast is static;
3. the scale in use of one whose input cast is delayed; not with ``smooth_input=True``, where it is
   that of the input times the factors of its channels, which a file has no place for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from float8.arguments import check_type
from float8.formats import E4M3
from float8.granularity import WHOLE
from float8.linear.layer import Float8Linear

FIX = (
    "it has no static input scale, which this layout stores: give "
    "input_scales=float8.calibrate(model, batches).static_scales(), which has those of linear "
    "layers and none of experts, or take a layout with dynamic inputs, such as CompressedTensors()"
)


def check_input_scales(scales: object) -> dict[str, float]:
    """The scales that a user gives, by layer.

    Raises TypeError if they are no mapping of names to numbers, and ValueError if a scale is not
    one number, finite and positive.
    """
    if scales is None:
        return {}
    such_as = 'a mapping of layers to scales, as {"layers.0.proj": 0.02}'
    check_type(scales, Mapping, "input_scales", "input_scales", such_as)
    assert isinstance(scales, Mapping)
    found = {}
    for name, scale in scales.items():
        if isinstance(scale, Tensor) and scale.numel() != 1:
            raise ValueError(
                f"input_scales: {name}: an input has one scale, got a tensor of "
                f"{tuple(scale.shape)}"
            )
        check_type(scale, (int, float, Tensor), "input_scales", str(name), "a number")
        found[str(name)] = float(scale)
        if not (math.isfinite(found[str(name)]) and found[str(name)] > 0):
            raise ValueError(f"input_scales: {name}: a scale is finite and > 0, got {scale}")
    return found


def input_scale(module: nn.Module, given: float | None) -> Tensor | None:
    """The static scale of a layer's input, float32 of shape (); None if there is none.

    ``given`` is the scale that the user gives for this layer, or None.
    """
    if given is not None:
        return torch.tensor(given, dtype=torch.float32)
    if not isinstance(module, Float8Linear):
        return None
    plan = module.config.plan
    cast = None if plan.smooth_input else plan.output.a
    if cast is None or cast.format != E4M3 or set(cast.block) != {WHOLE}:
        return None
    if cast.static_scale is not None:
        return torch.tensor(float(cast.static_scale), dtype=torch.float32)
    state = module.casts[0].state
    if state is None or not (state.ready or state.scale.is_meta):
        return None
    return state.scale.detach()
