"""Products: linear layers, matrix products and convolutions whose results have unit scale.

A dot product of n independent terms of unit variance has variance n: divide by sqrt(n). Each of the
three products of a linear layer ``y_MN = x_MK @ w_NK.T`` sums over another dimension (unit scaling,
arXiv 2303.11257, table A.2; u-muP, arXiv 2407.17465, table 2 and appendix B):

    y_MN  = x_MK @ w_NK.T      K terms      factor K ** -0.5
    gx_MK = g_MN @ w_NK        N terms      factor N ** -0.5
    gw_NK = g_MN.T @ x_MK      M terms      factor M ** -0.5      M: all rows of the batch

A constraint ties the first two, since the input is no cut edge. The weight is one, and keeps its
own factor. The last layer of a network divides its output by K instead, not by its root: that is
u-muP's readout, whose output shrinks with width as the correlation of its input with its weight
grows. Its input is a cut edge, so it takes no constraint.

`factors_of` makes the factors of every product from its numbers of terms. `linear` and
`linear_readout` give them to `scaled_linear`, which a transform replaces to multiply in another
precision: a float8 product has scales of its own, which absorb the factors.

**Convolutions.** Let P be the number of pairs (output position, tap) whose tap reads the input,
not its padding. In ``y`` (N, Cout, Lo) of ``x`` (N, Cin, L) with K taps and G groups

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

import functools
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, broadcast_shapes
from torch import matmul as torch_matmul
from torch.nn import functional as F

from float8.unit_scaling.constraints import Constraint, apply_constraint
from float8.unit_scaling.registry import overridable
from float8.unit_scaling.scale import scale_bwd, scale_fwd

Sizes = int | Sequence[int]
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


@overridable
def scaled_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, factors: tuple[float, Any, float]
) -> Tensor:
    """``F.linear`` of (..., K), (N, K) and (N,), with a factor for each of its products.

    Args:
        input, weight, bias: as of ``F.linear``.
        factors: f0 of the output, f1 of the input's gradient, f2 of the gradients of weight and
            bias. They do not multiply each other: ``y = f0 (x @ w.T + b)``, ``gx = f1 (g @ w)``,
            ``gw = f2 (g.T @ x)``, ``gb = f2 g.sum(0)``. f1 may be a function (`scale_bwd`).
    """
    output, grad_input, grad_weight = factors
    product = F.linear(
        scale_bwd(input, grad_input),
        scale_bwd(weight, grad_weight),
        None if bias is None else scale_bwd(bias, grad_weight),
    )
    return scale_fwd(product, output)


@overridable
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    constraint: Constraint = "to_output_scale",
    scale_power: tuple[float, float, float] = (0.5, 0.5, 0.5),
) -> Tensor:
    """A unit-scaled ``F.linear`` (u-muP, arXiv 2407.17465, table 2 and appendix B).

    Args:
        input, weight: (..., K) and (N, K).
        bias: (N,) or None. It is added before the output's factor; unit scaling begins with zeros.
        constraint: ties the factors of output and input gradient.
        scale_power: p in ``terms ** -p``, for the output, the input's gradient, and the gradients
            of weight and bias.

    Raises:
        ValueError: the constraint is unknown.
    """
    factors = linear_factors(input, weight, constraint, scale_power)
    return scaled_linear(input, weight, bias, factors)


def linear_factors(
    input: Tensor, weight: Tensor, constraint: Constraint, scale_power: tuple[float, float, float]
) -> tuple[float, float, float]:
    """The factors of `linear`'s three products: output, input gradient, weight gradient."""
    fan_out, fan_in = weight.shape
    terms = fan_in, fan_out, product_of_sizes(input.shape[:-1])
    output, grad_input, grad_weight = factors_of(terms, constraint, scale_power)
    return output, grad_input, grad_weight


@overridable
def linear_readout(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    constraint: Constraint = None,
    scale_power: tuple[float, float, float] = (1.0, 0.5, 0.5),
) -> Tensor:
    """The last linear layer of a network: `linear`, its output divided by the fan-in.

    At initialisation its output therefore has scale ``K ** -0.5`` (u-muP, arXiv 2407.17465,
    table 2, row "output"). Its input is a cut edge, hence no constraint by default.
    """
    return linear(input, weight, bias, constraint, scale_power)


@overridable
def matmul(left: Tensor, right: Tensor, constraint: Constraint = "to_output_scale") -> Tensor:
    """A unit-scaled ``torch.matmul`` (unit scaling, arXiv 2303.11257, table A.2).

    The products sum K, N and M terms. The gradient of an input that is broadcast sums over its
    copies too.

    Args:
        left, right: (..., M, K) or (K,), and (..., K, N) or (K,).
        constraint: ties the factors of the output and of both gradients.

    Raises:
        ValueError: the constraint is unknown.
    """
    output, grad_left, grad_right = factors_of(_terms(left, right), constraint, tied=3)
    product = torch_matmul(scale_bwd(left, grad_left), scale_bwd(right, grad_right))
    return scale_fwd(product, output)


def _terms(left: Tensor, right: Tensor) -> tuple[float, float, float]:
    """The terms summed by the output and by the gradients of left and right."""
    rows = left.shape[-2] if left.dim() > 1 else 1
    columns = right.shape[-1] if right.dim() > 1 else 1
    batch = product_of_sizes(broadcast_shapes(left.shape[:-2], right.shape[:-2]))
    copies_left = batch / max(product_of_sizes(left.shape[:-2]), 1)
    copies_right = batch / max(product_of_sizes(right.shape[:-2]), 1)
    return left.shape[-1], columns * copies_left, rows * copies_right


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
        reach, before = gap * (k - 1), _along(padding, d)  # of the taps; zeros before and after
        after = before
        if isinstance(before, str):
            before, after = (reach // 2, reach - reach // 2) if before == "same" else (0, 0)
        # torch refuses a stride below 1 with a message of its own
        out = (length + before + after - reach - 1) // max(step, 1) + 1
        is_padded = before or after
        pairs = pairs * (pairs_of(length, out, k, step, gap, before) if is_padded else out * k)
        kernel, positions, outputs = kernel * k, positions * length, outputs * out
    terms = (
        channels_in * kernel,
        channels_out * pairs / max(groups * positions, 1),
        batch * pairs / max(kernel, 1),
        batch * outputs,
    )
    factors = factors_of([max(n, 1) for n in terms], constraint, (*scale_power, scale_power[2]))
    output, grad_input, grad_weight, grad_bias = factors
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


def _along(value: Any, dimension: int) -> Any:
    """The value of one dimension; numbers and words hold for all dimensions."""
    return value if isinstance(value, int | str) else value[dimension % len(value)]


def product_of_sizes(sizes: tuple[int, ...]) -> int:
    """The product of sizes, which may be symbolic."""
    return functools.reduce(operator.mul, sizes, 1)


def factors_of(
    terms: Sequence[float],
    constraint: Constraint,
    powers: Sequence[float] = (0.5, 0.5, 0.5),
    tied: int = 2,
) -> tuple[float, ...]:
    """The factors of a product: ``terms ** -power`` each, the first ``tied`` under a constraint.

    Args:
        terms: how many terms are summed by the output, by the gradients of its operands and by that
            of a bias. The factor of no terms, whose result is empty or zero, is 1.
        constraint: ties the factors of the output and of the first gradients.
        powers: one for each number of terms.
        tied: 2, or 3 where both operands are activations.
    """
    pairs = zip(terms, powers, strict=True)
    factors = [float(1 / n**power) if n else 1.0 for n, power in pairs]
    return *apply_constraint(constraint, *factors[:tied]), *factors[tied:]
