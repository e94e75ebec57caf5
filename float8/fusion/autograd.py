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
from collections.abc import Callable
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

RMS_NORM, LAYER_NORM, SWIGLU = "rms_norm_cast", "layer_norm_cast", "swiglu_cast"
# op -> its arguments -> y in float32, and what backward needs beside the inputs
_DEFINITIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    RMS_NORM: definition.rms_norm_with_statistics,
    LAYER_NORM: definition.layer_norm_with_statistics,
    SWIGLU: lambda gate, up, limit: (definition.swiglu(gate, up, limit),),
}
ProducerInputs = tuple[Tensor, Tensor | None, Tensor | None]


class Output(NamedTuple):
    """How one call casts its result."""

    plan: LinearPlan  # of the layers that read it
    state: DelayedState | None
    record: bool
    transpose: bool  # whether a backward may want the transpose
    by_kernel: bool


def produce(op: str, inputs: ProducerInputs, number: float | None, out: Output) -> Tensor:
    """The result of a norm or gate as a `Float8Tensor`; differentiable.

    ``number`` is the eps of a norm, or the limit of a gate.

    ========== ==================================================================
    RMS_NORM   ``x / sqrt(mean(x^2) + eps) * weight``
    LAYER_NORM ``(x - mean) / sqrt(variance + eps) * weight + bias``
    SWIGLU     ``silu(gate) * up``, both clamped if there is a limit; without up,
               gate is (..., 2 F) and holds both
    ========== ==================================================================
    """
    carrier, data, data_t, scale = _Produce.apply(*inputs, op, number, out)
    transposed = data_t if out.by_kernel and out.transpose else None
    return differentiable(carrier, data, transposed, scale)


def _arguments(op: str, inputs: ProducerInputs, number: float | None) -> tuple[Any, ...]:
    """The arguments of the definition."""
    x, second, third = inputs
    x_MK = as_matrix(x)
    if op == SWIGLU:
        both = x_MK.chunk(2, 1) if second is None else (x_MK, as_matrix(second))
        return *both, number
    return (x_MK, second, number) if op == RMS_NORM else (x_MK, second, third, number)


class _Produce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        second: Tensor | None,
        third: Tensor | None,
        op: str,
        number: float | None,
        out: Output,
    ) -> tuple[Tensor, ...]:
        arguments = _arguments(op, (x, second, third), number)
        by = run_op if out.by_kernel else _run_plain
        data, data_t, scale, *statistics = by(op, arguments, out)
        ctx.save_for_backward(x, second, third, *statistics)
        ctx.op, ctx.number, ctx.by_kernel = op, number, out.by_kernel
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
            both = gradient(g_MK, *_arguments(SWIGLU, (x, second, third), ctx.number))
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
    called, limit = op_on(op, x), {}
    if op == SWIGLU:
        arguments, limit["limit"] = arguments[:2], arguments[2]
    data, data_t, scale, amax, *statistics = called(*arguments, scale, *cast, records, **limit)
    record(state, amax if records else None)
    return data, data_t, scale, *statistics


def _run_plain(op: str, arguments: tuple[Any, ...], out: Output) -> tuple[Tensor, ...]:
    """Run the op in plain PyTorch; the transpose is empty, since readers take a view."""
    y32_MK, *statistics = _DEFINITIONS[op](*arguments)
    how = out.plan.x.first
    assert how is not None
    found = cast_matrix(y32_MK.to(out.plan.dtype), how, out.state, finds_amax=out.record)
    record(out.state, found.amax)
    data, scale, _ = found.row_major  # type: ignore[misc]
    # A delayed scale is a buffer, which sync changes.
    return data, data.new_empty((0, 0)), scale.clone(), *statistics


def _norm_backward(
    g_MK: Tensor, x_MK: Tensor, weight: Tensor | None, bias: Tensor | None, *statistics: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias; of an RMS norm if the statistics have no mean.

    On a GPU torch's own kernels compute them where all dtypes are equal.
    """
    *mean, rstd = statistics
    one_dtype = all([t is None or t.dtype == x_MK.dtype for t in (g_MK, weight, bias)])
    if x_MK.device.type == "cuda" and one_dtype and x_MK.numel():
        aten, x_MK, g_MK = torch.ops.aten, x_MK.contiguous(), g_MK.contiguous()
        size, needs = [x_MK.shape[1]], [True, weight is not None, bias is not None]
        if not mean:
            rms_backward = aten._fused_rms_norm_backward.default
            return *rms_backward(g_MK, x_MK, size, rstd, weight, needs[:2]), None
        backward = aten.native_layer_norm_backward.default
        return backward(g_MK, x_MK, size, *mean, rstd, weight, bias, needs)
    g32, x32 = g_MK.to(torch.float32), x_MK.to(torch.float32)
    normed = (x32 - mean[0] if mean else x32) * rstd
    grad_w = grad_b = None
    if bias is not None:
        grad_b = g32.sum(0).to(bias.dtype)
    if weight is not None:
        grad_w = (g32 * normed).sum(0).to(weight.dtype)
        g32 = g32 * weight.to(torch.float32)
    along = (g32 * normed).mean(1, keepdim=True)
    centred = g32 - g32.mean(1, keepdim=True) if mean else g32
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
