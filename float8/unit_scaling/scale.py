"""Different factors for a value and for its gradient: all that unit scaling asks of autograd.

Backpropagation is linear: multiply the gradients of one tensor by a constant and every gradient
that follows from them is multiplied too, nothing else changes. Unit scaling uses that freedom to
give each tensor of the backward pass a scale of its own (unit scaling, arXiv 2303.11257,
section 4). Two operations suffice:

    scale_fwd(x, s) = s * x        d loss / d x = g            g: the gradient that arrives
    scale_bwd(x, s) = x            d loss / d x = s * g

Neither is the derivative of the other half: that is their point. An operation ``y = f(x)`` becomes
``scale_fwd(f(scale_bwd(x, b)), a)``, which `scale_elementwise` writes: its output is multiplied by
``a``, its gradient by ``b``, and the two factors never multiply each other.

A factor may also be a function that returns it, or None for no factor: backward calls it. That is
for factors that are only known when the forward is over.

Factors are Python floats to the last: the tensor is multiplied once, with the float, so that a
bfloat16 gradient is rounded once and its factor never. They are computed from sizes; under
``torch.compile`` with dynamic shapes a size is symbolic, and so is its factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from float8.unit_scaling.constraints import Constraint, apply_constraint

T = TypeVar("T")
Later = Callable[[], float | None]  # a factor that is asked for in backward


def known(factor: T | Callable[[], T]) -> T:
    """A factor, now that backward runs."""
    return factor() if callable(factor) else factor


class _Scaled(torch.autograd.Function):
    """``fwd * x`` forward, ``bwd * g`` backward; a factor of None multiplies nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, fwd: float | Tensor | None, bwd: float | Tensor | Later | None
    ) -> Tensor:
        return x.view_as(x) if fwd is None else _times(x, fwd)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.bwd = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        bwd = known(ctx.bwd)
        return (grad if bwd is None else _times(grad, bwd)), None, None


class _Eager(torch.autograd.Function):
    """`_Scaled` without functorch: torch inspects the signature of a forward without ``ctx`` in
    every call, which takes longer than the rest."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fwd: float | Tensor | None, bwd: float | Tensor | Later | None
    ) -> Tensor:
        ctx.bwd = bwd
        return _Scaled.forward(x, fwd, bwd)

    backward = _Scaled.backward


def _scaled(x: Tensor, fwd: float | Tensor | None, bwd: float | Tensor | Later | None) -> Tensor:
    is_eager = not torch.compiler.is_compiling()
    if is_eager and torch._C._functorch.peek_interpreter_stack() is None:
        return _Eager.apply(x, fwd, bwd)
    return _Scaled.apply(x, fwd, bwd)


def _times(x: Tensor, factor: float | Tensor) -> Tensor:
    if not isinstance(factor, Tensor):
        return x * factor
    # A factor that is a tensor is float32 or wider: the product is taken in it and rounded once.
    product = x.to(factor.dtype) * factor
    return product if product.dtype == x.dtype else product.to(x.dtype)


def scale_fwd(input: Tensor, scale: float | Tensor) -> Tensor:
    """Multiplies a tensor, not its gradient.

    Args:
        input: any shape, floating point.
        scale: a number; or a 0-d tensor without gradient, for what is known only at run time, such
            as the number of tokens that a loss does not ignore.

    Returns:
        ``scale * input``, of the input's dtype; its gradient reaches the input unchanged.

    Raises:
        TypeError: ``scale`` is another tensor.
    """
    return _scaled(input, _factor(scale, input), None)


def scale_bwd(input: Tensor, scale: float | Tensor | Later) -> Tensor:
    """Multiplies the gradient of a tensor, not the tensor.

    Args:
        input: any shape, floating point.
        scale: as for `scale_fwd`; or a function that returns a number, or None for no factor, which
            is called in backward.

    Returns:
        ``input`` (a view of it); its gradient reaches the input multiplied by ``scale``.

    Raises:
        TypeError: as for `scale_fwd`.
    """
    return _scaled(input, None, scale if callable(scale) else _factor(scale, input))


def scale_elementwise(
    f: Callable[..., Tensor],
    output_scale: float,
    grad_input_scale: float,
    constraint: Constraint = "to_output_scale",
) -> Callable[..., Tensor]:
    """A function of one tensor, with a factor for its result and one for its gradient.

    Args:
        f: a function of a tensor and of further arguments that get no gradient.
        output_scale: a, one over the scale of ``f(x)`` for x of unit scale.
        grad_input_scale: b, one over that of ``f'(x) g`` for x and g of unit scale.
        constraint: ties the two; see `float8.unit_scaling.constraints`.

    Returns:
        ``scale_fwd(f(scale_bwd(x, b), ...), a)``, as a function of x and the further arguments.

    Raises:
        ValueError, TypeError: see `float8.unit_scaling.constraints.apply_constraint`.
    """
    output, grad_input = apply_constraint(constraint, output_scale, grad_input_scale)

    def scaled(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return scale_fwd(f(scale_bwd(input, grad_input), *args, **kwargs), output)

    return scaled


def _factor(scale: float | Tensor, input: Tensor) -> float | Tensor:
    if isinstance(scale, Tensor):
        if scale.dim() or scale.requires_grad:
            raise TypeError(
                "a scale is a number or a 0-d tensor without gradient, got a tensor of shape "
                f"{tuple(scale.shape)}, requires_grad={scale.requires_grad}: pass "
                "scale.detach(), or multiply with * if its gradient is wanted"
            )
        return scale.to(torch.promote_types(input.dtype, torch.float32))
    return scale
