"""Convolutions of unit scale: three products, whose numbers of terms are counted.

Let P be the number of pairs (output position, tap) whose tap reads the input, not its padding. In
``y`` (N, Cout, Lo) of ``x`` (N, Cin, L) with K taps and G groups

    an output sums          (Cin/G) K       terms   (fewer at a padded edge)
    an input's gradient     (Cout/G) P / L  terms, on average over its positions
    a weight's gradient     N P / K         terms, on average over its taps
    a bias's gradient       N Lo            terms

and each is divided by the root of its number of terms, as a matrix product is (unit scaling, arXiv
2303.11257, table A.2). Without padding P = K Lo; stride, dilation and padding only change P. The
output's factor counts no padding, since a layer's values must not depend on the length of its
input; a padded output is smaller at its edges, ``sqrt(P / (K Lo))`` overall. In several dimensions
K, L, Lo and P are products over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling.constraints import Constraint, apply_constraint
from float8.unit_scaling.functional.products import power_of_terms
from float8.unit_scaling.registry import overridable
from float8.unit_scaling.scale import scale_bwd, scale_fwd

Sizes = int | Sequence[int]
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


@overridable
def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    constraint: Constraint = "to_output_scale",
    scale_power: tuple[float, float, float] = (0.5, 0.5, 0.5),
) -> Tensor:
    """A unit-scaled ``F.conv1d`` of (N, Cin, L) or (Cin, L) and (Cout, Cin / groups, K).

    Of a weight with two or three kernel dimensions it is ``F.conv2d`` or ``F.conv3d``.

    Args:
        input, weight, bias, stride, padding, dilation, groups: as of ``F.conv1d``.
        constraint: ties the factors of output and input gradient.
        scale_power: p in ``terms ** -p``, for the output, the input's gradient, and the gradients
            of weight and bias.
    """
    channels_out, channels_in, *taps = weight.shape
    lengths = input.shape[-len(taps) :]
    batch = input.shape[0] if input.dim() > len(lengths) + 1 else 1
    kernel, positions, outputs, pairs = 1, 1, 1, 1
    for d, (length, k) in enumerate(zip(lengths, taps, strict=True)):
        step, gap = _along(stride, d), _along(dilation, d)
        before, after = zeros_around(_along(padding, d), gap * (k - 1))
        # torch refuses a stride below 1 with a message of its own
        out = (length + before + after - gap * (k - 1) - 1) // max(step, 1) + 1
        padded = before or after
        pairs = pairs * (pairs_of(length, out, k, step, gap, before) if padded else out * k)
        kernel, positions, outputs = kernel * k, positions * length, outputs * out
    terms = (
        channels_in * kernel,
        channels_out * pairs / max(groups * positions, 1),
        batch * pairs / max(kernel, 1),
        batch * outputs,
    )
    output, grad_input, grad_weight, grad_bias = (
        power_of_terms(max(n, 1), p)
        for n, p in zip(terms, (*scale_power, scale_power[2]), strict=True)
    )
    output, grad_input = apply_constraint(constraint, output, grad_input)
    product = _CONVOLUTIONS[len(taps) - 1](
        scale_bwd(input, grad_input),
        scale_bwd(weight, grad_weight),
        None if bias is None else scale_bwd(bias, grad_bias),
        *(stride, padding, dilation, groups),  # type: ignore[arg-type]
    )
    return scale_fwd(product, output)


def pairs_of(length: int, outputs: int, taps: int, step: int, gap: int, before: int) -> int:
    """P: the number of pairs (output o, tap k) with ``0 <= o step + k gap - before < length``."""
    pairs = 0
    for k in range(taps):
        first = max(-((k * gap - before) // step), 0)
        last = min(outputs - 1, (length - 1 + before - k * gap) // step)
        pairs = pairs + max(last - first + 1, 0)
    return pairs


def zeros_around(padding: int | str, reach: int) -> tuple[int, int]:
    """Zeros before and after; ``reach`` is the distance of the first from the last tap."""
    if padding == "same":
        return reach // 2, reach - reach // 2
    return (0, 0) if isinstance(padding, str) else (padding, padding)


def _along(value: Any, dimension: int) -> Any:
    """The value of one dimension; numbers and words hold for all dimensions."""
    return value if isinstance(value, int | str) else value[dimension % len(value)]
