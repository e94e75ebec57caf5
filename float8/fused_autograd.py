"""The autograd functions behind `float8.fused`: codes forward, a plain gradient backward.

Two autograd functions make the result. The first computes codes and takes the gradient; the second
wraps the codes. Between them the gradient travels along a tensor of one element, expanded to the
shape of the result, because torch.compile traces a backward with the type of the forward's output.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8 import kernels
from float8.config import OperandCast
from float8.formats import on_device
from float8.granularity import WHOLE
from float8.scaling import DelayedState, quantize
from float8.tensor import Float8Tensor

_WHOLE = (WHOLE, WHOLE)


class Output(NamedTuple):
    """How one call's result is cast."""

    cast: OperandCast
    state: DelayedState | None
    record: bool
    transpose: bool  # whether a backward may want the transpose
    dtype: torch.dtype  # the compute dtype
    by_kernel: bool

    def kernel_arguments(self, device: torch.device) -> tuple[Any, ...]:
        """The arguments that the ops share, from the scale on: None where it is dynamic."""
        scale = amax = None
        if self.cast.static_scale is not None:
            scale = torch.full((1, 1), self.cast.static_scale, dtype=torch.float32, device=device)
        elif self.state is not None:
            scale = self.state.scale if self.state.ready else None
            amax = self.state.current_amax if self.record else None
        dtype = on_device(self.cast.format, device).dtype
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
        x_MK = _as_matrix(x)
        if out.by_kernel:
            *codes, rstd = torch.ops.float8.rms_norm_cast.default(
                x_MK, weight, eps, *out.kernel_arguments(x.device)
            )
        else:
            x32 = x_MK.to(torch.float32)
            rstd = torch.rsqrt(x32.square().mean(1, keepdim=True) + eps)
            y32 = x32 * rstd
            y32 = y32 if weight is None else y32 * weight.to(torch.float32)
            codes = out.in_plain_torch(y32)
        ctx.save_for_backward(x, weight, rstd)
        ctx.mark_non_differentiable(*codes)
        return x.new_empty((), dtype=out.dtype).expand(x.shape), *codes

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        _refuse_double_backward("RMSNormCast")
        x, weight, rstd = ctx.saved_tensors
        grad_x, grad_w = _rms_norm_backward(
            _as_matrix(g), _as_matrix(x), weight, rstd, ctx.needs_input_grad[:2]
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


class _SwiGLUCast(torch.autograd.Function):
    """As `_RMSNormCast`, of gate and up, or of a tensor whose halves they are and no up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, out: Output) -> tuple[Tensor, ...]:
        gate_MF, up_MF = _gate_and_up(gate, up)
        if out.by_kernel:
            codes = torch.ops.float8.swiglu_cast.default(
                gate_MF, up_MF, *out.kernel_arguments(gate.device)
            )
        else:
            y32 = F.silu(gate_MF.to(torch.float32)) * up_MF.to(torch.float32)
            codes = out.in_plain_torch(y32)
        ctx.save_for_backward(gate, up)
        ctx.mark_non_differentiable(*codes)
        ctx.by_kernel = out.by_kernel
        shape = (*gate.shape[:-1], gate_MF.shape[1])
        return gate.new_empty((), dtype=out.dtype).expand(shape), *codes

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        _refuse_double_backward("SwiGLUCast")
        gate, up = ctx.saved_tensors
        gradient = torch.ops.float8.swiglu_backward.default if ctx.by_kernel else _swiglu_backward
        both = gradient(_as_matrix(g), *_gate_and_up(gate, up))
        if up is None:
            return both.reshape(gate.shape), None, None
        grad_gate, grad_up = both.chunk(2, 1)
        return grad_gate.reshape(gate.shape), grad_up.reshape(up.shape), None


class _Wrap(torch.autograd.Function):
    """Codes as a `Float8Tensor` whose gradient goes to the carrier."""

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, data: Tensor, data_t: Tensor | None, scale: Tensor
    ) -> Tensor:
        shape, dims = carrier.shape, carrier.dim()
        block, scale = (WHOLE,) * dims, scale.reshape((1,) * dims)
        return Float8Tensor(data.reshape(shape), scale, block, carrier.dtype, data_t)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return g, None, None, None


def _wrapped(result: tuple[Tensor, ...], out: Output) -> Tensor:
    carrier, data, data_t, scale = result
    has_transpose = out.by_kernel and out.transpose
    wrapped: Tensor = _Wrap.apply(carrier, data, data_t if has_transpose else None, scale)
    return wrapped


def _gate_and_up(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return _as_matrix(gate), _as_matrix(up)
    gate, up = _as_matrix(gate).chunk(2, 1)
    return gate, up


def _swiglu_backward(g_MF: Tensor, gate_MF: Tensor, up_MF: Tensor) -> Tensor:
    """(M, 2 F): the gradients of gate and up."""
    g32, gate32 = g_MF.to(torch.float32), gate_MF.to(torch.float32)
    sigmoid = gate32.sigmoid()
    grad_gate = g32 * up_MF.to(torch.float32) * (sigmoid * (1 + gate32 * (1 - sigmoid)))
    return torch.cat([grad_gate, g32 * (gate32 * sigmoid)], dim=1).to(gate_MF.dtype)


def _as_matrix(x: Tensor) -> Tensor:
    """(..., K) -> (M, K)."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def runs_kernel(device: torch.device, emulate: bool) -> bool:
    """Whether the fused kernels run on this device; what then is asked for is there."""
    if not kernels.runs_kernel(device, _WHOLE, emulate):
        return False
    _load()
    return True


def _load() -> None:
    for name in ("rms_norm_cast", "swiglu_cast"):  # which registers their ops
        importlib.import_module(f"float8.kernels.gpu.{name}")


_load._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in kernels/casts.py


def _refuse_double_backward(name: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivative, and backward was called with create_graph=True; run "
            "the model under float8.high_precision(model) for it"
        )


def rms_norm_cast(x: Tensor, weight: Tensor | None, eps: float, out: Output) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, (..., K), as a `Float8Tensor`; differentiable."""
    return _wrapped(_RMSNormCast.apply(x, weight, eps, out), out)


def swiglu_cast(gate: Tensor, up: Tensor | None, out: Output) -> Tensor:
    """``silu(gate) * up``, (..., F), as a `Float8Tensor`; differentiable.

    Without ``up``, gate is (..., 2 F) and holds both.
    """
    return _wrapped(_SwiGLUCast.apply(gate, up, out), out)
