"""Sums of unit scale: `add`, and residual connections with a weight.

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
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from float8.unit_scaling.constraints import Constraint, apply_constraint
from float8.unit_scaling.core.functional import refuse
from float8.unit_scaling.functional.products import product_of
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
    grad_input = 1 / _copies(shape, input) ** 0.5
    grad_other = 1 / _copies(shape, other) ** 0.5 / (abs(alpha) or 1)
    output_scale, grad_input, grad_other = apply_constraint(
        constraint, output_scale, grad_input, grad_other
    )
    total = torch.add(_grad_scaled(input, grad_input), _grad_scaled(other, grad_other), alpha=alpha)
    return scale_fwd(total, output_scale)


def _copies(shape: torch.Size, x: Tensor) -> float:
    """How many elements of a broadcast shape come from one element of ``x``."""
    return max(product_of(shape), 1) / max(x.numel(), 1)


def _grad_scaled(x: Tensor, scale: float) -> Tensor:
    return scale_bwd(x, scale) if x.is_floating_point() else x


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
    branch, skip = _weights(tau)
    return scale_bwd(input, branch), scale_bwd(input, skip)


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
    branch, kept = _weights(tau)
    return scale_fwd(residual, branch) + scale_fwd(skip, kept)


@overridable
def residual_apply(fn: Callable[[Tensor], Tensor], input: Tensor, tau: float = 1.0) -> Tensor:
    """A residual connection around a function: ``(tau fn(input) + input) / sqrt(1 + tau**2)``.

    Gradients within ``fn``, which returns the shape that it takes, have unit scale.
    """
    residual, skip = residual_split(input, tau)
    return residual_add(fn(residual), skip, tau)


def _weights(tau: float) -> tuple[float, float]:
    total = (1 + tau**2) ** 0.5
    return tau / total, 1 / total
