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

Each product may be multiplied by a constant of its own (`Factors`), as unit scaling asks for: the
constants join the scales that the GEMM multiplies by anyway.

Only GEMMs whose result is wanted run: a frozen weight costs no grad_weight GEMM and saves no input.
The function works on plain ``(data, scale)`` pairs, opaque to nothing: compile, checkpointing,
saved-tensor hooks and FSDP see ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.config import Float8LinearConfig, Gemm, LinearPlan
from float8.granularity import scale_shape
from float8.linear.scaling import (
    DelayedState,
    Pair,
    multiply_scale,
    quantize,
    quantize_again,
    quantize_both,
    transposed,
)
from float8.tensor import Float8Tensor

# What output, grad_input and grad_weight are multiplied by, each by its own: they need not be the
# gradients of one function. A bias is multiplied as the output is, its gradient as grad_weight.
Factors = tuple[float, float | Callable[[], float], float]
States = tuple[DelayedState | None, DelayedState | None, DelayedState | None]
STATELESS: States = (None, None, None)
# Dynamo of 2.11 (nobody has looked at 2.12) returns zeros for the gradients of a forward whose last
# op returned its own input: one in place, or `to` the dtype that it has. A view is a tensor anew.
LOSES_GRADIENTS = torch.__version__ < torch.torch_version.TorchVersion("2.13")


class WeightCodes(NamedTuple):
    """A weight in float8 that was cast before the call, for both GEMMs that read it."""

    rows: Pair  # w_NK, for the output
    cols: Pair  # w_KN, for grad_input
    dtype: torch.dtype  # what the weight was rounded to before its cast
    amax: Tensor | None  # of a delayed cast: recorded by each forward that reads the codes
    # The scales of `cols` run along the dimension that grad_input contracts: they multiply g first.
    folds: bool = False


def codes_of(weight: Float8Tensor) -> WeightCodes:
    """A weight that is in float8 already, tensorwise, as both GEMMs read it; nothing is copied."""
    # By attribute: torch.compile does not trace a subclass's properties.
    rows = (weight._data, weight._scale)
    return WeightCodes(rows, transposed(rows), weight.dtype, None)


@dataclass(frozen=True)
class CachedWeight:
    """Codes, and the weight that they are of."""

    codes: WeightCodes
    source: Tensor
    version: int  # of the source when it was cast

    def is_of(self, weight: Tensor) -> bool:
        """Whether these are the codes of this weight as it is, as far as one can tell."""
        return weight is self.source and version_of(weight) == self.version


def version_of(x: Tensor) -> int:
    """How often x was written to, where that is counted: not by ``.data``, nor in inference."""
    return 0 if x.is_inference() else x._version


def _product(
    gemm: Gemm,
    a: Pair,
    b: Pair,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: Float8LinearConfig,
    factor: float | None,
) -> Tensor:
    assert gemm.a is not None
    assert gemm.b is not None
    return kernels.scaled_mm(
        a[0],
        a[1] if factor is None else multiply_scale(a[1], gemm.a, factor),
        *b,
        gemm.a.block,
        gemm.b.block,
        bias,
        out_dtype=dtype,
        use_fast_accum=gemm.use_fast_accum,
        emulate=config.emulate,
        pad=config.pad_inner_dim,
    )


def _times(x: Tensor, factor: float | None) -> Tensor:
    return x if factor is None else x * factor


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Tensor.to costs a microsecond where there is nothing to do.
    return x if x.dtype == dtype else x.to(dtype)


def as_matrix(x: Tensor) -> Tensor:
    """(..., K) -> (M, K), also where M or K is 0."""
    if x.dim() == 2:
        return x
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
        cached: WeightCodes | None = None,
        factors: Factors | None = None,
    ) -> Tensor:
        plan, factor = config.plan, factors and factors[0]
        needs_x, needs_w = (grad_enabled and needs for needs in ctx.needs_input_grad[:2])
        # Rounding to the compute dtype first makes autocast, DDP and FSDP cast the same bits.
        bias = None if bias_N is None else bias_N.to(dtype)
        x_pair, saved_x = _cast_input(x, dtype, config, states[0], record, needs_w)
        saved_w: tuple[Tensor, Tensor | None] = (w_NK, None) if cached is None else cached.cols
        if x_pair is not None and plan.output.b is not None:
            if cached is not None:
                w_pair = cached.rows
                if record and cached.amax is not None and states[1] is not None:
                    kernels.record_amax(states[1].current_amax, cached.amax)
            else:
                w_pair = quantize(
                    _to(w_NK, dtype), plan.output.b, states[1], record, emulate=config.emulate
                )
                saved_w = (w_NK, w_pair[1] if plan.reuses_weight else None)
            bias = None if bias is None else _times(bias, factor)
            out_MN = _product(plan.output, x_pair, w_pair, bias, dtype, config, factor)
        else:
            out_MN = _times(F.linear(as_matrix(x).to(dtype), w_NK.to(dtype), bias), factor)
        # The delayed scales too: autograd then notices a sync between forward and backward.
        scales = [state.scale for state in states if state is not None]
        ctx.save_for_backward(*saved_x, *(saved_w if needs_x else (None, None)), *scales)
        ctx.config, ctx.dtype, ctx.states, ctx.record = config, dtype, states, record
        ctx.x_shape, ctx.x_dtype, ctx.w_dtype = x.shape, x.dtype, w_NK.dtype
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        ctx.is_weight_cached, ctx.factors = cached is not None, factors or (None, None, None)
        ctx.folds = cached is not None and cached.folds
        if x.dim() != 2 or (LOSES_GRADIENTS and torch.compiler.is_compiling()):
            # As nn.Linear: the result is no view of another tensor.
            shape = (*x.shape[:-1], w_NK.shape[0])
            out_MN = torch.ops.aten._unsafe_view.default(out_MN, shape)
        return out_MN

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("Float8Linear")
        with _without_autocast(g.device.type):
            return _Float8LinearFunction._gradients(ctx, g)

    @staticmethod
    def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        plan: LinearPlan = ctx.config.plan
        emulate: bool = ctx.config.emulate
        x_KM, x_scale, w, w_scale = _saved_tensors(ctx)[:4]
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        _, factor_x, factor_w = ctx.factors
        factor_x = factor_x() if callable(factor_x) else factor_x
        g_MN = as_matrix(g)
        g_pair, g_col = quantize_both(
            g_MN * w_scale if ctx.folds else g_MN,
            plan.grad_input.a if needs_x else None,
            plan.grad_weight.a if needs_w else None,
            plan.reuses_grad_output,
            ctx.states[2],
            ctx.record,
            emulate,
            used_at_once=True,
        )
        grad_x = grad_w = None
        if needs_x and g_pair is not None:
            is_cached = ctx.is_weight_cached
            w_pair = (w, w_scale) if is_cached else _cast_saved_weight(ctx, w, w_scale)
            if ctx.folds:  # the scales are in g's codes already
                assert plan.grad_input.b is not None
                w_pair = (w, w_scale.new_ones(scale_shape(w.shape, plan.grad_input.b.block)))
            grad_x = _product(
                plan.grad_input, g_pair, w_pair, None, ctx.dtype, ctx.config, factor_x
            )
        elif needs_x:
            grad_x = _times(g_MN @ w.to(ctx.dtype), factor_x)
        if needs_w and g_col is not None:
            x_pair = (x_KM, x_scale)
            grad_w = _product(
                plan.grad_weight, g_col, x_pair, None, ctx.dtype, ctx.config, factor_w
            )
        elif needs_w:
            grad_w = _times(g_MN.t() @ x_KM.t(), factor_w)
        return (
            None if grad_x is None else _to(grad_x, ctx.x_dtype).reshape(ctx.x_shape),
            None if grad_w is None else _as_gradient(grad_w, ctx.w_dtype),
            _times(g_MN.sum(0), factor_w).to(ctx.bias_dtype) if needs_bias else None,
            *(None,) * 7,
        )


def _as_gradient(grad_w: Tensor, w_dtype: torch.dtype) -> Tensor:
    # autograd casts to float16 itself, unless the weight's grad_dtype asks for a wider range.
    is_narrow = w_dtype is torch.float16
    return grad_w if is_narrow else _to(grad_w, w_dtype)


def _cast_input(
    x: Tensor,
    dtype: torch.dtype,
    config: Float8LinearConfig,
    state: DelayedState | None,
    record: bool,
    needs_w: bool,
) -> tuple[Pair | None, tuple[Tensor | None, Tensor | None]]:
    """The pair that the output GEMM reads, and the x_KM that grad_weight will read.

    Either is None where its GEMM is not wanted; an x_KM in high precision has no scale.
    """
    plan = config.plan
    if isinstance(x, Float8Tensor):
        return _input_in_float8(x, needs_w)
    x_MK = _to(as_matrix(x), dtype)
    by_col = plan.grad_weight.b if needs_w else None
    pair, col = quantize_both(
        x_MK, plan.output.a, by_col, plan.reuses_input, state, record, config.emulate
    )
    if needs_w and col is None:
        return pair, (x_MK.t(), None)
    return pair, col or (None, None)


def _input_in_float8(
    x: Float8Tensor, needs_w: bool
) -> tuple[Pair, tuple[Tensor | None, Tensor | None]]:
    # By attribute: torch.compile does not trace a subclass's properties.
    data, scale = as_matrix(x._data), as_matrix(x._scale)
    if not needs_w:
        return (data, scale), (None, None)
    return (data, scale), (data.t() if x._data_t is None else x._data_t, scale.t())


def _cast_saved_weight(ctx: Any, w_NK: Tensor, w_scale: Tensor | None) -> Pair:
    """w_KN in float8: forward's cast again, with its scale, where the two are the same cast."""
    plan: LinearPlan = ctx.config.plan
    w_NK, emulate = _to(w_NK, ctx.dtype), ctx.config.emulate
    if plan.output.b is not None and w_scale is not None:
        return quantize_again(w_NK, plan.output.b, w_scale, emulate)
    assert plan.grad_input.b is not None
    # A second use that is delayed comes here only where it is the only one: nothing recorded yet.
    return quantize(w_NK.t(), plan.grad_input.b, ctx.states[1], ctx.record, emulate=emulate)


def cast_weight(
    weight: Tensor, dtype: torch.dtype, config: Float8LinearConfig, state: DelayedState | None
) -> CachedWeight | None:
    """A weight (N, K), rounded to the compute dtype and cast for both GEMMs.

    Nothing is recorded in ``state``: the forwards do that. None if a GEMM is in high precision.
    """
    plan = config.plan
    if plan.output.b is None or plan.grad_input.b is None:
        return None
    # Codes made in inference mode could not be saved for a backward.
    with torch.no_grad(), torch.inference_mode(False):
        source = weight.clone() if weight.is_inference() else weight.detach()
        amax = None
        if state is not None:
            amax = torch.zeros_like(state.current_amax)
            state = state._replace(current_amax=amax)
        rows, cols = quantize_both(
            _to(source, dtype),
            plan.output.b,
            plan.grad_input.b,
            plan.reuses_weight,
            state,
            state is not None,
            config.emulate,
        )
    assert rows is not None
    assert cols is not None
    codes = WeightCodes(rows, cols, dtype, amax)
    return CachedWeight(codes, weight, version_of(weight))


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
    cached: WeightCodes | None = None,
    factors: Factors | None = None,
) -> Tensor:
    """``input @ weight.T + bias`` as the config says; autocast is respected.

    Args:
        input: (..., K); a `Float8Tensor` is multiplied as it is.
        weight: (N, K).
        bias: (N,) or None.
        config: the casts and GEMMs.
        states: of the delayed casts of input, weight and grad_output, None for others.
        record: whether delayed casts record amaxes.
        cached: the weight in float8, if it was cast before (`cast_weight`).
        factors: what output, grad_input and grad_weight are multiplied by. That of grad_input may
            also be a function, which backward calls.

    Returns:
        (..., N) in the compute dtype.
    """
    dtype, grad_enabled = compute_dtype(input), torch.is_grad_enabled()
    if cached is not None and cached.dtype != dtype:
        raise ValueError(
            f"the weight was cached in {cached.dtype} and is used in {dtype}: open the scope with "
            f"cached_weights(model, dtype={dtype})"
        )
    args = (input, weight, bias, config, dtype, states, record, grad_enabled, cached, factors)
    with _without_autocast(input.device.type):
        return _Float8LinearFunction.apply(*args)


def refuse_double_backward(name: str) -> None:
    """Called in a backward: it runs with gradients enabled only under ``create_graph=True``."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivative, and backward was called with create_graph=True; run "
            "the model under float8.high_precision(model) for it"
        )
