"""Producers that write float8: `RMSNormCast` and `SwiGLUCast`, a layer's input already cast.

What a norm or a gate computes is often read by GEMMs alone. Written in bfloat16 and cast by the
layers behind it, it crosses memory two to five times; these modules write it once, as a
`Float8Tensor` with its transpose for the weight gradient, which `Float8Linear` takes as it is::

    config = Float8LinearConfig.from_recipe_name("delayed")

    class FeedForward(nn.Module):
        def __init__(self, dim, hidden):
            super().__init__()
            self.norm = RMSNormCast(dim, config=config)
            self.w13 = nn.Linear(dim, 2 * hidden, bias=False)
            self.gate = SwiGLUCast(config=config)
            self.w2 = nn.Linear(hidden, dim, bias=False)

        def forward(self, x):
            return x + self.w2(self.gate(self.w13(self.norm(x))))

    model = convert_to_float8_training(FeedForward(64, 128), config=config)

The modules and the layers behind them take the same config, whose input cast is tensorwise:
dynamic, delayed or static. ``cast_output`` stands for the layers' ``cast_input`` and keeps its
state, where ``sync_float8_amax_and_scale_history(model)`` finds it.

Values are computed in float32, rounded once to the compute dtype and then cast. On a GPU that is
a Triton kernel (two for a dynamic scale, or few rows); elsewhere, and with ``emulate=True``, plain
PyTorch. Roots, sums and exponentials may differ between them by float32 ulps; equal values do not.

Two autograd functions make the result. The first computes codes and takes the gradient; the second
wraps the codes. Between them the gradient travels along a tensor of one element, expanded to the
shape of the result, because torch.compile traces a backward with the type of the forward's output.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8 import kernels
from float8.autograd import compute_dtype
from float8.cast import DelayedCast, make_cast
from float8.config import Float8LinearConfig, OperandCast
from float8.formats import E4M3, HIGH_PRECISION_DTYPES, on_device
from float8.granularity import WHOLE
from float8.scaling import DelayedState, quantize
from float8.tensor import Float8Tensor

_WHOLE = (WHOLE, WHOLE)


class _Output(NamedTuple):
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
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, out: _Output
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
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, out: _Output) -> tuple[Tensor, ...]:
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


def _wrapped(result: tuple[Tensor, ...], out: _Output) -> Tensor:
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


def _runs_kernel(device: torch.device, emulate: bool) -> bool:
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


class _Producer(nn.Module):
    """Abstract: a module that casts what it computes, with ``cast_output``."""

    plain: str  # what to use where this module does not fit

    def _set_up(self, config: Float8LinearConfig | None, device: Any) -> None:
        config = config or Float8LinearConfig()
        cast, second = config.plan.output.a, config.cast_config_input_for_grad_weight
        if cast is None or cast.block != _WHOLE or not config.plan.reuses_input:
            again = f", for grad_weight '{second.short_str}'" if second is not None else ""
            raise ValueError(
                f"{type(self).__name__} casts once, by one scale per tensor; cast_config_input is "
                f"'{config.cast_config_input.short_str}'{again}: use {self.plain} and let "
                "Float8Linear cast its input"
            )
        self.config = config
        self.high_precision = 0  # how many float8.high_precision contexts are open
        delayed, amax_init = config.delayed_scaling, config.enable_amax_init
        module = make_cast(config.cast_config_input, E4M3, delayed, amax_init, device)
        self.cast_output = module.train(self.training)

    def _output(self, x: Tensor) -> _Output:
        """How to cast what is computed from x."""
        cast, grad = self.config.plan.output.a, torch.is_grad_enabled()
        assert cast is not None
        return _Output(
            cast,
            self.cast_output.state,
            self.training and grad,
            grad,
            compute_dtype(x),
            _runs_kernel(x.device, self.config.emulate),
        )

    def _check_input(self, x: Tensor) -> None:
        if x.dtype not in HIGH_PRECISION_DTYPES or isinstance(x, Float8Tensor):
            found = "a Float8Tensor" if isinstance(x, Float8Tensor) else x.dtype
            known = ", ".join(str(dtype) for dtype in HIGH_PRECISION_DTYPES)
            raise TypeError(f"{type(self).__name__}: input is {found}, expected {known}")
        state = self.cast_output.state
        if state is not None and state.scale.device != x.device:
            raise ValueError(
                f"{type(self).__name__}: input is on {x.device}, cast_output on "
                f"{state.scale.device}; move the module, from meta with to_empty(device=...)"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        cast = self.cast_output
        has_history = any(key.startswith(f"{prefix}cast_output.") for key in state_dict)
        if has_history or not isinstance(cast, DelayedCast):
            return
        weight = state_dict.get(prefix + "weight")  # a plain checkpoint: a new history
        if weight is not None:
            cast.start_beside(weight)


class RMSNormCast(_Producer, nn.RMSNorm):
    """``nn.RMSNorm`` over the last dimension, in float8; parameters and checkpoints are its own.

    Args:
        normalized_shape: K, the size of the last dimension.
        eps: added to the mean square; float32's epsilon by default.
        elementwise_affine, device, dtype: as ``nn.RMSNorm``.
        config: of the layers that read the result; dynamic tensorwise by default.

    Raises:
        ValueError: more than one dimension, or an input cast that is not tensorwise.
    """

    plain = "nn.RMSNorm"

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: Float8LinearConfig | None = None,
    ) -> None:
        nn.RMSNorm.__init__(self, normalized_shape, eps, elementwise_affine, device, dtype)
        self._set_up(config, device)

    @classmethod
    def from_float(cls, norm: nn.RMSNorm, config: Float8LinearConfig | None = None) -> RMSNormCast:
        """An RMSNormCast with the parameters, hooks and mode of ``norm``, which it shares."""
        self = cls.__new__(cls)
        self.__dict__ = dict(norm.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            self.__dict__[name] = dict(norm.__dict__[name])
        self._set_up(config, None if norm.weight is None else norm.weight.device)
        return self

    def _set_up(self, config: Float8LinearConfig | None, device: Any) -> None:
        if len(self.normalized_shape) != 1:
            raise ValueError(
                f"RMSNormCast: normalized_shape is {tuple(self.normalized_shape)}; a GEMM reads "
                "rows, so it must be the last dimension alone. Use nn.RMSNorm"
            )
        super()._set_up(config, device)

    def forward(self, x: Tensor) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight``: (..., K) -> a `Float8Tensor` (..., K).

        Raises:
            TypeError: x is not float32, bfloat16 or float16.
            ValueError: the last dimension is not K.
        """
        if self.high_precision:
            return nn.RMSNorm.forward(self, x)
        self._check_input(x)
        if x.dim() == 0 or x.shape[-1] != self.normalized_shape[0]:
            expected = f"(..., {self.normalized_shape[0]})"
            raise ValueError(f"RMSNormCast: input is {tuple(x.shape)}, expected {expected}")
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        out = self._output(x)
        return _wrapped(_RMSNormCast.apply(x, self.weight, eps, out), out)


class SwiGLUCast(_Producer):
    """``silu(gate) * up`` in float8.

    Args:
        config: of the layer that reads the result; dynamic tensorwise by default.
        device: of the delayed cast's buffers.

    Raises:
        ValueError: an input cast that is not tensorwise.
    """

    plain = "F.silu(gate) * up"

    def __init__(
        self, config: Float8LinearConfig | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self._set_up(config, device)

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """``silu(gate) * up``: two (..., F), or one (..., 2 F) -> a `Float8Tensor` (..., F).

        Args:
            gate: the gate; or, without ``up``, both, the gate first: the result of one projection.
                Its gradient is then one tensor too.
            up: what is gated, of gate's shape and dtype.

        Raises:
            TypeError: not float32, bfloat16 or float16, or two dtypes.
            ValueError: shapes that differ, or an odd last dimension.
        """
        if self.high_precision:
            gate, up = gate.chunk(2, -1) if up is None else (gate, up)
            return F.silu(gate) * up
        self._check(gate, up)
        out = self._output(gate)
        return _wrapped(_SwiGLUCast.apply(gate, up, out), out)

    def _check(self, gate: Tensor, up: Tensor | None) -> None:
        self._check_input(gate)
        if up is None and (gate.dim() == 0 or gate.shape[-1] % 2):
            raise ValueError(f"SwiGLUCast: gate and up have no halves in {tuple(gate.shape)}")
        if up is not None and up.dtype != gate.dtype:
            raise TypeError(f"SwiGLUCast: gate is {gate.dtype} and up {up.dtype}; convert one")
        if up is not None and (up.shape != gate.shape or gate.dim() == 0):
            raise ValueError(f"SwiGLUCast: gate is {tuple(gate.shape)} and up {tuple(up.shape)}")
