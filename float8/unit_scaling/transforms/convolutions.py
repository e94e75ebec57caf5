"""Convolutions in two and three dimensions, which `U` has in one.

The count is that of `functional.convolution`, a product over the dimensions d: let P be the number
of pairs (output position, tap) whose tap meets the input, P = P_1 P_2 ..., of K taps, L input and
Lo output positions, G groups. Terms summed (unit scaling, arXiv 2303.11257, table A.2)::

    output           (Cin/G) K            weight's gradient    N P / K
    input's gradient (Cout/G) P / L       bias's gradient      N Lo
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling.constraints import Constraint, apply_constraint
from float8.unit_scaling.functional.convolution import pairs_of, zeros_around
from float8.unit_scaling.scale import scale_bwd, scale_fwd

Sizes = int | Sequence[int]
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
    return _convolved(F.conv2d, input, weight, bias, *options, constraint)


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
    return _convolved(F.conv3d, input, weight, bias, *options, constraint)


def _convolved(
    function: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    groups: int,
    constraint: Constraint,
) -> Tensor:
    channels_out, channels_in, *taps = weight.shape
    lengths = input.shape[-len(taps) :]
    batch = input.shape[0] if input.dim() > len(lengths) + 1 else 1
    outputs, pairs = 1, 1
    for d, (length, k) in enumerate(zip(lengths, taps, strict=True)):
        step, gap = _along(stride, d), _along(dilation, d)
        before, after = zeros_around(_along(padding, d), gap * (k - 1))
        out = (length + before + after - gap * (k - 1) - 1) // max(step, 1) + 1
        outputs = outputs * out
        pairs = pairs * (
            pairs_of(length, out, k, step, gap, before) if before or after else out * k
        )
    terms = (
        channels_in * math.prod(taps),
        channels_out * pairs / max(groups * math.prod(lengths), 1),
        batch * pairs / max(math.prod(taps), 1),
        batch * outputs,
    )
    output, grad_input, grad_weight, grad_bias = (float(1 / max(n, 1) ** 0.5) for n in terms)
    output, grad_input = apply_constraint(constraint, output, grad_input)
    product = function(
        scale_bwd(input, grad_input),
        scale_bwd(weight, grad_weight),
        None if bias is None else scale_bwd(bias, grad_bias),
        stride,
        padding,
        dilation,
        groups,
    )
    return scale_fwd(product, output)


def _along(value: Any, dimension: int) -> Any:
    """One dimension's number of a tuple; numbers and words are for all dimensions."""
    return value if isinstance(value, int | str) else value[dimension % len(value)]
