"""The autograd functions: an op's own forward, and a backward from what was kept in float8.

`_Keeping` serves every op that needs values of its inputs or its output; `_Masked` those that need
one bit per element. Both compute their result by torch's own function on the very tensors that the
caller gave, so forward values are torch's, bit for bit. Codes come in as arguments: they were made
by the `Keeper` before, outside of the function, which torch.compile can trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.activations.groups import encode
from float8.activations.keeper import OUTPUT, Kept, Recipe


class Op(Protocol):
    """What `_Keeping` asks of an op; those of ``ops.py`` answer."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def inputs(self) -> int:
        """How many tensors the forward takes."""

    @property
    def forward(self) -> Callable[..., Tensor]:
        """``forward(*inputs, **options)``."""

    @property
    def gradient(self) -> Callable[..., Any]:
        """``gradient(g, kept, needs, **options)``: one for each input."""


class _Keeping(torch.autograd.Function):
    """``op.forward(*inputs, **options)``; tensors are the op's inputs, and then codes."""

    @staticmethod
    def forward(
        ctx: Any, op: Op, options: dict[str, Any], recipes: tuple[Recipe, ...], *tensors: Any
    ) -> Tensor:
        inputs, parts = tensors[: op.inputs], list(tensors[op.inputs :])
        out = op.forward(*inputs, **options)
        saved: list[Tensor] = []
        for recipe in recipes:
            if recipe.groups is None:
                saved.append(out if recipe.which == OUTPUT else inputs[recipe.which])
            elif recipe.which == OUTPUT:
                saved += encode(out, recipe.groups)
            else:
                saved += [parts.pop(0), parts.pop(0)]
        ctx.save_for_backward(*saved)
        ctx.op, ctx.options, ctx.recipes = op, options, recipes
        ctx.inputs = tuple(None if x is None else (x.shape, x.dtype) for x in inputs)
        ctx.parts = len(tensors) - op.inputs
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(ctx.op.name)
        saved, kept = list(ctx.saved_tensors), []
        for recipe in ctx.recipes:
            count = 1 if recipe.groups is None else 2
            kept.append(recipe.restore([saved.pop(0) for _ in range(count)]))
        needs = ctx.needs_input_grad[3 : 3 + ctx.op.inputs]
        grads = ctx.op.gradient(g, kept, needs, **ctx.options)
        fitted = [
            None if grad is None else grad.sum_to_size(of[0]).to(of[1])
            for grad, of in zip(grads, ctx.inputs, strict=True)
        ]
        return None, None, None, *fitted, *(None,) * ctx.parts


class _Masked(torch.autograd.Function):
    """``forward(x)``, whose gradient is ``factor * g`` where a bit is 1, and 0 elsewhere."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        forward: Callable[[Tensor], Tensor],
        factor: float | None,
        x: Tensor,
        bits: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(bits)
        ctx.op_name, ctx.factor, ctx.shape = name, factor, x.shape
        return forward(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(ctx.op_name)
        mask = unpacked(ctx.saved_tensors[0], ctx.shape)
        grad = torch.where(mask, g if ctx.factor is None else g * ctx.factor, 0.0)
        return None, None, None, grad.to(g.dtype), None


def keeping(op: Op, inputs: tuple[Any, ...], options: dict[str, Any], kept: list[Kept]) -> Tensor:
    """An op's result, of which backward will have what was kept."""
    recipes = tuple(recipe for recipe, _ in kept)
    parts = [part for _, parts in kept for part in parts]
    out: Tensor = _Keeping.apply(op, options, recipes, *inputs, *parts)
    return out


def masked(
    name: str,
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    mask: Tensor,
    factor: float | None = None,
) -> Tensor:
    """``forward(x)``, of which backward will have the mask, a bit per element."""
    out: Tensor = _Masked.apply(name, forward, factor, x, packed(mask))
    return out


def packed(mask: Tensor) -> Tensor:
    """Eight elements of a bool tensor per byte, the first in the lowest bit."""
    bits = F.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(
        1, dtype=torch.uint8
    )


def unpacked(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The bool tensor of this shape again."""
    lanes = torch.arange(8, dtype=torch.uint8, device=bits.device)
    mask = (bits.unsqueeze(1) >> lanes) & 1
    return mask.flatten()[: torch.Size(shape).numel()].view(shape).to(torch.bool)


def refuse_double_backward(name: str) -> None:
    """Called in a backward: it runs with gradients enabled only under ``create_graph=True``."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} under saved_activations has no second derivative, and backward was called "
            f'with create_graph=True: run this forward outside, or with skip=("{name}",)'
        )
