"""The autograd functions of ops that save float8 copies, or one bit per element, for backward.

Both compute their result with torch's own function on the tensors of the caller, so forward values
are torch's, bit for bit. Copies are arguments of an autograd function: `CopyCache` makes them
outside of it, where torch.compile can trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.activations.copies import CopyCache, Restorer

Inputs = tuple[Tensor | None, ...]  # of an op; absent ones are None
Keywords = dict[str, Any]
Arguments = tuple[Inputs, Keywords]
Reader = Callable[..., Arguments | None]  # of a call's arguments; None: it is torch's
Needs = tuple[bool, ...]  # which inputs need a gradient
Grads = tuple[Tensor | None, ...]

MUCH_SMALLER = 16  # an input with 16 times fewer elements than another


@dataclass(frozen=True)
class CopyOp:
    """An op whose gradient is computed from float8 copies of its inputs.

    Args:
        name: in messages and in the arguments of `saved_activations`.
        readers: each torch function that calls the op, and how its arguments are read.
        forward: torch's function, ``forward(*inputs, **options)``.
        gradient: ``gradient(g, saved, needs, **options)`` returns one gradient, or None, per input:
            of any dtype and, where the op broadcasts, of the output's shape.
        saved_by_needs: which inputs need gradients -> the indices of the tensors to save.
        exact: indices of the inputs that are saved as they are: weights.
        recompute: whether backward may recompute the result from the copy of its one input.
    """

    name: str
    readers: dict[Callable[..., Any], Reader]
    forward: Callable[..., Tensor]
    gradient: Callable[..., Grads]
    saved_by_needs: Callable[[Needs], tuple[int, ...]] = lambda needs: (0,)
    exact: tuple[int, ...] = ()
    recompute: bool = False

    def call(self, cache: CopyCache, inputs: Inputs, options: Keywords) -> Tensor | None:
        """The op's result; or None if it would save no memory, for torch to compute."""
        needs = tuple([x is not None and x.requires_grad for x in inputs])
        largest = max([x.numel() for x in inputs if x is not None])
        restorers: list[Restorer | int] = []  # a number: this input is saved as it is
        parts: list[Tensor] = []
        for i in self.saved_by_needs(needs):
            if (x := inputs[i]) is None:
                continue
            # A copy of a small input saves little, and an error in rstd is one of a whole row.
            is_exact = i in self.exact or MUCH_SMALLER * x.numel() <= largest
            if is_exact or not cache.is_worthwhile(x):
                restorers.append(i)
            else:
                restorer, its_parts = cache.save(x)
                restorers.append(restorer)
                parts += its_parts
        if not parts:
            return None
        out: Tensor = _SavedCopies.apply(
            self, options, tuple(restorers), len(inputs), *inputs, *parts
        )
        if self.recompute and restorer.recompute is None:  # of the one input
            again = restorer._replace(recompute=(self.forward, options))
            cache.remember(out, (again, tuple(parts)))
        return out


class _SavedCopies(torch.autograd.Function):
    """``op.forward(*inputs, **options)``; ``tensors`` are the inputs, then data and scales."""

    @staticmethod
    def forward(
        ctx: Any,
        op: CopyOp,
        options: Keywords,
        restorers: tuple[Restorer | int, ...],
        count: int,
        *tensors: Any,
    ) -> Tensor:
        inputs, parts = tensors[:count], list(tensors[count:])
        out = op.forward(*inputs, **options)
        saved: list[Tensor] = []
        for restorer in restorers:
            if isinstance(restorer, int):
                saved.append(inputs[restorer])
            else:
                saved += [parts.pop(0), parts.pop(0)]
        ctx.save_for_backward(*saved)
        ctx.op, ctx.options, ctx.restorers = op, options, restorers
        ctx.inputs = tuple([None if x is None else (x.shape, x.dtype) for x in inputs])
        ctx.parts = len(tensors) - count
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Grads:
        _refuse_double_backward(ctx.op.name)
        saved = list(ctx.saved_tensors)
        restored = [
            saved.pop(0) if isinstance(restorer, int) else restorer.restore(saved)
            for restorer in ctx.restorers
        ]
        needs = ctx.needs_input_grad[4 : 4 + len(ctx.inputs)]
        found = ctx.op.gradient(g, restored, needs, **ctx.options)
        grads = [
            None if grad is None else grad.sum_to_size(of[0]).to(of[1])
            for grad, of in zip(found, ctx.inputs, strict=True)
        ]
        return None, None, None, None, *grads, *(None,) * ctx.parts


@dataclass(frozen=True)
class MaskOp:
    """An op whose gradient needs one bit per element of its input.

    ``forward(x, **options)`` returns what `with_mask` returns. The rest is as in `CopyOp`.
    """

    name: str
    readers: dict[Callable[..., Any], Reader]
    forward: Callable[..., Tensor]

    def call(self, cache: CopyCache, inputs: Inputs, options: Keywords) -> Tensor | None:
        """The op's result, if its input is worth a mask."""
        x = inputs[0]
        return self.forward(x, **options) if x is not None and cache.is_worthwhile(x) else None


def with_mask(
    name: str,
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    mask: Tensor,
    factor: float | None = None,
) -> Tensor:
    """``forward(x)``, whose gradient is ``factor * g`` where the mask is True and 0 elsewhere."""
    return _SavedMask.apply(name, forward, factor, x, _packed(mask))


class _SavedMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, forward: Any, factor: Any, x: Tensor, bits: Tensor) -> Tensor:
        ctx.save_for_backward(bits)
        ctx.op_name, ctx.factor, ctx.shape = name, factor, x.shape
        return forward(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Grads:
        _refuse_double_backward(ctx.op_name)
        mask = _unpacked(ctx.saved_tensors[0], ctx.shape)
        grad = torch.where(mask, g if ctx.factor is None else g * ctx.factor, 0.0)
        return None, None, None, grad.to(g.dtype), None


def _packed(mask: Tensor) -> Tensor:
    """A bool tensor as bytes of eight elements, the first in the lowest bit."""
    bits = F.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (bits << _lanes(mask)).sum(1, dtype=torch.uint8)


def _unpacked(bits: Tensor, shape: torch.Size) -> Tensor:
    mask = (bits.unsqueeze(1) >> _lanes(bits)) & 1
    return mask.flatten()[: shape.numel()].view(shape).to(torch.bool)


def _lanes(x: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=x.device)


def _refuse_double_backward(name: str) -> None:
    if torch.is_grad_enabled():  # in a backward: only with create_graph=True
        raise RuntimeError(
            f"{name} under saved_activations has no second derivative (create_graph=True): run "
            f'this forward outside, or with skip=("{name}",)'
        )
