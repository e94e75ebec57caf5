"""Smooth inputs: one factor per channel of the input, its inverse in the weight's columns.

SwiGLU multiplies two projections of one token. Where their weights align, its result has channels
with outliers, late in training and in a few batches only (arXiv 2409.12517, sections 4.1 to 4.3).
One scale per tensor or row then leaves few codes for all other channels. Smooth-SwiGLU (section
4.4) multiplies channel k by s_k before the cast and by 1 / s_k after it. A layer with
``smooth_input=True`` applies 1 / s_k to its weight, so that nothing follows the GEMM::

    output      = Q(x * s) @ Q(w / s).T
    grad_input  = (Q(g) @ Q(w / s)) * s
    grad_weight = (Q(g).T @ Q(x * s)) / s

A GEMM that the config runs in high precision reads x and w as they are, and its result is not
multiplied. With float16, whose range is narrow, the products above are float32.

``s_k = 1 / p``, p the smallest power of two that is not below the amax of channel k in this call:
channels end within (0.5, 1]. Products with powers of two are exact, so without the casts the layer
computes what ``nn.Linear`` does. Nothing is kept between calls: recomputation finds the same s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.kernels import Float8Matrix
from float8.linear.autograd import (
    Call,
    as_arguments,
    as_matrix,
    in_shape_of,
    product,
    products_of_backward,
    refuse_double_backward,
    save,
    saved_by,
    weight_of_forward,
)
from float8.linear.casts import cast_operand, record
from float8.linear.plan import autocasts, without_autocast


def factors_of_channels(x_MK: Tensor) -> Tensor:
    """s (1, K), float32, of a matrix; see `kernels.smoothing_factors_from_amax`."""
    return kernels.smoothing_factors_from_amax(kernels.column_amaxes(x_MK))


def smoothed(x: Tensor, factors_1K: Tensor) -> Tensor:
    """``x * factors`` per column: exact, down to subnormals.

    Of float16 in float32, because the range of float16 is too small for it.
    """
    if x.dtype == torch.float16:
        return x.to(torch.float32) * factors_1K
    return x * factors_1K.to(x.dtype)


def inverse(factors_1K: Tensor) -> Tensor:
    """``1 / factors``, exact."""
    return (0x7F000000 - factors_1K.view(torch.int32)).view(torch.float32)


class SmoothLinearFunction(torch.autograd.Function):
    """`Float8LinearFunction` of ``x * s`` and ``w / s``; its gradients by s and 1 / s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, call: Call) -> Tensor:
        """(..., K), (N, K), (N,) -> (..., N), in the compute dtype; saves K factors."""
        if autocasts(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return SmoothLinearFunction.forward(ctx, x, w_NK, bias_N, call)
        plan, needs_w = call.plan, call.has_backward and ctx.needs_input_grad[1]
        x8_MK, x8_KM, amax, factors_1K = _smooth_input(x, call, needs_w)
        source = smoothed(w_NK.to(plan.dtype), inverse(factors_1K))
        w8_NK, w_saved, _ = weight_of_forward(source, call)
        bias_N = None if bias_N is None else bias_N.to(plan.dtype)
        out_MN = product(plan.output, x8_MK, w8_NK, bias_N, call.factors[0])
        record(call.states[0], amax)
        save(ctx, call, (x, w_NK, bias_N), x8_KM, (w_NK, w_saved[1]), factors_1K)
        return in_shape_of(x, out_MN)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """grad_input, grad_weight and grad_bias, each None if it is not needed."""
        refuse_double_backward("Float8Linear")
        with without_autocast(g):
            return (*SmoothLinearFunction.gradients(ctx, g), None)

    @staticmethod
    def gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of ``backward``, which tensor parallelism calls with a g in float8."""
        plan = ctx.call.plan
        x, x_scale, w, w_scale, factors_1K, *_ = saved_by(ctx)
        x8_KM: Any = x if x_scale is None else Float8Matrix(x, x_scale, plan.x.second.block)
        w = None if w is None else w.to(plan.dtype)
        if w is not None and plan.w.second is not None:
            w = smoothed(w, inverse(factors_1K))
        grad_x, grad_w, grad_bias = products_of_backward(ctx, g, x8_KM, (w, w_scale))
        if grad_x is not None and plan.w.second is not None:
            grad_x = grad_x * factors_1K.to(grad_x.dtype)
        if grad_w is not None and plan.x.second is not None:
            grad_w = grad_w * inverse(factors_1K).to(grad_w.dtype)
        return as_arguments(ctx, grad_x, grad_w, grad_bias)


def _smooth_input(x: Tensor, call: Call, needs_w: bool) -> tuple[Any, Any, Tensor | None, Tensor]:
    """``x * s`` for the output and, transposed if needed, for grad_weight; an amax; and s."""
    operand, state = call.plan.x, call.states[0]
    x_MK = as_matrix(x).to(call.plan.dtype)
    factors_1K = factors_of_channels(x_MK)
    second = needs_w and operand.second is not None
    x8_MK, x8_KM, amax = cast_operand(
        smoothed(x_MK, factors_1K), operand, state, call.records_amax, second=second
    )
    plain = x_MK.t() if needs_w else None  # for a product in high precision
    return x8_MK, x8_KM if second else plain, amax, factors_1K
