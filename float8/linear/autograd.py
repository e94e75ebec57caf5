"""The three GEMMs of a linear layer, forward and backward, as one autograd function.

Legend: M tokens, K ``in_features``, N ``out_features``; x_MK input, w_NK weight, g_MN grad_output::

    output_MN      = x_MK @ w_NK.T       forward
    grad_input_MK  = g_MN @ w_KN.T       backward
    grad_weight_NK = g_NM @ x_KM.T       backward

Each GEMM reads its operands with the contraction last, cast as the layer's `BoundPlan` says. Two
GEMMs that read one operand share its data where the plan allows it. If a GEMM runs in high
precision, its casts return the operand unchanged.

For backward, forward saves the input in float8, in the orientation that grad_weight reads: one byte
per element. It saves the weight by reference, because the parameter is in memory anyway. Backward
casts the weight again, with forward's scale where both casts are the same.

With ``smooth_input``, x_MK and w_NK are multiplied by factors of their columns before their casts,
and the gradients likewise after their GEMMs (`float8.linear.smoothing`); forward saves K factors.

With ``offs``, the ends of groups of tokens, the same three GEMMs are grouped, one group per expert:
w_NK is w_ENK, and grad_weight contracts the tokens of each group (`float8.experts`).

Only GEMMs whose result is needed run: with a frozen weight there is no grad_weight GEMM, and no
input is saved. Data and scale are plain tensors, so compile, checkpointing, saved-tensor hooks and
FSDP see ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.config import Float8LinearConfig
from float8.granularity import scale_shape
from float8.linear.bound_plan import BoundGemm, BoundOperand, BoundPlan, plan_for, without_autocast
from float8.linear.float8_weight import Float8Weight
from float8.linear.scaling import (
    DelayedState,
    Pair,
    cast_matrix,
    cast_operand,
    constant,
    multiply_scale,
    transposed_scale,
)
from float8.linear.smoothing import inverse, smoothed, smoothing_factors, split
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


class Call:
    """The parameters of one call of a layer, except its three tensors.

    ``states`` are those of the delayed casts of input, weight and grad_output, None for others;
    ``record`` says whether they record amaxes. ``weight`` is the weight in float8 if it was cast
    before this call, else None. Unit scaling multiplies the three products by ``factors``.
    ``saves`` says whether gradients are enabled, so that a backward may follow.
    """

    # Not a NamedTuple: torch.compile would guard on each of its fields.
    __slots__ = ("factors", "plan", "record", "saves", "states", "weight")

    def __init__(
        self,
        plan: BoundPlan,
        states: States,
        record: bool,
        weight: Float8Weight | None,
        factors: Factors,
        saves: bool,
    ) -> None:
        self.plan, self.states, self.record = plan, states, record
        self.weight, self.factors, self.saves = weight, factors, saves


def as_matrix(x: Tensor) -> Tensor:
    """(..., K) -> (M, K), also where M or K is 0."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


class Float8LinearFunction(torch.autograd.Function):
    """Forward and backward of the layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_NK: Tensor,
        bias_N: Tensor | None,
        call: Call,
        offs: Tensor | None = None,
    ) -> Tensor:
        """(..., K), (N, K), (N,) -> (..., N), in the compute dtype.

        With the ends of groups (E,): (T, K), (E, N, K) -> (T, N).
        """
        plan = call.plan
        needs_x = call.saves and ctx.needs_input_grad[0]
        needs_w = call.saves and ctx.needs_input_grad[1]
        x8_MK, x8_KM, factors_1K = _cast_input(x, call, needs_w, offs)
        w8_NK, saved_w = _cast_weight(w_NK, call, factors_1K)
        # Rounding to the compute dtype first makes autocast, DDP and FSDP cast the same bits.
        bias = None if bias_N is None else bias_N.to(plan.dtype)
        out_MN = product(plan.output, x8_MK, w8_NK, bias, call.factors[0], offs)
        # Delayed scales too: autograd then detects a sync between forward and backward.
        scales = [state.scale for state in call.states if state] if plan.has_delayed else []
        saved_w = saved_w if needs_x else (None, None)
        ctx.save_for_backward(*x8_KM, *saved_w, offs, factors_1K, *scales)
        # The call itself is not kept: FSDP2 may free the memory of its weight after the forward.
        ctx.plan, ctx.states, ctx.record, ctx.factors = plan, call.states, call.record, call.factors
        weight = call.weight
        ctx.is_cast = weight is not None and weight.has_data and not weight.is_cast_again
        ctx.scales_grad = call.weight is not None and call.weight.scales_grad
        ctx.x_shape, ctx.x_dtype, ctx.w_dtype = x.shape, x.dtype, w_NK.dtype
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        if x.dim() != 2 or (LOSES_GRADIENTS and torch.compiler.is_compiling()):
            # As with nn.Linear, the result is not a view of another tensor.
            shape = (*x.shape[:-1], w_NK.shape[-2])
            out_MN = torch.ops.aten._unsafe_view.default(out_MN, shape)
        return out_MN

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """See `gradients`."""
        if torch.is_grad_enabled():
            refuse_double_backward("grouped_mm" if ctx.plan.is_grouped else "Float8Linear")
        with without_autocast(g):
            return (*gradients(ctx, g), None, None)


def gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The backward: grad_input, grad_weight and grad_bias, each None if it is not needed."""
    plan: BoundPlan = ctx.plan
    are_checked = plan.has_delayed and not torch.compiler.is_compiling()
    saved = _checked_tensors(ctx) if are_checked else ctx.saved_tensors
    x_KM, x_scale, w, w_scale, offs, factors_1K = saved[:6]
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    factor_x, factor_w = ctx.factors[1:]
    grad_x = grad_w = grad_bias = None
    g_MN = as_matrix(g)
    g_scaled = g_MN * w_scale if needs_x and ctx.scales_grad else g_MN
    if needs_x or needs_w:
        g8_MN, g8_NM = cast_operand(
            g_scaled, plan.g, ctx.states[2], ctx.record, needs_x, needs_w, (None, None), offs
        )
    if needs_x:
        factor_x = factor_x() if callable(factor_x) else factor_x
        w8_KN = (w, w_scale) if ctx.is_cast else _cast_weight_again(ctx, w, w_scale, factors_1K)
        if ctx.scales_grad:  # g was multiplied by the weight's scales before its cast
            assert plan.grad_input.b is not None
            w8_KN = (w, w_scale.new_ones(scale_shape(w.shape, plan.grad_input.b.block)))
        grad_x = product(plan.grad_input, g8_MN, w8_KN, None, factor_x, offs)
        if factors_1K is not None and plan.w.second is not None:
            grad_x = grad_x * factors_1K.to(grad_x.dtype)
        grad_x = _to(grad_x, ctx.x_dtype).reshape(ctx.x_shape)
    if needs_w:
        grad_w = product(plan.grad_weight, g8_NM, (x_KM, x_scale), None, factor_w, offs)
        if factors_1K is not None and plan.x.second is not None:
            grad_w = grad_w * inverse(factors_1K).to(grad_w.dtype)
        # autograd casts to float16 by itself, unless the weight's grad_dtype has a wider range.
        grad_w = grad_w if ctx.w_dtype is torch.float16 else _to(grad_w, ctx.w_dtype)
    if needs_bias:
        grad_bias = g_MN.sum(0)
        grad_bias = (grad_bias if factor_w is None else grad_bias * factor_w).to(ctx.bias_dtype)
    return grad_x, grad_w, grad_bias


def product(
    gemm: BoundGemm,
    a: Pair,
    b: Pair,
    bias: Tensor | None = None,
    factor: float | None = None,
    offs: Tensor | None = None,
) -> Tensor:
    """``(a @ b.T) * factor``, and the bias times the factor too.

    ``a`` and ``b`` are the results of the casts of ``gemm``; in high precision, the matrix and
    None. The bias is in the compute dtype. ``factor`` is that of unit scaling, or None. ``offs``
    has the ends of groups of tokens, for a grouped product.
    """
    if gemm.a is None or gemm.b is None:
        if offs is None:
            out = F.linear(a[0], b[0], bias)
        else:
            out = kernels.multiply_groups_plainly(a[0], b[0], offs)
        return out if factor is None else out * factor
    a_data, a_scale = a
    if gemm.refusal is not None and 0 not in (*a_data.shape, *b[0].shape):
        raise ValueError(f"{'scaled_mm' if offs is None else 'grouped_mm'}: {gemm.refusal}")
    after = factor if a_scale.dtype != torch.float32 else None
    if factor is not None and after is None:
        a_scale = multiply_scale(a_scale, gemm.a, factor)
        bias = None if bias is None else bias * factor
    if offs is not None:
        blocks = (gemm.a.block, gemm.b.block)
        out = kernels.multiply_groups(
            gemm.name, a_data, a_scale, *b, offs, *blocks, gemm.out_dtype, gemm.align,
            gemm.use_fast_accum, gemm.pad,
        )  # fmt: skip
        return out if after is None else out * after
    out = kernels.multiply(
        gemm.name,
        a_data,
        a_scale,
        *b,
        gemm.a.block,
        gemm.b.block,
        bias,
        gemm.out_dtype,
        gemm.use_fast_accum,
        gemm.pad,
    )
    return out if after is None else out * after  # E8M0 scales hold no factor


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Tensor.to takes a microsecond even if the dtype is the same.
    return x if x.dtype == dtype else x.to(dtype)


_Saved = tuple[Tensor | None, Tensor | None]


def _cast_input(
    x: Tensor, call: Call, needs_w: bool, offs: Tensor | None
) -> tuple[Pair, _Saved, Tensor | None]:
    """x_MK for the output, x_KM for backward if grad_weight is needed, and the smooth factors."""
    plan, factors_1K = call.plan, None
    if isinstance(x, Float8Tensor):
        data, scale, data_t = as_matrix(x.float8_data), as_matrix(x.scale), x.data_t
        if plan.smooth_input:
            scale, factors_1K = split(scale)
        if not needs_w:
            return (data, scale), (None, None), factors_1K
        if offs is not None and plan.x.align > 1:
            data_t = _transposed_groups(data, plan.x, offs)
        saved = (data.t() if data_t is None else data_t, scale.t())
        return (data, scale), saved, factors_1K
    x_MK = _to(as_matrix(x), plan.dtype)
    plain_KM = None  # read by a GEMM in high precision
    if plan.smooth_input:
        factors_1K = smoothing_factors(x_MK)
        plain_KM = x_MK.t() if plan.x.second is None else None
        x_MK = smoothed(x_MK, factors_1K)
    second = needs_w and plain_KM is None
    x8_MK, x8_KM = cast_operand(
        x_MK, plan.x, call.states[0], call.record, True, second, (None, None), offs
    )
    if plain_KM is not None:
        x8_KM = plain_KM, None
    return x8_MK, x8_KM if needs_w else (None, None), factors_1K


def _transposed_groups(data_TK: Tensor, operand: BoundOperand, offs: Tensor) -> Tensor:
    """The transpose of tensorwise float8 data, with the groups padded; see `kernels.groups`."""
    how = operand.first
    assert how is not None
    values, one = data_TK.to(torch.bfloat16), constant(1.0, data_TK)  # exact, so the bits stay
    return kernels.cast_tokens(
        how.kernel, values, offs, how.block, how.dtype, how.scale_format, one, operand.align,
        row_major=False, transposed=True,
    ).data_t  # fmt: skip


def _cast_weight(w_NK: Tensor, call: Call, factors_1K: Tensor | None) -> tuple[Pair, _Saved]:
    """w_NK for the output, and for backward: w_KN, or w_NK in high precision and its scale."""
    weight, state, how = call.weight, call.states[1], call.plan.w.first
    if weight is not None and weight.has_data:
        if call.record and weight.amax is not None and state is not None:
            kernels.record_amax(state.current_amax, weight.amax)
        return weight.row_major, weight.transposed
    scale, scale_t = (None, None) if weight is None else (weight.row_major[1], weight.transposed[1])
    source = _to(w_NK, call.plan.dtype)
    if factors_1K is not None:
        source = smoothed(source, inverse(factors_1K))
    w8 = cast_matrix(source, how, state, call.record, scale)
    return w8, (w_NK, w8[1] if call.plan.w.is_shared else scale_t)


def _cast_weight_again(
    ctx: Any, w_NK: Tensor, w_scale: Tensor | None, factors_1K: Tensor | None
) -> Pair:
    """w_KN, cast in backward; with forward's scale if both casts are the same.

    ``w_scale`` is that scale, or else the scale of the second cast if it is known; or None.
    ``factors_1K`` are those of a smooth input, or None.
    """
    operand = ctx.plan.w
    if w_NK.dtype.itemsize == 1:  # a resident weight whose scales grad_input cannot read
        assert w_scale is not None
        w_NK = kernels.dequantize(w_NK, w_scale, operand.first.block, ctx.plan.dtype)
        w_scale = None
    w_NK = _to(w_NK, ctx.plan.dtype)
    if factors_1K is not None and operand.second is not None:
        w_NK = smoothed(w_NK, inverse(factors_1K))
    # A shared cast was recorded in forward. A delayed second cast that differs from the first is
    # refused by the config, so any other is the only cast of the weight.
    record = ctx.record and not operand.is_shared
    scales = (None, transposed_scale(w_scale) if operand.is_shared else w_scale)
    return cast_operand(w_NK, operand, ctx.states[1], record, False, True, scales, None)[1]


def _checked_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """The saved tensors; raises, with the remedy, if a scale or weight changed after forward."""
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


def call_of(
    config: Float8LinearConfig,
    input: Tensor,
    states: States = STATELESS,
    record: bool = False,
    factors: Factors = NO_FACTORS,
) -> Call:
    """The `Call` for this input, with a weight in high precision; autocast is respected."""
    plan = plan_for(config, input)
    return Call(plan, states, record, None, factors, torch.is_grad_enabled())


def linear_in_float8(input: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """``input @ weight.T + bias`` as the call says; autocast is respected.

    ``input`` is (..., K), ``weight`` (N, K); the result is (..., N) in the compute dtype. A
    `Float8Tensor` as input is not cast again.
    """
    with without_autocast(input):
        return Float8LinearFunction.apply(input, weight, bias, call, None)


def refuse_double_backward(name: str) -> None:
    """Raise in a backward under ``create_graph=True``, the only one that has gradients enabled."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivative, and backward was called with create_graph=True; run "
            "the model under float8.high_precision(model) for it"
        )
