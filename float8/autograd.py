"""The three GEMMs of a linear layer, forward and backward, as one autograd function.

Legend: M tokens, K ``in_features``, N ``out_features``; x_MK input, w_NK weight, g_MN grad_output::

    output_MN      = x_MK @ w_NK.T       forward
    grad_input_MK  = g_MN @ w_KN.T       backward
    grad_weight_NK = g_NM @ x_KM.T       backward

Each GEMM reads its operands with the contraction last, cast as the config's `LinearPlan` says; a
second use shares the first one's bytes where the plan allows it.

What backward needs is saved in float8 and nothing more: the input in the orientation that
grad_weight reads, one byte per element, and the weight by reference: it is a parameter and in
memory anyway. Backward casts it again, with the scale that forward found where it can. Where
grad_weight runs in high precision the input is saved as it came.

Only GEMMs whose result is wanted run: a frozen weight costs no grad_weight GEMM and saves no input.
The function works on plain ``(data, scale)`` pairs, opaque to nothing: compile, checkpointing,
saved-tensor hooks and FSDP see ordinary tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.config import Float8LinearConfig, Gemm, LinearPlan
from float8.scaling import DelayedState, quantize

Pair = tuple[Tensor, Tensor]
States = tuple[DelayedState | None, DelayedState | None, DelayedState | None]
STATELESS: States = (None, None, None)


def _product(
    gemm: Gemm,
    a: Pair,
    b: Pair,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: Float8LinearConfig,
) -> Tensor:
    assert gemm.a is not None
    assert gemm.b is not None
    return kernels.scaled_mm(
        *a,
        *b,
        gemm.a.block,
        gemm.b.block,
        bias,
        out_dtype=dtype,
        use_fast_accum=gemm.use_fast_accum,
        emulate=config.emulate,
        pad=config.pad_inner_dim,
    )


def _transposed(pair: Pair) -> Pair:
    data, scale = pair
    return data.t(), scale.t()


def _as_matrix(x: Tensor) -> Tensor:
    """(..., K) -> (M, K), also where M or K is 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


class _Float8LinearFunction(torch.autograd.Function):
    """Forward and backward of the layer; ``dtype`` is the compute dtype, what the GEMMs return."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_NK: Tensor,
        bias_N: Tensor | None,
        config: Float8LinearConfig,
        dtype: torch.dtype,
        states: States,
        record: bool,
        grad_enabled: bool,
    ) -> Tensor:
        plan = config.plan
        # Rounding to the compute dtype first makes autocast, DDP and FSDP cast the same bits.
        x_MK = _as_matrix(x).to(dtype)
        bias = None if bias_N is None else bias_N.to(dtype)
        x_pair = w_scale = None
        if plan.output.a is not None and plan.output.b is not None:
            x_pair = quantize(x_MK, plan.output.a, states[0], record)
            w_pair = quantize(w_NK.to(dtype), plan.output.b, states[1], record)
            w_scale = w_pair[1] if plan.reuses_weight else None
            out_MN = _product(plan.output, x_pair, w_pair, bias, dtype, config)
        else:
            out_MN = F.linear(x_MK, w_NK.to(dtype), bias)
        needs_x, needs_w = (grad_enabled and needs for needs in ctx.needs_input_grad[:2])
        saved_x = _saved_input(plan, x_MK, x_pair, states[0]) if needs_w else (None, None)
        saved_w = (w_NK, w_scale) if needs_x else (None, None)
        # The delayed scales too: autograd then notices a sync between forward and backward.
        scales = [state.scale for state in states if state is not None]
        ctx.save_for_backward(*saved_x, *saved_w, *scales)
        ctx.config, ctx.dtype, ctx.states, ctx.record = config, dtype, states, record
        ctx.x_shape, ctx.x_dtype, ctx.w_dtype = x.shape, x.dtype, w_NK.dtype
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        return out_MN.reshape(*x.shape[:-1], w_NK.shape[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        with _without_autocast(g.device.type):
            return _Float8LinearFunction._gradients(ctx, g)

    @staticmethod
    def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        plan: LinearPlan = ctx.config.plan
        x_KM, x_scale, w_NK, w_scale = _saved_tensors(ctx)[:4]
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        g_MN = _as_matrix(g)
        grad_x = grad_w = g_pair = None
        if needs_x and plan.grad_input.a is not None and plan.grad_input.b is not None:
            g_pair = quantize(g_MN, plan.grad_input.a, ctx.states[2], ctx.record)
            if needs_w and plan.reuses_grad_output:
                g_pair = (kernels.prepare(g_pair[0], ctx.config.emulate), g_pair[1])
            w_pair = _weight_for_grad_input(plan, w_NK.to(ctx.dtype), w_scale, ctx.states[1])
            grad_x = _product(plan.grad_input, g_pair, w_pair, None, ctx.dtype, ctx.config)
        elif needs_x:
            grad_x = g_MN @ w_NK.to(ctx.dtype)
        if needs_w and plan.grad_weight.a is not None:
            if g_pair is not None and plan.reuses_grad_output:
                g_pair = _transposed(g_pair)
            else:
                g_pair = quantize(g_MN.t(), plan.grad_weight.a, ctx.states[2], ctx.record)
            x_pair = (x_KM, x_scale)
            grad_w = _product(plan.grad_weight, g_pair, x_pair, None, ctx.dtype, ctx.config)
        elif needs_w:
            grad_w = g_MN.t() @ x_KM.t()
        return (
            None if grad_x is None else grad_x.reshape(ctx.x_shape).to(ctx.x_dtype),
            None if grad_w is None else grad_w.to(ctx.w_dtype),
            g_MN.sum(0).to(ctx.bias_dtype) if needs_bias else None,
            *(None,) * 5,
        )


def _saved_input(
    plan: LinearPlan, x_MK: Tensor, x_pair: Pair | None, state: DelayedState | None
) -> tuple[Tensor, Tensor | None]:
    """The x_KM that grad_weight will read: float8 data and scale, or high precision and None."""
    if plan.grad_weight.b is None:
        return x_MK.t(), None
    if x_pair is not None and plan.reuses_input:
        return _transposed(x_pair)
    return quantize(x_MK.t(), plan.grad_weight.b, state)


def _weight_for_grad_input(
    plan: LinearPlan, w_NK: Tensor, w_scale: Tensor | None, state: DelayedState | None
) -> Pair:
    """w_KN in float8: forward's cast again, with its scale, where the two are the same cast."""
    if plan.output.b is not None and w_scale is not None:
        return _transposed(quantize(w_NK, plan.output.b, scale=w_scale))
    assert plan.grad_input.b is not None
    return quantize(w_NK.t(), plan.grad_input.b, state)


def _saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling() or not ctx.config.uses_delayed_scaling:
        return ctx.saved_tensors
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "a scale or a weight was changed between the forward and the backward of a "
            "Float8Linear: call sync_float8_amax_and_scale_history and optimizer.step() after "
            f"backward, once per step ({error})"
        ) from error


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a device type; meta tensors have none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    # Autocast would convert the codes that the reference multiplies in bfloat16.
    if autocasts(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def compute_dtype(input: Tensor) -> torch.dtype:
    """What operands are rounded to before they are cast, and what the GEMMs return."""
    device_type = input.device.type
    return torch.get_autocast_dtype(device_type) if autocasts(device_type) else input.dtype


def linear_in_float8(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: Float8LinearConfig,
    states: States,
    record: bool,
) -> Tensor:
    """``input @ weight.T + bias`` as the config says; autocast is respected.

    Args:
        input: (..., K).
        weight: (N, K).
        bias: (N,) or None.
        config: the casts and GEMMs.
        states: of the delayed casts of input, weight and grad_output, None for others.
        record: whether delayed casts record amaxes.

    Returns:
        (..., N) in the compute dtype.
    """
    dtype, grad_enabled = compute_dtype(input), torch.is_grad_enabled()
    args = (input, weight, bias, config, dtype, states, record, grad_enabled)
    with _without_autocast(input.device.type):
        return _Float8LinearFunction.apply(*args)


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Float8Linear has no second derivative, and backward was called with create_graph=True;"
            " run the model under float8.high_precision(model) for it"
        )
