"""Products: linear layers and matrix products whose three results have unit scale.

A dot product of n independent terms of unit variance has variance n: divide by sqrt(n). Each of the
three products of a linear layer ``y_MN = x_MK @ w_NK.T`` sums over another dimension (unit scaling,
arXiv 2303.11257, table A.2; u-muP, arXiv 2407.17465, table 2 and appendix B):

    y_MN  = x_MK @ w_NK.T      K terms      factor K ** -0.5
    gx_MK = g_MN @ w_NK        N terms      factor N ** -0.5
    gw_NK = g_MN.T @ x_MK      M terms      factor M ** -0.5      M: all rows of the batch

A constraint ties the first two, since the input is no cut edge; the weight is one, and keeps its
own. The last layer of a network divides its output by K instead, not by its root: that is u-muP's
readout, whose output shrinks with width as the correlation of its input with its weight grows; its
input is a cut edge, so it takes no constraint.

`linear`, `linear_readout` and `matmul` compute the factors, `scaled_linear` and `scaled_matmul`
apply them. The two primitives are what a transform replaces to multiply in another precision:
a float8 product has scales of its own and takes the factors into them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, broadcast_shapes
from torch import matmul as torch_matmul
from torch.nn import functional as F

from float8.unit_scaling.constraints import Constraint, apply_constraint
from float8.unit_scaling.override import overridable
from float8.unit_scaling.scale import scale_bwd, scale_fwd

# That of the input's gradient may be a function, which backward calls (`scale_bwd`).
Factors = tuple[float, Any, float]


@overridable
def scaled_linear(input: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors) -> Tensor:
    """``F.linear`` with a factor for each of its products.

    Args:
        input: (..., K).
        weight: (N, K).
        bias: (N,) or None.
        factors: of the output, of the input's gradient, of the gradients of weight and bias. They
            do not multiply each other: ``y = f0 (x @ w.T + b)``, ``gx = f1 (g @ w)``,
            ``gw = f2 (g.T @ x)``, ``gb = f2 g.sum(0)``.

    Returns:
        (..., N).
    """
    output, grad_input, grad_weight = factors
    product = F.linear(
        scale_bwd(input, grad_input),
        scale_bwd(weight, grad_weight),
        None if bias is None else scale_bwd(bias, grad_weight),
    )
    return scale_fwd(product, output)


@overridable
def scaled_matmul(left: Tensor, right: Tensor, factors: Factors) -> Tensor:
    """``torch.matmul`` with a factor for each of its products.

    Args:
        left: (..., M, K), or (K,).
        right: (..., K, N), or (K,).
        factors: of the output, of the left input's gradient, of the right input's. They do not
            multiply each other.

    Returns:
        (..., M, N), broadcast as by ``torch.matmul``.
    """
    output, grad_left, grad_right = factors
    product = torch_matmul(scale_bwd(left, grad_left), scale_bwd(right, grad_right))
    return scale_fwd(product, output)


@overridable
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    constraint: Constraint = "to_output_scale",
    scale_power: Factors = (0.5, 0.5, 0.5),
) -> Tensor:
    """A unit-scaled ``F.linear`` (u-muP, arXiv 2407.17465, table 2 and appendix B).

    Args:
        input: (..., K).
        weight: (N, K).
        bias: (N,) or None. It is added before the output's factor; unit scaling begins with zeros.
        constraint: ties the factors of output and input gradient; see
            `float8.unit_scaling.constraints`.
        scale_power: p in ``terms ** -p``, for the output, the input's gradient, and the gradients
            of weight and bias.

    Returns:
        (..., N).

    Raises:
        ValueError: ``weight`` is not a matrix, or the constraint is unknown.
    """
    if weight.dim() != 2:
        raise ValueError(
            f"linear takes a weight of shape (out_features, in_features), got {_shape(weight)}"
        )
    return scaled_linear(
        input, weight, bias, linear_factors(input, weight, constraint, scale_power)
    )


def linear_factors(
    input: Tensor, weight: Tensor, constraint: Constraint, scale_power: Factors
) -> Factors:
    """The factors of `linear`'s three products: output, input gradient, weight gradient."""
    fan_out, fan_in = weight.shape
    rows = _product(input.shape[:-1])
    output, grad_input, grad_weight = (
        _power(terms, p) for terms, p in zip((fan_in, fan_out, rows), scale_power, strict=True)
    )
    output, grad_input = apply_constraint(constraint, output, grad_input)
    return output, grad_input, grad_weight


@overridable
def linear_readout(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    constraint: Constraint = None,
    scale_power: Factors = (1.0, 0.5, 0.5),
) -> Tensor:
    """The last linear layer of a network: its output is divided by the fan-in, not by its root.

    At initialisation its output therefore has scale ``K ** -0.5`` (u-muP, arXiv 2407.17465,
    table 2, row "output").

    Args:
        input: (..., K).
        weight: (N, K).
        bias: (N,) or None.
        constraint: as for `linear`; None by default, for the input of the last layer is a cut edge.
        scale_power: as for `linear`.

    Returns:
        (..., N).

    Raises:
        ValueError: as for `linear`.
    """
    return linear(input, weight, bias, constraint, scale_power)


@overridable
def matmul(left: Tensor, right: Tensor, constraint: Constraint = "to_output_scale") -> Tensor:
    """A unit-scaled ``torch.matmul`` (unit scaling, arXiv 2303.11257, table A.2).

    Each product sums K, N and M terms, and more where an input is broadcast: its gradient sums over
    the copies too.

    Args:
        left: (..., M, K), or (K,).
        right: (..., K, N), or (K,).
        constraint: ties the factors of the output and of both gradients; see
            `float8.unit_scaling.constraints`.

    Returns:
        (..., M, N), broadcast as by ``torch.matmul``.

    Raises:
        ValueError: an input has no dimension, or the constraint is unknown.
    """
    if not (left.dim() and right.dim()):
        raise ValueError(
            f"matmul takes inputs of one dimension or more, got {_shape(left)} and {_shape(right)}"
        )
    inner, copies_left, copies_right = _terms(left, right)
    factors = (_power(terms, 0.5) for terms in (inner, copies_left, copies_right))
    output, grad_left, grad_right = apply_constraint(constraint, *factors)
    return scaled_matmul(left, right, (output, grad_left, grad_right))


def _terms(left: Tensor, right: Tensor) -> tuple[float, float, float]:
    """The terms summed by the output and by either gradient of a matrix product.

    All products together are ``batch * M * K * N``; each element of an input takes part in its
    share of them.
    """
    rows = left.shape[-2] if left.dim() > 1 else 1
    columns = right.shape[-1] if right.dim() > 1 else 1
    inner = left.shape[-1]
    batch = _product(broadcast_shapes(left.shape[:-2], right.shape[:-2]))
    copies_left = batch / max(_product(left.shape[:-2]), 1)
    copies_right = batch / max(_product(right.shape[:-2]), 1)
    return inner, columns * copies_left, rows * copies_right


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product = product * size
    return product


def _power(terms: float, power: float) -> float:
    """``terms ** -power``; of no terms, which make an empty or zero result, 1."""
    return float(1 / terms**power) if terms else 1.0


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
