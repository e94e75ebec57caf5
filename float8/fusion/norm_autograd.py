"""The autograd function behind `float8.fusion.norm_casts`: forward in float8, plain backward.

A norm computes in float32, rounds once to the compute dtype and casts by the plan of the layers
that read the result. A GPU does that in one kernel; elsewhere plain PyTorch does. The function's
results are a carrier, which has the shape and the gradient of the result but no memory, and the
parts of the float8 tensor; `Differentiable` joins them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8 import kernels
from float8.formats import ScaleFormat
from float8.granularity import WHOLE
from float8.kernels import definition
from float8.kernels.registration import load_kernels, op_on
from float8.linear.autograd import as_matrix, refuse_double_backward
from float8.linear.casts import DelayedState, cast_matrix, known_scale, record
from float8.linear.plan import LinearPlan
from float8.tensor.tensor import Differentiable


class NormCall(NamedTuple):
    """The parameters of one call, except its tensors."""

    eps: float
    is_centred: bool
    plan: LinearPlan  # of the layers that read the result
    state: DelayedState | None
    record: bool
    transpose: bool  # whether a backward may want the transpose
    by_kernel: bool


def cast_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, call: NormCall) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` as a `Float8Tensor`; differentiable.

    Not centred it is ``x / sqrt(mean(x^2) + eps) * weight``.
    """
    carrier, data, data_t, scale = _CastNorm.apply(x, weight, bias, call)
    transposed = data_t if call.by_kernel and call.transpose else None
    return Differentiable.apply(carrier, data, transposed, scale)


class _CastNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: NormCall
    ) -> tuple[Tensor, ...]:
        by = _run_kernels if call.by_kernel else _run_plain
        data, data_t, scale, mean, rstd = by(as_matrix(x), weight, bias, call)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.mark_non_differentiable(data, data_t, scale)
        return x.new_empty((), dtype=call.plan.dtype).expand(x.shape), data, data_t, scale

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
        refuse_double_backward("norm_cast")
        x, *rest = ctx.saved_tensors
        grad_x, *grads = _norm_backward(as_matrix(g), as_matrix(x), *rest)
        return grad_x.reshape(x.shape), *grads, None  # type: ignore[union-attr]


def _run_kernels(
    x_MK: Tensor, weight: Tensor | None, bias: Tensor | None, call: NormCall
) -> tuple[Any, ...]:
    """Data, transpose, scale, mean and rstd, from the kernels of a GPU."""
    plan, how, state = call.plan, call.plan.x.first, call.state
    assert how is not None
    records = state is not None and call.record
    cast = plan.dtype, how.dtype, how.scales != ScaleFormat.FLOAT32.value, call.transpose
    data, data_t, scale, amax, mean, rstd = op_on("norm_cast", x_MK)(
        x_MK, weight, bias, call.eps, call.is_centred, known_scale(how, state, x_MK), *cast, records
    )
    record(state, amax if records else None)
    return data, data_t, scale, mean, rstd


def _run_plain(
    x_MK: Tensor, weight: Tensor | None, bias: Tensor | None, call: NormCall
) -> tuple[Any, ...]:
    """The same in plain PyTorch; the transpose is empty, since readers take a view."""
    y32_MK, mean, rstd = definition.norm(x_MK, weight, bias, call.eps, call.is_centred)
    how = call.plan.x.first
    assert how is not None
    found = cast_matrix(y32_MK.to(call.plan.dtype), how, call.state, finds_amax=call.record)
    record(call.state, found.amax)
    data, scale, _ = found.row_major  # type: ignore[misc]
    # A delayed scale is a buffer, which sync changes.
    return data, data.new_empty((0, 0)), scale.clone(), mean, rstd


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


def runs_kernels(device: torch.device, emulate: bool) -> bool:
    """Whether the fused kernels run on this device; their ops are registered then."""
    if kernels.kernel_for(kernels.family_of(device), (WHOLE, WHOLE), emulate) is None:
        return False
    load_kernels("norm_cast", "swiglu_cast", "swiglu_gradients")
    return True
