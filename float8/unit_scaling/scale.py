"""Different factors for a value and for its gradient: all that unit scaling asks of autograd.

Backpropagation is linear: multiply the gradients of one tensor by a constant and every gradient
that follows from them is multiplied too, nothing else changes. Unit scaling uses that freedom to
give each tensor of the backward pass a scale of its own (unit scaling, arXiv 2303.11257,
section 4). Two operations suffice:

    scale_fwd(x, s) = s * x        d loss / d x = g            g: the gradient that arrives
    scale_bwd(x, s) = x            d loss / d x = s * g

Neither is the derivative of the other half: that is their point. An operation ``y = f(x)`` becomes
``scale_fwd(f(scale_bwd(x, b)), a)``: its output is multiplied by ``a``, its gradient by ``b``, and
the two factors never multiply each other.

Factors are Python floats to the last: the tensor is multiplied once, with the float, so that a
bfloat16 gradient is rounded once and its factor never. They are computed from sizes; under
``torch.compile`` with dynamic shapes a size is symbolic, and so is its factor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Scaled(torch.autograd.Function):
    """``fwd * x`` forward, ``bwd * g`` backward; a factor of None multiplies nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, fwd: float | Tensor | None, bwd: float | Tensor | None) -> Tensor:
        return x.view_as(x) if fwd is None else _times(x, fwd)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.bwd = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad if ctx.bwd is None else _times(grad, ctx.bwd)), None, None


def _times(x: Tensor, factor: float | Tensor) -> Tensor:
    # A factor that is a tensor is float32: the product is taken in it and rounded once.
    return (x * factor).to(x.dtype) if isinstance(factor, Tensor) else x * factor


def scale_fwd(input: Tensor, scale: float | Tensor) -> Tensor:
    """Multiplies a tensor, not its gradient.

    Args:
        input: any shape, floating point.
        scale: a number; or a tensor of one element and no gradient, for what is known only at run
            time, such as the number of tokens that a loss does not ignore.

    Returns:
        ``scale * input``, of the input's dtype; its gradient reaches the input unchanged.
    """
    return _Scaled.apply(input, _factor(scale), None)


def scale_bwd(input: Tensor, scale: float | Tensor) -> Tensor:
    """Multiplies the gradient of a tensor, not the tensor.

    Args:
        input: any shape, floating point.
        scale: as for `scale_fwd`.

    Returns:
        ``input`` (a view of it); its gradient reaches the input multiplied by ``scale``.
    """
    return _Scaled.apply(input, None, _factor(scale))


def _factor(scale: float | Tensor) -> float | Tensor:
    if isinstance(scale, Tensor):
        if scale.dim() or scale.requires_grad:
            raise TypeError(
                "a scale is a number or a 0-d tensor without gradient, got a tensor of shape "
                f"{tuple(scale.shape)}, requires_grad={scale.requires_grad}: pass "
                "scale.detach(), or multiply with * if its gradient is wanted"
            )
        return scale.float()
    return scale
