"""The autograd functions behind `float8.fusion.fused`: codes forward, a plain gradient backward.

`float8.tensor.differentiable` wraps the codes.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8 import kernels
from float8.config import OperandCast
from float8.formats import on_device
from float8.granularity import WHOLE
from float8.kernels import definition
from float8.linear.autograd import as_matrix, refuse_double_backward
from float8.linear.scaling import DelayedState, amax_to_record, known_scale, quantize
from float8.tensor.differentiable import differentiable

_WHOLE = (WHOLE, WHOLE)


class Output(NamedTuple):
    """How one call's result is cast."""

    cast: OperandCast
    state: DelayedState | None
    record: bool
    transpose: bool  # whether a backward may want the transpose
    dtype: torch.dtype  # the compute dtype
    by_kernel: bool

    def kernel_arguments(self, x: Tensor) -> tuple[Any, ...]:
        """The arguments that the ops share, from the scale on: None where it is dynamic."""
        scale = known_scale(self.cast, self.state, x)
        amax = amax_to_record(self.cast, self.state, self.record)
        dtype = on_device(self.cast.format, x.device).dtype
        return scale, self.dtype, dtype, self.cast.power_of_two_scale, self.transpose, amax

    def in_plain_torch(self, y32_MK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, no transpose, and the scale, from float32 values."""
        y_MK = y32_MK.to(self.dtype)
        data, scale = quantize(y_MK, self.cast, self.state, self.record, emulate=True)
        # A clone, because a delayed scale is a buffer, which sync changes.
        return data, data.new_empty((0, 0)), scale.clone()


class _RMSNormCast(torch.autograd.Function):
    """(carrier of the gradient, codes, transposed codes, scale)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, out: Output
    ) -> tuple[Tensor, ...]:
        x_MK = as_matrix(x)
        if out.by_kernel:
            *codes, rstd = torch.ops.float8.rms_norm_cast.default(
                x_MK, weight, eps, *out.kernel_arguments(x)
            )
        else:
            y32, rstd = definition.rms_norm(x_MK, weight, eps)
            codes = out.in_plain_torch(y32)
        ctx.save_for_backward(x, weight, rstd)
        ctx.mark_non_differentiable(*codes)
        return x.new_empty((), dtype=out.dtype).expand(x.shape), *codes

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_double_backward("RMSNormCast")
        x, weight, rstd = ctx.saved_tensors
        grad_x, grad_w = _rms_norm_backward(
            as_matrix(g), as_matrix(x), weight, rstd, ctx.needs_input_grad[:2]
        )
        return None if grad_x is None else grad_x.reshape(x.shape), grad_w, None, None


def _rms_norm_backward(
    g_MK: Tensor, x_MK: Tensor, weight: Tensor | None, rstd: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and weight: by torch's own kernel where there is one for these, or not."""
    one_dtype = g_MK.dtype == x_MK.dtype and (weight is None or weight.dtype == x_MK.dtype)
    if x_MK.device.type == "cuda" and one_dtype and x_MK.numel():
        fused = torch.ops.aten._fused_rms_norm_backward.default
        x_MK, g_MK = x_MK.contiguous(), g_MK.contiguous()
        return fused(g_MK, x_MK, [x_MK.shape[1]], rstd, weight, list(needs))
    g32, normed = g_MK.to(torch.float32), x_MK.to(torch.float32) * rstd
    grad_x = grad_w = None
    if weight is not None:
        grad_w = (g32 * normed).sum(0).to(weight.dtype) if needs[1] else None
        g32 = g32 * weight.to(torch.float32)
    if needs[0]:
        along = (g32 * normed).mean(1, keepdim=True)
        grad_x = (rstd * (g32 - normed * along)).to(x_MK.dtype)
    return grad_x, grad_w


class _LayerNormCast(torch.autograd.Function):
    """As `_RMSNormCast`, of rows that are centred, and with a bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Output
    ) -> tuple[Tensor, ...]:
        x_MK = as_matrix(x)
        if out.by_kernel:
            *codes, mean, rstd = torch.ops.float8.layer_norm_cast.default(
                x_MK, weight, bias, eps, *out.kernel_arguments(x)
            )
        else:
            y32, mean, rstd = definition.layer_norm(x_MK, weight, bias, eps)
            codes = out.in_plain_torch(y32)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.mark_non_differentiable(*codes)
        return x.new_empty((), dtype=out.dtype).expand(x.shape), *codes

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_double_backward("LayerNormCast")
        x, weight, bias, mean, rstd = ctx.saved_tensors
        grad_x, grad_w, grad_b = _layer_norm_backward(
            as_matrix(g), as_matrix(x), weight, bias, mean, rstd, ctx.needs_input_grad[:3]
        )
        return None if grad_x is None else grad_x.reshape(x.shape), grad_w, grad_b, None, None


def _layer_norm_backward(
    g_MK: Tensor,
    x_MK: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias, as `_rms_norm_backward` finds them."""
    one_dtype = all(t is None or t.dtype == x_MK.dtype for t in (g_MK, weight, bias))
    if x_MK.device.type == "cuda" and one_dtype and x_MK.numel():
        fused = torch.ops.aten.native_layer_norm_backward.default
        x_MK, g_MK = x_MK.contiguous(), g_MK.contiguous()
        return fused(g_MK, x_MK, [x_MK.shape[1]], mean, rstd, weight, bias, list(needs))
    g32, normed = g_MK.to(torch.float32), (x_MK.to(torch.float32) - mean) * rstd
    grad_x = grad_w = grad_b = None
    if bias is not None and needs[2]:
        grad_b = g32.sum(0).to(bias.dtype)
    if weight is not None:
        grad_w = (g32 * normed).sum(0).to(weight.dtype) if needs[1] else None
        g32 = g32 * weight.to(torch.float32)
    if needs[0]:
        along = (g32 * normed).mean(1, keepdim=True)
        grad_x = (rstd * (g32 - g32.mean(1, keepdim=True) - normed * along)).to(x_MK.dtype)
    return grad_x, grad_w, grad_b


class _SwiGLUCast(torch.autograd.Function):
    """As `_RMSNormCast`, of gate and up, or of a tensor whose halves they are and no up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, out: Output) -> tuple[Tensor, ...]:
        gate_MF, up_MF = _gate_and_up(gate, up)
        if out.by_kernel:
            codes = torch.ops.float8.swiglu_cast.default(
                gate_MF, up_MF, *out.kernel_arguments(gate)
            )
        else:
            codes = out.in_plain_torch(definition.swiglu(gate_MF, up_MF))
        ctx.save_for_backward(gate, up)
        ctx.mark_non_differentiable(*codes)
        ctx.by_kernel = out.by_kernel
        shape = (*gate.shape[:-1], gate_MF.shape[1])
        return gate.new_empty((), dtype=out.dtype).expand(shape), *codes

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


def _wrapped(result: tuple[Tensor, ...], out: Output) -> Tensor:
    carrier, data, data_t, scale = result
    has_transpose = out.by_kernel and out.transpose
    return differentiable(carrier, data, data_t if has_transpose else None, scale)


def _gate_and_up(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return as_matrix(gate), as_matrix(up)
    gate, up = as_matrix(gate).chunk(2, 1)
    return gate, up


def runs_kernel(device: torch.device, emulate: bool) -> bool:
    """Whether the fused kernels run on this device; what then is asked for is there."""
    if not kernels.runs_kernel(device, _WHOLE, emulate):
        return False
    _load()
    return True


def _load() -> None:
    for name in ("norm_cast", "swiglu_cast"):  # which registers their ops
        importlib.import_module(f"float8.kernels.gpu.{name}")


_load._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in kernels/casts.py


def rms_norm_cast(x: Tensor, weight: Tensor | None, eps: float, out: Output) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, (..., K), as a `Float8Tensor`; differentiable."""
    return _wrapped(_RMSNormCast.apply(x, weight, eps, out), out)


def layer_norm_cast(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Output
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, (..., K), as a `Float8Tensor`."""
    return _wrapped(_LayerNormCast.apply(x, weight, bias, eps, out), out)


def swiglu_cast(gate: Tensor, up: Tensor | None, out: Output) -> Tensor:
    """``silu(gate) * up``, (..., F), as a `Float8Tensor`; differentiable.

    Without ``up``, gate is (..., 2 F) and holds both.
    """
    return _wrapped(_SwiGLUCast.apply(gate, up, out), out)
