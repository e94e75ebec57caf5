"""The autograd function behind `float8.fusion.producers`: forward in float8, plain backward.

A norm or gate computes in float32, rounds once to the compute dtype and casts by the plan of the
layers that read the result. A GPU does that in one kernel; elsewhere plain PyTorch does. The
function's results are a carrier, which has the shape and the gradient of the result but no memory,
and the parts of the float8 tensor; `float8.tensor.differentiable` joins them.

Each producer is named by its op. Its inputs are a matrix and two more tensors or None: x, weight
and bias of a norm, gate and up of SwiGLU.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8 import kernels
from float8.formats import ScaleFormat
from float8.granularity import WHOLE
from float8.kernels import definition
from float8.kernels.registration import op_on
from float8.linear.autograd import as_matrix, refuse_double_backward
from float8.linear.casts import DelayedState, cast_matrix, known_scale, record
from float8.linear.plan import LinearPlan
from float8.tensor.differentiable import differentiable

NORM, SWIGLU = "norm_cast", "swiglu_cast"
ProducerInputs = tuple[Tensor, Tensor | None, Tensor | None]
Options = tuple[float | None, ...]


class Output(NamedTuple):
    """How one call casts its result."""

    plan: LinearPlan  # of the layers that read it
    state: DelayedState | None
    record: bool
    transpose: bool  # whether a backward may want the transpose
    by_kernel: bool


def produce(op: str, inputs: ProducerInputs, options: Options, out: Output) -> Tensor:
    """The result of a norm or gate as a `Float8Tensor`; differentiable.

    ====== ============== ====================================================================
    op     options        result
    ====== ============== ====================================================================
    NORM   eps, centred   ``(x - mean) / sqrt(variance + eps) * weight + bias``, or not centred
                          ``x / sqrt(mean(x^2) + eps) * weight + bias``
    SWIGLU limit or None  ``silu(gate) * up``, both clamped if there is a limit; without up,
                          gate is (..., 2 F) and holds both
    ====== ============== ====================================================================
    """
    carrier, data, data_t, scale = _Produce.apply(*inputs, op, options, out)
    transposed = data_t if out.by_kernel and out.transpose else None
    return differentiable(carrier, data, transposed, scale)


def _arguments(op: str, inputs: ProducerInputs, options: Options) -> tuple[Any, ...]:
    """The arguments of the definition."""
    x, second, third = inputs
    x_MK = as_matrix(x)
    if op == NORM:
        return x_MK, second, third, *options
    both = x_MK.chunk(2, 1) if second is None else (x_MK, as_matrix(second))
    return *both, *options


class _Produce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        second: Tensor | None,
        third: Tensor | None,
        op: str,
        options: Options,
        out: Output,
    ) -> tuple[Tensor, ...]:
        arguments = _arguments(op, (x, second, third), options)
        by = run_op if out.by_kernel else _run_plain
        data, data_t, scale, *statistics = by(op, arguments, out)
        ctx.save_for_backward(x, second, third, *statistics)
        ctx.op, ctx.options, ctx.by_kernel = op, options, out.by_kernel
        ctx.mark_non_differentiable(data, data_t, scale)
        shape = (*x.shape[:-1], data.shape[1])
        return x.new_empty((), dtype=out.plan.dtype).expand(shape), data, data_t, scale

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
        refuse_double_backward(ctx.op)
        x, second, third, *statistics = ctx.saved_tensors
        g_MK, gradient = as_matrix(g), definition.swiglu_backward
        if ctx.by_kernel:
            gradient = torch.ops.float8.swiglu_backward.default
        grads: tuple[Tensor | None, ...]
        if ctx.op == SWIGLU:
            both = gradient(g_MK, *_arguments(SWIGLU, (x, second, third), ctx.options))
            grads = (both, None, None) if second is None else (*both.chunk(2, 1), None)
        else:
            grads = _norm_backward(g_MK, as_matrix(x), second, third, *statistics)
        pairs = zip(grads, (x, second, third), strict=True)
        shaped = [None if grad is None else grad.reshape(like.shape) for grad, like in pairs]
        return *shaped, None, None, None


def run_op(op: str, arguments: tuple[Any, ...], out: Output) -> tuple[Tensor, ...]:
    """Data, transpose, scale and statistics, from the kernels of a GPU."""
    plan, how, state, x = out.plan, out.plan.x.first, out.state, arguments[0]
    assert how is not None
    records, scale = state is not None and out.record, known_scale(how, state, x)
    cast = (plan.dtype, how.dtype, how.scales != ScaleFormat.FLOAT32.value, out.transpose)
    data, data_t, scale, amax, *statistics = op_on(op, x)(*arguments, scale, *cast, records)
    record(state, amax if records else None)
    return data, data_t, scale, *statistics


def _run_plain(op: str, arguments: tuple[Any, ...], out: Output) -> tuple[Tensor, ...]:
    """Run the op in plain PyTorch; the transpose is empty, since readers take a view."""
    results: Any = definition.norm(*arguments) if op == NORM else (definition.swiglu(*arguments),)
    y32_MK, *statistics = results
    how = out.plan.x.first
    assert how is not None
    found = cast_matrix(y32_MK.to(out.plan.dtype), how, out.state, finds_amax=out.record)
    record(out.state, found.amax)
    data, scale, _ = found.row_major  # type: ignore[misc]
    # A delayed scale is a buffer, which sync changes.
    return data, data.new_empty((0, 0)), scale.clone(), *statistics


def _norm_backward(
    g_MK: Tensor, x_MK: Tensor, weight: Tensor | None, bias: Tensor | None,
    mean: Tensor | None, rstd: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of x, weight and bias; of an RMS norm without a mean.

    On a GPU torch's own kernels compute them where all dtypes are equal.
    """
    one_dtype = all([t is None or t.dtype == x_MK.dtype for t in (g_MK, weight, bias)])
    if x_MK.device.type == "cuda" and one_dtype and x_MK.numel():
        aten, x_MK, g_MK = torch.ops.aten, x_MK.contiguous(), g_MK.contiguous()
        size, needs = [x_MK.shape[1]], [True, weight is not None, bias is not None]
        if mean is None:
            rms_backward = aten._fused_rms_norm_backward.default
            return *rms_backward(g_MK, x_MK, size, rstd, weight, needs[:2]), None
        backward = aten.native_layer_norm_backward.default
        return backward(g_MK, x_MK, size, mean, rstd, weight, bias, needs)
    g32, x32 = g_MK.to(torch.float32), x_MK.to(torch.float32)
    normed = (x32 if mean is None else x32 - mean) * rstd
    grad_w = grad_b = None
    if bias is not None:
        grad_b = g32.sum(0).to(bias.dtype)
    if weight is not None:
        grad_w = (g32 * normed).sum(0).to(weight.dtype)
        g32 = g32 * weight.to(torch.float32)
    along = (g32 * normed).mean(1, keepdim=True)
    centred = g32 if mean is None else g32 - g32.mean(1, keepdim=True)
    return (rstd * (centred - normed * along)).to(x_MK.dtype), grad_w, grad_b


def runs_producer(device: torch.device, emulate: bool) -> bool:
    """Whether the fused kernels run on this device; their ops are registered then."""
    if kernels.kernel_for(kernels.family_of(device), (WHOLE, WHOLE), emulate) is None:
        return False
    _load()
    return True


def _load() -> None:
    for name in ("norm_cast", "swiglu_cast", "swiglu_gradients"):  # which registers their ops
        importlib.import_module(f"float8.kernels.gpu.{name}")


_load._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in kernels/casts.py
