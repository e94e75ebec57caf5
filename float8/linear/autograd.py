"""The three GEMMs of a linear layer, forward and backward, as one autograd function.

Legend: M tokens, K ``in_features``, N ``out_features``; x_MK input, w_NK weight, g_MN grad_output::

    output_MN      = x_MK @ w_NK.T       forward
    grad_input_MK  = g_MN @ w_KN.T       backward
    grad_weight_NK = g_NM @ x_KM.T       backward

Each GEMM reads its operands with the contraction last, cast as the layer's `LinearPlan` says. Two
GEMMs that read one operand share its data where the plan allows it. If a GEMM runs in high
precision, its casts return the operand unchanged, and an operand that is in float8 all the same,
as with ``dequantize_in_backward``, is dequantised.

For backward, forward saves the input in float8, in the orientation that grad_weight reads: one byte
per element. It saves the weight by reference, because the parameter is in memory anyway. Backward
casts the weight again, with forward's scale where both casts are the same. A weight that is in
float8 before the call is not cast: `float8.linear.float8_weight`. Inputs and weights that are
multiplied by factors before their casts: `float8.linear.smoothing`. The grouped GEMMs of experts:
`float8.experts.grouped_mm`.

Only GEMMs whose result is needed run: with a frozen weight there is no grad_weight GEMM, and no
input is saved. Data and scale are plain tensors, so compile, checkpointing, saved-tensor hooks and
FSDP see ordinary tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.kernels import Float8Matrix
from float8.kernels.products import needs_power_of_two_scales
from float8.linear.casts import DelayedState, cast_matrix, cast_operand, record
from float8.linear.float8_weight import Float8Weight, Reads, Saved, cast_again
from float8.linear.plan import Gemm, LinearPlan, rounded
from float8.tensor import Float8Tensor

# The factors of output, grad_input and grad_weight. They are independent, so the gradients need not
# be those of one function. A bias has the factor of the output, its gradient that of grad_weight.
# The factor of grad_input may be a function, which backward calls.
Factors = tuple[float | None, float | Callable[[], float] | None, float | None]
NO_FACTORS: Factors = (None, None, None)
States = tuple[DelayedState | None, DelayedState | None, DelayedState | None]
STATELESS: States = (None, None, None)
# Dynamo of torch 2.11 (2.12 is untested) returns zero gradients for a forward whose last op returns
# its own input, such as an op in place, or `to` without a change of dtype. A view avoids that.
LOSES_GRADIENTS = torch.__version__ < torch.torch_version.TorchVersion("2.13")


@dataclass(eq=False, slots=True)  # torch.compile would guard on each field of a NamedTuple
class Call:
    """The parameters of one call of a layer, except its three tensors.

    Args:
        plan: see `plan_for`.
        states: those of the delayed casts of input, weight and grad_output, None for others.
        records_amax: whether delayed casts record amaxes.
        weight: the weight in float8 if it was cast before this call, else None.
        factors: what unit scaling multiplies the three products by.
        has_backward: whether gradients are enabled, so that a backward may follow.
        read_weight: how backward reads the weight, see `float8.linear.float8_weight`.
    """

    plan: LinearPlan
    states: States = STATELESS
    records_amax: bool = False
    weight: Float8Weight | None = None
    factors: Factors = NO_FACTORS
    has_backward: bool = False
    read_weight: Reads = cast_again

    def for_backward(self) -> Call:
        """The call without its weight: FSDP2 may free the memory after the forward."""
        if self.weight is None:
            return self
        return replace(self, weight=None, read_weight=self.weight.read)


class Float8LinearFunction(torch.autograd.Function):
    """Forward and backward of the layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_NK: Tensor,
        bias_N: Tensor | None,
        call: Call,
    ) -> Tensor:
        """(..., K), (N, K), (N,) -> (..., N), in the compute dtype."""
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            # It would convert the data that plain PyTorch multiplies.
            with torch.autocast(kind, enabled=False):
                return Float8LinearFunction.forward(ctx, x, w_NK, bias_N, call)
        plan, states = call.plan, call.states
        needs_w = call.has_backward and ctx.needs_input_grad[1]
        if isinstance(x, Float8Tensor):
            x8_MK, x8_KM, x_amax = read_float8_input(x, call, needs_w)
        else:
            x_MK = x if x.dim() == 2 else as_matrix(x)
            x_MK = x_MK if x_MK.dtype == plan.dtype else x_MK.to(plan.dtype)
            x8_MK, x8_KM, x_amax = cast_operand(
                x_MK, plan.x, states[0], call.records_amax, second=needs_w
            )
        w8_NK, w_saved, w_amax = weight_of_forward(w_NK, call)
        if bias_N is not None and bias_N.dtype != plan.dtype:
            bias_N = bias_N.to(plan.dtype)  # autocast, DDP and FSDP then add the same bits
        out_MN = product(plan.output, x8_MK, w8_NK, bias_N, call.factors[0])
        if x_amax is not None:
            record(states[0], x_amax)
        if w_amax is not None:
            record(states[1], w_amax)
        save(ctx, call, (x, w_NK, bias_N), x8_KM, w_saved)
        return in_shape_of(x, out_MN) if x.dim() != 2 or LOSES_GRADIENTS else out_MN

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """grad_input, grad_weight and grad_bias, each None if it is not needed."""
        if torch.is_grad_enabled():
            refuse_double_backward("Float8Linear")
        kind = g.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return (*Float8LinearFunction.gradients(ctx, g), None)
        return (*Float8LinearFunction.gradients(ctx, g), None)

    @staticmethod
    def gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of ``backward``, which tensor parallelism calls with a g in float8."""
        x, x_scale, *w_saved = saved_by(ctx)[:4]
        x8_KM = x if x_scale is None else Float8Matrix(x, x_scale, ctx.call.plan.x.second.block)
        return as_arguments(ctx, *products_of_backward(ctx, g, x8_KM, w_saved))


def products_of_backward(
    ctx: Any, g: Tensor, x8_KM: Any, w_saved: Sequence[Any]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """grad_input (M, K), grad_weight (N, K) and grad_bias (N,), each None if it is not needed."""
    call, plan, state = ctx.call, ctx.call.plan, ctx.call.states[2]
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    grad_x = grad_w = grad_bias = w8_KN = amax = None
    g_MN = g_scaled = g if g.dim() == 2 else as_matrix(g)
    if needs_x:
        # A weight that is stored with scales of rows has them along the contraction.
        w8_KN, scale_1N = call.read_weight(w_saved, call)
        g_scaled = g_MN if scale_1N is None else g_MN * scale_1N
    if needs_x or needs_w:
        g8_MN, g8_NM, amax = cast_operand(
            g_scaled, plan.g, state, call.records_amax, first=needs_x, second=needs_w
        )
    if needs_x:
        factor = call.factors[1]
        factor = factor() if callable(factor) else factor
        grad_x = product(plan.grad_input, g8_MN, w8_KN, None, factor)
    if needs_w:
        grad_w = product(plan.grad_weight, g8_NM, x8_KM, None, call.factors[2])
    if needs_bias:
        grad_bias = times(g_MN.sum(0), call.factors[2])
    if amax is not None:
        record(state, amax)
    return grad_x, grad_w, grad_bias


def product(
    gemm: Gemm, a: Any, b: Any, bias: Tensor | None = None, factor: float | None = None
) -> Tensor:
    """``(a @ b.T) * factor``, and the bias times the factor too.

    ``a`` and ``b`` are `Float8Matrix`, or matrices in high precision, beside which the other one is
    dequantised. The bias is in the compute dtype. ``factor`` is that of unit scaling, or None.
    """
    if gemm.a is None or gemm.b is None:
        dtype = a.dtype if isinstance(a, Tensor) else b.dtype
        return times(F.linear(dequantized(a, dtype), dequantized(b, dtype), bias), factor)
    is_float32 = a.scale.dtype == torch.float32  # E8M0 scales hold no factor
    if factor is not None and is_float32 and not needs_power_of_two_scales(gemm.name):
        a, bias, factor = a._replace(scale=a.scale * factor), times(bias, factor), None
    out = kernels.multiply(a, b, gemm, bias)
    return out if factor is None else out * factor


# --- operands


def read_float8_input(x: Float8Tensor, call: Call, needs_w: bool) -> tuple[Any, Any, None]:
    """x_MK and, if grad_weight needs it, x_KM of an input that is in float8 already; no amax."""
    data, scale, operand = as_matrix(x.float8_data), as_matrix(x.scale), call.plan.x
    x8_MK = Float8Matrix(data, scale, operand.first.block)  # type: ignore[union-attr]
    if not needs_w:
        return x8_MK, None, None
    assert operand.second is not None
    data_t = data.t() if x.data_t is None else x.data_t
    return x8_MK, Float8Matrix(data_t, scale.t(), operand.second.block), None


def weight_of_forward(w_NK: Tensor, call: Call) -> tuple[Any, Saved, Tensor | None]:
    """w_NK for the output, what backward is to have of the weight, and the amax of a delayed cast.

    The weight is rounded to the compute dtype and cast, unless the call has it in float8 already.
    """
    plan, weight = call.plan, call.weight
    if weight is not None:
        amax = weight.amax if call.records_amax else None
        return weight.row_major, weight.transposed[:2], amax
    source = rounded(w_NK, plan)
    if plan.w.first is None:
        return source, (w_NK, None), None
    w8_NK: Any
    w8_NK, _, amax = cast_matrix(source, plan.w.first, call.states[1], finds_amax=call.records_amax)
    return w8_NK, (w_NK, w8_NK.scale if plan.w.shares_data else None), amax


def dequantized(x: Any, dtype: torch.dtype) -> Tensor:
    """A `Float8Matrix` in high precision, ``dtype``; a matrix in high precision as it is."""
    return x if isinstance(x, Tensor) else kernels.dequantize(x.data, x.scale, x.block, dtype)


def as_matrix(x: Tensor) -> Tensor:
    """(..., K) -> (M, K), also where M or K is 0."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def in_shape_of(x: Tensor, out_MN: Tensor) -> Tensor:
    """(M, N) -> (..., N), for x of shape (..., K); no view of another tensor, as of nn.Linear."""
    return torch.ops.aten._unsafe_view.default(out_MN, (*x.shape[:-1], out_MN.shape[-1]))


def times(x: Any, factor: float | None) -> Any:
    """``x * factor``; None stands for no tensor, and for no factor."""
    return x if x is None or factor is None else x * factor


# --- what backward has of forward


def save(
    ctx: Any,
    call: Call,
    arguments: tuple[Tensor, Tensor, Tensor | None],
    x_saved: Any,
    w_saved: Saved,
    *others: Tensor | None,
) -> None:
    """Save operands for `saved_by`, and the dtypes of the arguments for `as_arguments`."""
    # Delayed scales too: autograd then detects a sync between forward and backward.
    scales = [state.scale for state in call.states if state] if call.plan.has_delayed else []
    x8 = x_saved[:2] if isinstance(x_saved, Float8Matrix) else (x_saved, None)
    w8 = w_saved if call.has_backward and ctx.needs_input_grad[0] else (None, None)
    ctx.save_for_backward(*x8, *w8, *others, *scales)
    ctx.call = call if call.weight is None else call.for_backward()
    # Under hooks of saved tensors, as of checkpointing, torch does not compare versions.
    ctx.versions = [] if torch.compiler.is_compiling() else list(map(_VERSION, scales))
    x, w, bias = arguments
    ctx.x_shape, ctx.dtypes = x.shape, (x.dtype, w.dtype, None if bias is None else bias.dtype)


def saved_by(ctx: Any) -> tuple[Any, ...]:
    """x_KM, its scale, w, its scale, and the others of `save`; then delayed scales.

    Raises RuntimeError, with the remedy, if a scale or weight changed after forward.
    """
    if ctx.versions:
        scales = [state.scale for state in ctx.call.states if state]
        if ctx.versions != list(map(_VERSION, scales)):
            raise RuntimeError(f"{_CHANGED} (a delayed scale)")
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(f"{_CHANGED} ({error})") from error


_VERSION = operator.attrgetter("_version")
_CHANGED = (
    "a scale, a weight or an input was changed between the forward and the backward of a "
    "Float8Linear: call sync_float8_amax_and_scale_history and optimizer.step() after backward, "
    "once per step"
)


def as_arguments(
    ctx: Any, grad_x: Tensor | None, grad_w: Tensor | None, grad_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients in the shapes and dtypes of the arguments of forward."""
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    if grad_x is not None:
        grad_x = grad_x if grad_x.dtype == x_dtype else grad_x.to(x_dtype)
        grad_x = grad_x if len(ctx.x_shape) == 2 else grad_x.reshape(ctx.x_shape)
    # autograd casts to float16 by itself, unless the weight's grad_dtype is another one or None.
    if grad_w is not None and grad_w.dtype != w_dtype and w_dtype is not torch.float16:
        grad_w = grad_w.to(w_dtype)
    if grad_bias is not None and grad_bias.dtype != bias_dtype:
        grad_bias = grad_bias.to(bias_dtype)
    return grad_x, grad_w, grad_bias


def refuse_double_backward(name: str) -> None:
    """Raise in a backward under ``create_graph=True``, the only one that has gradients enabled."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivative, and backward was called with create_graph=True; run "
            "the model under float8.high_precision(model) for it"
        )
