"""Sums and norms of unit scale: `add`, residual connections with a weight, norms, embeddings.

The sum of independent x and y of unit variance has variance 2; its gradient reaches both unchanged,
but an input that was broadcast c times sums c gradients (unit scaling, arXiv 2303.11257,
table A.2):

    z = (x + alpha y) / sqrt(1 + alpha**2)      gx = g / sqrt(c_x)      gy = g / sqrt(c_y)

A residual connection weights its branch by ``tau`` (u-muP, arXiv 2407.17465, appendix B):

    forward    z  = (tau f(x) + x) / sqrt(1 + tau**2)
    backward   gx = (tau f'(x)^T g + g) / sqrt(1 + tau**2)

The branch's gradient is multiplied by tau where the branch *begins* (`residual_split`), not where
it ends (`residual_add`), so that gradients within the branch have unit scale as values do. Every
branch is linear in its incoming gradient, so the result is the derivative all the same.

The convention of muS (arXiv 2502.05967), ``sqrt(1 - t) x + sqrt(t) f(x)``, is the same connection
with ``tau = sqrt(t / (1 - t))``.

**Norms and embeddings:** their outputs have unit scale already, the gradients of their weights not.

A norm divides by the scale of its input, so its output has unit scale. The gradient of its input
has unit scale if the input has. The weight and the bias are used once per row: their gradients are
sums over the M rows, and are divided by ``sqrt(M)``. The gradient of a row of an embedding's weight
is a sum over the tokens with that index: M/V of M tokens for V rows, so its factor is ``sqrt(V/M)``
(unit scaling, arXiv 2303.11257, table A.2; u-muP, arXiv 2407.17465, appendix B). Weights are cut
edges, so these factors have no constraint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from float8.unit_scaling.constraints import Constraint, apply_constraint
from float8.unit_scaling.core.functional import refuse
from float8.unit_scaling.functional.products import product_of_sizes
from float8.unit_scaling.registry import overridable
from float8.unit_scaling.scale import scale_bwd, scale_fwd


@overridable
def add(
    input: Tensor | float,
    other: Tensor | float,
    constraint: Constraint = "to_output_scale",
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    """A unit-scaled ``torch.add``; ``out`` must be None.

    A number, or a tensor of one element, shifts the other input and does not change its scale: sums
    with a number are torch's. So are sums of integers (positions, indices), which have no scale.
    ``constraint`` ties the factors of the output and of both gradients.
    """
    refuse(out is not None, "add", "out=", "use the tensor that add returns")
    if (
        not isinstance(input, Tensor)
        or not isinstance(other, Tensor)
        or not (input.is_floating_point() or other.is_floating_point())
    ):
        return torch.add(input, other, alpha=alpha)
    shape = torch.broadcast_shapes(input.shape, other.shape)
    output_scale = 1 / (1 + alpha**2) ** 0.5
    if input.numel() == 1:
        output_scale = 1 / (abs(alpha) or 1.0)
    if other.numel() == 1:
        output_scale = 1.0
    # How many elements of the sum come from one element of each.
    copies = [max(product_of_sizes(shape), 1) / max(x.numel(), 1) for x in (input, other)]
    grads = 1 / copies[0] ** 0.5, 1 / copies[1] ** 0.5 / (abs(alpha) or 1)
    output_scale, *grads_tied = apply_constraint(constraint, output_scale, *grads)
    left, right = [
        scale_bwd(x, scale) if x.is_floating_point() else x
        for x, scale in zip((input, other), grads_tied, strict=True)
    ]
    return scale_fwd(torch.add(left, right, alpha=alpha), output_scale)


@overridable
def residual_split(input: Tensor, tau: float = 1.0) -> tuple[Tensor, Tensor]:
    """The start of a residual connection, before its branch; `residual_add` is the end.

    Args:
        input: any shape.
        tau: the weight of the branch relative to the skip connection, 0 or more.

    Returns:
        ``residual``, which goes into the branch, and ``skip``. Both are the input; their gradients
        are multiplied by ``tau / sqrt(1 + tau**2)`` and ``1 / sqrt(1 + tau**2)``.
    """
    return scale_bwd(input, tau / _norm(tau)), scale_bwd(input, 1 / _norm(tau))


@overridable
def residual_add(residual: Tensor, skip: Tensor, tau: float = 1.0) -> Tensor:
    """The end of a residual connection, after its branch: a weighted sum.

    Args:
        residual: the branch's result for the first result of `residual_split`.
        skip: `residual_split`'s second result.
        tau: as given to `residual_split`.

    Returns:
        ``(tau residual + skip) / sqrt(1 + tau**2)``; gradients reach both unchanged.
    """
    return scale_fwd(residual, tau / _norm(tau)) + scale_fwd(skip, 1 / _norm(tau))


@overridable
def residual_apply(fn: Callable[[Tensor], Tensor], input: Tensor, tau: float = 1.0) -> Tensor:
    """A residual connection around a function: ``(tau fn(input) + input) / sqrt(1 + tau**2)``.

    Gradients within ``fn``, which returns the shape that it takes, have unit scale.
    """
    residual, skip = residual_split(input, tau)
    return residual_add(fn(residual), skip, tau)


def _norm(tau: float) -> float:
    return float((1 + tau**2) ** 0.5)


@overridable
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """A unit-scaled ``F.layer_norm`` of (..., *normalized_shape)."""
    factor = _factor_of_rows(input, normalized_shape)
    weight = None if weight is None else scale_bwd(weight, factor)
    bias = None if bias is None else scale_bwd(bias, factor)
    return F.layer_norm(input, tuple(normalized_shape), weight, bias, eps)


@overridable
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = 1e-5,
) -> Tensor:
    """A unit-scaled ``F.rms_norm`` of (..., *normalized_shape); eps None is torch's default."""
    weight = None if weight is None else scale_bwd(weight, _factor_of_rows(input, normalized_shape))
    return F.rms_norm(input, tuple(normalized_shape), weight, eps)


def _factor_of_rows(input: Tensor, normalized_shape: Sequence[int]) -> float:
    rows = product_of_sizes(input.shape[: input.dim() - len(normalized_shape)])
    return float(1 / max(rows, 1) ** 0.5)


@overridable
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """A unit-scaled ``F.embedding``: rows of a weight of unit scale, not rescaled.

    Args:
        input, weight: M indices of any shape, and (V, D).
        padding_idx: the row that gets no gradient. The other rows' factor is still ``sqrt(V/M)``:
            how many indices are padding is known only at run time.
        max_norm, norm_type, sparse: as of ``F.embedding``.
        scale_grad_by_freq: must be False, because it would divide gradients a second time.

    Raises:
        ValueError: ``scale_grad_by_freq``.
    """
    refuse(scale_grad_by_freq, "embedding", "scale_grad_by_freq=True", "pass False")
    if max_norm is not None:
        # F.embedding gets a view, whose base must not change, so it cannot renormalise the weight.
        with torch.no_grad():
            torch.embedding_renorm_(weight, input.contiguous(), max_norm, norm_type)
    weight = scale_bwd(weight, (weight.shape[0] / max(input.numel(), 1)) ** 0.5)
    return F.embedding(input, weight, padding_idx, sparse=sparse)
