"""float8 linear layers written by hand, without configuration and checks.

`bench_overhead.py` compares the library with them. They compute the same bits in the fewest lines
of plain PyTorch: the same casts (the input once per layout, kept in
one byte per element; the weight by reference, cast again in backward; the gradient), and the same
three products, emulated in bfloat16. They take bfloat16 matrices without bias, and do not
handle infinities, autocast, frozen weights and empty batches.

Shapes: x_MK input, w_NK weight, g_MN grad_output; `value = data * scale`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16
Pair = tuple[Tensor, Tensor]


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    return (amax.float() * (1 / torch.finfo(dtype).max)).clamp(min=2.0**-126)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * scale.reciprocal()).to(dtype)


def to_float8(x: Tensor, dtype: torch.dtype) -> Pair:
    """One scale for the tensor, from its largest magnitude."""
    scale = scale_of(x.abs().max(), dtype)
    return cast(x, scale, dtype), scale


def to_float8_by_row(x: Tensor) -> Pair:
    """One scale per row, rounded up to a power of two."""
    scale = scale_of(x.abs().amax(1, keepdim=True), E4M3)
    scale = scale.log2().ceil().exp2()
    return cast(x, scale, E4M3), scale


def product(a: Tensor, b: Tensor) -> Tensor:
    return a.to(BF16) @ b.to(BF16).t()


class Tensorwise(torch.autograd.Function):
    """Recipe `tensorwise`: dynamic scales, gradients in E5M2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        x8, x_scale = to_float8(x, E4M3)
        w8, w_scale = to_float8(w, E4M3)
        ctx.save_for_backward(x8, x_scale, w, w_scale)
        return product(x8, w8).mul_(x_scale * w_scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, w, w_scale = ctx.saved_tensors
        g8, g_scale = to_float8(g, E5M2)
        g16, w8 = g8.to(BF16), cast(w, w_scale, E4M3)
        return (
            product(g16, w8.t()).mul_(g_scale * w_scale),
            product(g16.t(), x8.t()).mul_(g_scale * x_scale),
        )


class Rowwise(torch.autograd.Function):
    """Recipe `rowwise`: each operand cast along the contraction of each product it enters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(*to_float8_by_row(x.t()), w)
        return Rowwise.scaled_product(to_float8_by_row(x), to_float8_by_row(w))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, w = ctx.saved_tensors
        grad_x = Rowwise.scaled_product(to_float8_by_row(g), to_float8_by_row(w.t()))
        grad_w = Rowwise.scaled_product(to_float8_by_row(g.t()), (x8, x_scale))
        return grad_x, grad_w

    @staticmethod
    def scaled_product(a: Pair, b: Pair) -> Tensor:
        return (product(a[0], b[0]) * a[1] * b[1].t()).to(BF16)


class Delayed(torch.autograd.Function):
    """Recipe `delayed`: scales are given, amaxes are recorded; casts must saturate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scales: Tensor, amaxes: Tensor) -> Tensor:
        x_scale, w_scale, _ = scales.unbind()
        x_amax, w_amax, _ = amaxes.unbind()
        x8 = Delayed.recorded(x, x_scale, x_amax, E4M3)
        w8 = Delayed.recorded(w, w_scale, w_amax, E4M3)
        ctx.save_for_backward(x8, w, scales)
        ctx.amaxes = amaxes
        return product(x8, w8).mul_(x_scale * w_scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x8, w, scales = ctx.saved_tensors
        x_scale, w_scale, g_scale = scales.unbind()
        g16 = Delayed.recorded(g, g_scale, ctx.amaxes[2], E5M2).to(BF16)
        w8 = Delayed.saturated(w, w_scale, E4M3)
        grad_x = product(g16, w8.t()).mul_(g_scale * w_scale)
        return grad_x, product(g16.t(), x8.t()).mul_(g_scale * x_scale), None, None

    @staticmethod
    def recorded(x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
        torch.maximum(amax, x.abs().max().float(), out=amax)
        return Delayed.saturated(x, scale, dtype)

    @staticmethod
    def saturated(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        largest = torch.finfo(dtype).max
        return (x.float() * scale.reciprocal()).clamp_(-largest, largest).to(dtype)


class ByHand(nn.Linear):
    """A layer around one of the functions; `state` are its buffers, for delayed scaling."""

    def __init__(self, linear: nn.Linear, function: Any, state: tuple[Tensor, ...] = ()) -> None:
        super().__init__(linear.in_features, linear.out_features, False, "meta")
        self.weight = linear.weight
        self.function = function
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function.apply(x, self.weight, *self.state)
        return out


FUNCTIONS = {"tensorwise": Tensorwise, "delayed": Delayed, "rowwise": Rowwise}
