"""A convolution is three products too; how many terms each sums is a matter of counting.

Let P be the number of pairs (output position, tap) for which the tap meets the input rather than
its padding. In ``y`` (N, Cout, Lo) of ``x`` (N, Cin, L) with K taps and G groups

    an output sums          (Cin/G) K       terms   (fewer at a padded edge)
    an input's gradient     (Cout/G) P / L  terms, on average over its positions
    a weight's gradient     N P / K         terms, on average over its taps
    a bias's gradient       N Lo            terms

and each is divided by the root of its number of terms. Without padding P = K Lo; stride, dilation
and padding need no other formula, for they only change P. The output counts no padding: what a
layer computes must not depend on how long its input is. The edges of a padded output are smaller,
``sqrt(P / (K Lo))`` overall. The rule is that of a matrix product (unit scaling, arXiv 2303.11257,
table A.2).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling.constraints import Constraint, apply_constraint
from float8.unit_scaling.override import overridable
from float8.unit_scaling.scale import scale_bwd, scale_fwd


@overridable
def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    constraint: Constraint = "to_output_scale",
    scale_power: tuple[float, float, float] = (0.5, 0.5, 0.5),
) -> Tensor:
    """A unit-scaled ``F.conv1d``.

    Args:
        input: (N, Cin, L) or (Cin, L).
        weight: (Cout, Cin / groups, K).
        bias: (Cout,) or None.
        stride: positions between two outputs.
        padding: zeros on either side; or "valid" (none) or "same" (output as long as the input).
        dilation: positions between two taps.
        groups: G, into which the channels are divided.
        constraint: ties the factors of output and input gradient.
        scale_power: p in ``terms ** -p``, for the output, the input's gradient, and the gradients
            of weight and bias.

    Returns:
        (N, Cout, Lo) or (Cout, Lo).

    Raises:
        ValueError: ``weight`` is not 3-d, ``padding`` is an unknown word, or the constraint is
            unknown.
    """
    if weight.dim() != 3:
        raise ValueError(
            "conv1d takes a weight of shape (out_channels, in_channels / groups, taps), got "
            f"{tuple(weight.shape)}"
        )
    channels_out, channels_in, taps = weight.shape
    length, batch = input.shape[-1], input.shape[0] if input.dim() > 2 else 1
    step, gap = _single(stride), _single(dilation)
    before, after = zeros_around(padding, gap * (taps - 1))
    # torch refuses a stride below 1, in words
    outputs = (length + before + after - gap * (taps - 1) - 1) // max(step, 1) + 1
    pairs = outputs * taps
    if before or after:
        pairs = pairs_of(length, outputs, taps, step, gap, before)
    output, grad_input, grad_weight, grad_bias = (
        float(1 / max(terms, 1) ** p)
        for terms, p in zip(
            (
                channels_in * taps,
                channels_out * pairs / max(groups * length, 1),
                batch * pairs / max(taps, 1),
                batch * outputs,
            ),
            (*scale_power, scale_power[2]),
            strict=True,
        )
    )
    output, grad_input = apply_constraint(constraint, output, grad_input)
    product = F.conv1d(
        scale_bwd(input, grad_input),
        scale_bwd(weight, grad_weight),
        None if bias is None else scale_bwd(bias, grad_bias),
        stride,
        padding,
        dilation,
        groups,
    )
    return scale_fwd(product, output)


def pairs_of(length: int, outputs: int, taps: int, step: int, gap: int, before: int) -> int:
    """P: the pairs of output o and tap k with ``0 <= o step + k gap - before < length``."""
    pairs = 0
    for k in range(taps):
        first = max(-((k * gap - before) // step), 0)
        last = min(outputs - 1, (length - 1 + before - k * gap) // step)
        pairs = pairs + max(last - first + 1, 0)
    return pairs


def zeros_around(padding: int | tuple[int, ...] | str, reach: int) -> tuple[int, int]:
    """Zeros before and after; ``reach`` is the distance of the first tap from the last."""
    if padding == "same":
        return reach // 2, reach - reach // 2
    if padding == "valid":
        return 0, 0
    if isinstance(padding, str):
        raise ValueError(f"conv1d: padding is a number, 'valid' or 'same', got {padding!r}")
    return _single(padding), _single(padding)


def _single(value: int | tuple[int, ...]) -> int:
    return value if isinstance(value, int) else value[0]
