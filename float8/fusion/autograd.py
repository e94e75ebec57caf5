"""The autograd functions behind `float8.fusion.producers`: forward in float8, plain backward.

A norm or gate computes in float32, rounds once to the compute dtype and casts. A GPU does that in
one kernel; elsewhere plain PyTorch does. The function's results are a carrier, which has the shape
and the gradient of the result but no memory, and the parts of the float8 tensor;
`float8.tensor.differentiable` joins them.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8 import kernels
from float8.config import OperandCast
from float8.formats import ScaleFormat, on_device
from float8.granularity import WHOLE
from float8.kernels import definition
from float8.linear.autograd import as_matrix, refuse_double_backward
from float8.linear.scaling import DelayedState, amax_to_record, bind_and_cast, known_scale
from float8.linear.smoothing import channel_scales, smoothed, smoothing_factors
from float8.tensor.differentiable import differentiable

_WHOLE = (WHOLE, WHOLE)


class OutputCast(NamedTuple):
    """The cast of one call's result."""

    cast: OperandCast
    state: DelayedState | None
    record: bool
    transpose: bool  # whether a backward may want the transpose
    dtype: torch.dtype  # the compute dtype
    by_kernel: bool
    smooth: bool = False  # with a factor per channel, see `float8.linear.smoothing`

    def kernel_arguments(self, x: Tensor) -> tuple[Any, ...]:
        """The arguments that the ops share, from the scale on: None where it is dynamic."""
        scale = known_scale(self.cast, self.state, x)
        amax = amax_to_record(self.cast, self.state, self.record)
        return scale, *self._formats(x), amax

    def smooth_arguments(self, x: Tensor, amaxes_1K: Tensor) -> tuple[Any, ...]:
        """The same of a smooth result, whose channels have these amaxes; and its factors.

        The amax of what is cast follows from theirs: there is no other pass, and none records it.
        """
        factors_1K = kernels.smoothing_factors(amaxes_1K)
        largest = kernels.amax(amaxes_1K * factors_1K, _WHOLE)
        if (amax := amax_to_record(self.cast, self.state, self.record)) is not None:
            kernels.record_amax(amax, largest)
        scale = known_scale(self.cast, self.state, x)
        if scale is None:
            fmt = on_device(self.cast.format, x.device)
            scale = kernels.scale_from_amax(largest, fmt.max, self.cast.scale_format.value)
        return scale, *self._formats(x), None, factors_1K

    def _formats(self, x: Tensor) -> tuple[Any, ...]:
        dtype = on_device(self.cast.format, x.device).dtype
        power_of_two = self.cast.scale_format is not ScaleFormat.FLOAT32
        return self.dtype, dtype, power_of_two, self.transpose

    def in_plain_torch(self, y32_MK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The float8 data of float32 values, no transpose, and the scale."""
        y_MK = y32_MK.to(self.dtype)
        factors_1K = smoothing_factors(y_MK) if self.smooth else None
        if factors_1K is not None:
            y_MK = smoothed(y_MK, factors_1K)
        data, scale = bind_and_cast(y_MK, self.cast, self.state, self.record, emulate=True)
        # A clone, because a delayed scale is a buffer, which sync changes.
        scale = scale.clone() if factors_1K is None else channel_scales(scale, factors_1K)
        return data, data.new_empty((0, 0)), scale


def _results(
    ctx: Any, x: Tensor, size: int, out: OutputCast, parts: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The carrier of (..., size), and the data, transpose and scale, which have no gradient."""
    ctx.mark_non_differentiable(*parts)
    return x.new_empty((), dtype=out.dtype).expand((*x.shape[:-1], size)), *parts


class _NormCast(torch.autograd.Function):
    """A layer norm if ``centred``, else an RMS norm, which has no bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        out: OutputCast,
    ) -> tuple[Tensor, ...]:
        x_MK = as_matrix(x)
        arguments = (x_MK, weight, bias, eps) if centred else (x_MK, weight, eps)
        if out.by_kernel:
            ops = torch.ops.float8
            op = ops.layer_norm_cast.default if centred else ops.rms_norm_cast.default
            found = op(*arguments, *out.kernel_arguments(x))
            parts, statistics = found[:3], found[3:]
        else:
            norm = definition.layer_norm if centred else definition.rms_norm
            y32, *statistics = norm(*arguments)
            parts = out.in_plain_torch(y32)
        ctx.save_for_backward(x, weight, bias, *statistics)
        return _results(ctx, x, x.shape[-1], out, parts)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, *mean, rstd = ctx.saved_tensors
        refuse_double_backward("LayerNormCast" if mean else "RMSNormCast")
        grad_x, grad_w, grad_b = _norm_backward(
            as_matrix(g),
            as_matrix(x),
            weight,
            bias,
            mean[0] if mean else None,
            rstd,
            ctx.needs_input_grad[:3],
        )
        grad_x = None if grad_x is None else grad_x.reshape(x.shape)
        return grad_x, grad_w, grad_b, None, None, None


def _norm_backward(
    g_MK: Tensor,
    x_MK: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias; of an RMS norm if there is no mean.

    On a GPU torch's own kernels compute them where all dtypes are equal.
    """
    one_dtype = all(t is None or t.dtype == x_MK.dtype for t in (g_MK, weight, bias))
    if x_MK.device.type == "cuda" and one_dtype and x_MK.numel():
        aten, x_MK, g_MK = torch.ops.aten, x_MK.contiguous(), g_MK.contiguous()
        size = [x_MK.shape[1]]
        if mean is None:
            rms_backward = aten._fused_rms_norm_backward.default
            return *rms_backward(g_MK, x_MK, size, rstd, weight, list(needs[:2])), None
        backward = aten.native_layer_norm_backward.default
        return backward(g_MK, x_MK, size, mean, rstd, weight, bias, list(needs))
    g32, x32 = g_MK.to(torch.float32), x_MK.to(torch.float32)
    normed = (x32 if mean is None else x32 - mean) * rstd
    grad_x = grad_w = grad_b = None
    if bias is not None and needs[2]:
        grad_b = g32.sum(0).to(bias.dtype)
    if weight is not None:
        grad_w = (g32 * normed).sum(0).to(weight.dtype) if needs[1] else None
        g32 = g32 * weight.to(torch.float32)
    if needs[0]:
        along = (g32 * normed).mean(1, keepdim=True)
        centred = g32 if mean is None else g32 - g32.mean(1, keepdim=True)
        grad_x = (rstd * (centred - normed * along)).to(x_MK.dtype)
    return grad_x, grad_w, grad_b


class _SwiGLUCast(torch.autograd.Function):
    """The result for gate and up; or for one tensor that contains both, without ``up``."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, out: OutputCast) -> tuple[Tensor, ...]:
        gate_MF, up_MF = _gate_and_up(gate, up)
        ops = torch.ops.float8
        if out.by_kernel and out.smooth:
            amaxes_1F = ops.swiglu_amaxes.default(gate_MF, up_MF, out.dtype)
            arguments = out.smooth_arguments(gate, amaxes_1F)
            *data, scale = ops.swiglu_cast.default(gate_MF, up_MF, *arguments)
            parts = (*data, channel_scales(scale, arguments[-1]))
        elif out.by_kernel:
            parts = ops.swiglu_cast.default(gate_MF, up_MF, *out.kernel_arguments(gate))
        else:
            parts = out.in_plain_torch(definition.swiglu(gate_MF, up_MF))
        ctx.save_for_backward(gate, up)
        ctx.by_kernel = out.by_kernel
        return _results(ctx, gate, gate_MF.shape[1], out, parts)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_double_backward("SwiGLUCast")
        gate, up = ctx.saved_tensors
        by_kernel = ctx.by_kernel
        gradient = (
            torch.ops.float8.swiglu_backward.default if by_kernel else definition.swiglu_backward
        )
        both = gradient(as_matrix(g), *_gate_and_up(gate, up))
        if up is None:
            return both.reshape(gate.shape), None, None
        grad_gate, grad_up = both.chunk(2, 1)
        return grad_gate.reshape(gate.shape), grad_up.reshape(up.shape), None


def _gate_and_up(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return as_matrix(gate), as_matrix(up)
    gate, up = as_matrix(gate).chunk(2, 1)
    return gate, up


def _joined(results: tuple[Tensor, ...], out: OutputCast) -> Tensor:
    carrier, data, data_t, scale = results
    transposed = data_t if out.by_kernel and out.transpose else None
    return differentiable(carrier, data, transposed, scale, out.smooth)


def rms_norm_cast(x: Tensor, weight: Tensor | None, eps: float, out: OutputCast) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, (..., K), as a `Float8Tensor`; differentiable."""
    return _joined(_NormCast.apply(x, weight, None, eps, False, out), out)


def layer_norm_cast(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: OutputCast
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, (..., K), as a `Float8Tensor`."""
    return _joined(_NormCast.apply(x, weight, bias, eps, True, out), out)


def swiglu_cast(gate: Tensor, up: Tensor | None, out: OutputCast) -> Tensor:
    """``silu(gate) * up``, (..., F), as a `Float8Tensor`; differentiable.

    Without ``up``, gate is (..., 2 F) and holds both.
    """
    return _joined(_SwiGLUCast.apply(gate, up, out), out)


def runs_kernel(device: torch.device, emulate: bool) -> bool:
    """Whether the fused kernels run on this device; their ops are registered then."""
    if not kernels.runs_kernel(device, _WHOLE, emulate):
        return False
    _load()
    return True


def _load() -> None:
    for name in ("norm_cast", "swiglu_cast"):  # which registers their ops
        importlib.import_module(f"float8.kernels.gpu.{name}")


_load._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in kernels/casts.py
