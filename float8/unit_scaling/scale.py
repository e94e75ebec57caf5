"""`scale_fwd` and `scale_bwd`: a factor for a value or for its gradient, but not for both.

Backpropagation is linear: a constant factor on the gradient of one tensor multiplies all gradients
that follow from it and changes nothing else. Unit scaling uses that to give each tensor of the
backward pass a scale of its own (unit scaling, arXiv 2303.11257, section 4):

    scale_fwd(x, s) = s * x        d loss / d x = g            g: the incoming gradient
    scale_bwd(x, s) = x            d loss / d x = s * g

The output of ``scale_fwd(f(scale_bwd(x, b)), a)`` is multiplied by ``a`` and its gradient by ``b``;
the two factors do not multiply each other.

A factor may also be a function that returns it, or None for no factor, for factors that are known
only after the forward: backward calls it.

Factors stay Python floats, and the tensor is multiplied by the float: a bfloat16 gradient is
rounded once and its factor never. Factors are computed from sizes; under ``torch.compile`` with
dynamic shapes both are symbolic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["scale_bwd", "scale_fwd"]

Factor = float | Tensor
Later = Callable[[], float | None]  # a factor that backward asks for


def scale_fwd(input: Tensor, scale: Factor) -> Tensor:
    """Multiply a tensor, but not its gradient.

    Args:
        input: any shape, floating point.
        scale: a number; or a 0-d tensor without gradient, for what is known only at run time, such
            as the number of tokens that a loss does not ignore.

    Returns:
        ``scale * input``, of the input's dtype; its gradient reaches the input unchanged.

    Raises:
        TypeError: ``scale`` is another tensor.
    """
    return _Scaled.apply(input, _factor(scale, input), None)


def scale_bwd(input: Tensor, scale: Factor | Later) -> Tensor:
    """Multiply the gradient of a tensor, but not the tensor.

    Args:
        input: any shape, floating point.
        scale: as for `scale_fwd`; or a function that returns a number, or None for no factor, which
            is called in backward.

    Returns:
        ``input`` (a view of it); its gradient reaches the input multiplied by ``scale``.

    Raises:
        TypeError: as for `scale_fwd`.
    """
    return _Scaled.apply(input, None, scale if callable(scale) else _factor(scale, input))


def _factor(scale: Factor, input: Tensor) -> Factor:
    if isinstance(scale, Tensor):
        if scale.dim() or scale.requires_grad:
            raise TypeError("a scale is a number or a 0-d tensor without gradient: .detach() it")
        return scale.to(torch.promote_types(input.dtype, torch.float32))
    return scale


class _Scaled(torch.autograd.Function):
    """``fwd * x`` forward, ``bwd * g`` backward; a factor of None multiplies nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fwd: Factor | None, bwd: Factor | Later | None) -> Tensor:
        ctx.bwd = bwd
        return x.view_as(x) if fwd is None else _multiplied(x, fwd)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        bwd = ctx.bwd() if callable(ctx.bwd) else ctx.bwd
        return (grad if bwd is None else _multiplied(grad, bwd)), None, None


def _multiplied(x: Tensor, factor: Factor) -> Tensor:
    if not isinstance(factor, Tensor):
        return x * factor
    # A factor that is a tensor is float32 or wider: the product is taken in it and rounded once.
    product = x.to(factor.dtype) * factor
    return product if product.dtype == x.dtype else product.to(x.dtype)
