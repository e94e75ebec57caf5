"""Convolutions in two and three dimensions, which `U` has in one, by `functional.convolution`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling.constraints import Constraint
from float8.unit_scaling.functional.convolution import Sizes, convolved

DEFAULT: Constraint = "to_output_scale"


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    constraint: Constraint = DEFAULT,
) -> Tensor:
    """``F.conv2d``: input (N, Cin, H, W) or (Cin, H, W), weight (Cout, Cin / groups, Kh, Kw)."""
    options = (stride, padding, dilation, groups)
    return convolved(F.conv2d, input, weight, bias, *options, constraint)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    constraint: Constraint = DEFAULT,
) -> Tensor:
    """``F.conv3d``: input (N, Cin, D, H, W), or without N, weight (Cout, Cin / groups, ...)."""
    options = (stride, padding, dilation, groups)
    return convolved(F.conv3d, input, weight, bias, *options, constraint)
