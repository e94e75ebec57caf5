"""The autograd functions of ops that save float8 copies, or one bit per element, for backward.

Both compute their result with torch's own function on the tensors of the caller, so forward values
are torch's, bit for bit. Copies are arguments of an autograd function: `CopyCache` makes them
outside of it, where torch.compile can trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.activations.copies import OUTPUT, CopyCache, Restorer, Saved, cast

# The inputs of an op, absent ones as None, and its options; None: the call is torch's.
Arguments = tuple[tuple[Tensor | None, ...], dict[str, Any]]
Reader = Callable[..., Arguments | None]
Needs = tuple[bool, ...]  # which inputs need a gradient
Grads = tuple[Tensor | None, ...]

MUCH_SMALLER = 16  # an input with 16 times fewer elements than another


@dataclass(frozen=True)
class SavingOp(ABC):
    """Abstract: an op that saves less than torch. Final: `CopyOp`, `MaskOp`.

    ``name`` is used in messages and in the arguments of `saved_activations`. ``readers`` has each
    torch function that calls the op, and how its arguments are read.
    """

    name: str
    readers: dict[Callable[..., Any], Reader]

    @abstractmethod
    def call(self, cache: CopyCache, arguments: Arguments) -> Tensor | None:
        """The op's result; or None if it would save no memory, for torch to compute."""


@dataclass(frozen=True)
class CopyOp(SavingOp):
    """An op whose gradient is computed from float8 copies of its inputs, or of its output.

    Args:
        forward: torch's function, ``forward(*inputs, **options)``.
        gradient: ``gradient(g, saved, needs, **options)`` returns one gradient, or None, per input:
            of any dtype and, where the op broadcasts, of the output's shape.
        saves: the indices of the tensors that backward reads, given the inputs that need gradients.
        inputs: the number of inputs.
        exact: indices of the inputs that are saved as they are: weights.
        recompute: whether backward may recompute the result from the copy of its one input.
    """

    forward: Callable[..., Tensor]
    gradient: Callable[..., Grads]
    saves: Callable[[Needs], tuple[int, ...]] = lambda needs: (0,)
    inputs: int = 1
    exact: tuple[int, ...] = ()
    recompute: bool = False

    def call(self, cache: CopyCache, arguments: Arguments) -> Tensor | None:
        """The op's result, if any tensor that it saves is worth a copy."""
        inputs, options = arguments
        needs = tuple(x is not None and x.requires_grad for x in inputs)
        indices = [i for i in self.saves(needs) if i == OUTPUT or inputs[i] is not None]
        if not any(self._is_worthwhile(cache, inputs, i) for i in indices):
            return None
        saved = [self._save(cache, inputs, i) for i in indices]
        restorers = tuple(restorer for restorer, _ in saved)
        parts = [part for _, parts in saved for part in parts]
        out: Tensor = _SavedCopies.apply(self, options, restorers, *inputs, *parts)
        first, its_parts = saved[0]
        if self.recompute and first.recompute is None:
            restorer = first._replace(recompute=(self.forward, options))
            cache.remember(out, (restorer, its_parts))
        return out

    def _is_worthwhile(self, cache: CopyCache, inputs: tuple[Any, ...], index: int) -> bool:
        if self._is_exact(inputs, index):
            return False
        return cache.is_worthwhile(inputs[0] if index == OUTPUT else inputs[index])

    def _is_exact(self, inputs: tuple[Any, ...], index: int) -> bool:
        """Whether an input is a weight, or much smaller than another input, as rstd in a norm.

        A copy of a small input saves little, and one error in rstd is an error of a whole row.
        """
        largest = max(x.numel() for x in inputs if x is not None)
        is_small = index != OUTPUT and MUCH_SMALLER * inputs[index].numel() <= largest
        return index in self.exact or is_small

    def _save(self, cache: CopyCache, inputs: tuple[Any, ...], index: int) -> Saved:
        if index == OUTPUT:  # which there is a copy of only after forward
            return Restorer(OUTPUT, cache.fmt, tuple(inputs[0].shape), torch.float32), ()
        return cache.save(inputs[index], index, exact=self._is_exact(inputs, index))


class _SavedCopies(torch.autograd.Function):
    """``op.forward(*inputs, **options)``; ``tensors`` are the inputs, then data and scales."""

    @staticmethod
    def forward(
        ctx: Any,
        op: CopyOp,
        options: dict[str, Any],
        restorers: tuple[Restorer, ...],
        *tensors: Any,
    ) -> Tensor:
        inputs, parts = tensors[: op.inputs], list(tensors[op.inputs :])
        out = op.forward(*inputs, **options)
        saved: list[Tensor] = []
        for restorer in restorers:
            if restorer.fmt is None:
                saved.append(out if restorer.position == OUTPUT else inputs[restorer.position])
            elif restorer.position == OUTPUT:
                saved += cast(out, restorer.fmt)
            else:
                saved += [parts.pop(0), parts.pop(0)]
        ctx.save_for_backward(*saved)
        ctx.op, ctx.options, ctx.restorers = op, options, restorers
        ctx.inputs = tuple(None if x is None else (x.shape, x.dtype) for x in inputs)
        ctx.parts = len(tensors) - op.inputs
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward(ctx.op.name)
        saved = list(ctx.saved_tensors)
        restored = [restorer.restore(saved) for restorer in ctx.restorers]
        needs = ctx.needs_input_grad[3 : 3 + ctx.op.inputs]
        grads = [
            None if grad is None else grad.sum_to_size(of[0]).to(of[1])
            for grad, of in zip(
                ctx.op.gradient(g, restored, needs, **ctx.options), ctx.inputs, strict=True
            )
        ]
        return None, None, None, *grads, *(None,) * ctx.parts


@dataclass(frozen=True)
class MaskOp(SavingOp):
    """An op whose gradient needs one bit per element of its input.

    ``forward(x, **options)`` returns what `with_mask` returns.
    """

    forward: Callable[..., Tensor]

    def call(self, cache: CopyCache, arguments: Arguments) -> Tensor | None:
        """The op's result, if its input is worth a mask."""
        (x,), options = arguments
        assert x is not None
        return self.forward(x, **options) if cache.is_worthwhile(x) else None


def with_mask(
    name: str,
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    mask: Tensor,
    factor: float | None = None,
) -> Tensor:
    """``forward(x)``, whose gradient is ``factor * g`` where the mask is True and 0 elsewhere."""
    out: Tensor = _SavedMask.apply(name, forward, factor, x, packed(mask))
    return out


class _SavedMask(torch.autograd.Function):
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
        _refuse_double_backward(ctx.op_name)
        mask = unpacked(ctx.saved_tensors[0], ctx.shape)
        grad = torch.where(mask, g if ctx.factor is None else g * ctx.factor, 0.0)
        return None, None, None, grad.to(g.dtype), None


def packed(mask: Tensor) -> Tensor:
    """A bool tensor as bytes of eight elements, the first in the lowest bit."""
    bits = F.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(
        1, dtype=torch.uint8
    )


def unpacked(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The bool tensor of `packed` bytes."""
    lanes = torch.arange(8, dtype=torch.uint8, device=bits.device)
    mask = (bits.unsqueeze(1) >> lanes) & 1
    return mask.flatten()[: torch.Size(shape).numel()].view(shape).to(torch.bool)


def _refuse_double_backward(name: str) -> None:
    """Raises in a backward with gradients enabled, which only ``create_graph=True`` does."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} under saved_activations has no second derivative, and backward was called "
            f'with create_graph=True: run this forward outside, or with skip=("{name}",)'
        )
