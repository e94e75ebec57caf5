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
state, where ``sync_float8_amax_and_scale_history(model)`` finds it. Compile a module together with
the layers that read it, in one graph: torch.compile cannot hand the gradient of a float8 result
from one graph to another.

Values are computed in float32, rounded once to the compute dtype and then cast. On a GPU that is
a Triton kernel (two for a dynamic scale, or few rows); elsewhere, and with ``emulate=True``, plain
PyTorch. Roots, sums and exponentials may differ between them by float32 ulps; equal values do not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8.autograd import compute_dtype
from float8.cast import DelayedCast, make_cast
from float8.config import Float8LinearConfig
from float8.convert import FLOAT8_MODULES
from float8.formats import E4M3, HIGH_PRECISION_DTYPES
from float8.fused_autograd import Output, rms_norm_cast, runs_kernel, swiglu_cast
from float8.granularity import WHOLE
from float8.linear import with_state_of
from float8.tensor import Float8Tensor

_WHOLE = (WHOLE, WHOLE)


class _Producer(nn.Module):
    """Abstract: a module that casts what it computes, with ``cast_output``."""

    plain: str  # what to use where this module does not fit

    def _set_up(self, config: Float8LinearConfig | None, device: Any) -> None:
        if config is not None and not isinstance(config, Float8LinearConfig):
            raise TypeError(
                f"{type(self).__name__}: config must be a Float8LinearConfig, got {config!r}; a "
                'recipe is Float8LinearConfig.from_recipe_name("tensorwise")'
            )
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

    def _as_plain(self, cls: Any) -> Any:
        """A ``cls`` with the parameters, buffers, hooks and attributes of this module."""
        plain = with_state_of(self, cls)
        plain._modules.pop("cast_output")
        for name in ("config", "high_precision"):
            plain.__dict__.pop(name)
        return plain

    def _output(self, x: Tensor) -> Output:
        """How to cast what is computed from x."""
        cast, grad = self.config.plan.output.a, torch.is_grad_enabled()
        assert cast is not None
        return Output(
            cast,
            self.cast_output.state,
            self.training and grad,
            grad,
            compute_dtype(x),
            runs_kernel(x.device, self.config.emulate),
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
        # A plain checkpoint, or the part of one that is nobody's: a new history, in either case.
        weight = state_dict.get(prefix + "weight")
        if weight is not None:
            cast.start_beside(weight)
        else:
            cast.reset_parameters()


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
        if eps is not None and not isinstance(eps, (int, float)):
            raise TypeError(f"RMSNormCast: eps must be a number, got {eps!r}; config is a keyword")
        nn.RMSNorm.__init__(self, normalized_shape, eps, elementwise_affine, device, dtype)
        self._set_up(config, device)

    @classmethod
    def from_float(cls, norm: nn.RMSNorm, config: Float8LinearConfig | None = None) -> RMSNormCast:
        """An RMSNormCast with the parameters, hooks and mode of ``norm``, which it shares."""
        self: RMSNormCast = with_state_of(norm, cls)
        self._set_up(config, None if norm.weight is None else norm.weight.device)
        return self

    def to_float(self) -> nn.RMSNorm:
        """The plain ``nn.RMSNorm``; the inverse of `from_float`, parameters shared."""
        return self._as_plain(nn.RMSNorm)

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
        return rms_norm_cast(x, self.weight, eps, self._output(x))


class SwiGLU(nn.Module):
    """``silu(gate) * up`` in high precision: what `SwiGLUCast` is without its cast."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Of two (..., F), or of one (..., 2 F) that holds both, the gate first: (..., F)."""
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return F.silu(gate) * up


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

    def to_float(self) -> SwiGLU:
        """The plain gate."""
        return self._as_plain(SwiGLU)

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
            return SwiGLU.forward(self, gate, up)  # type: ignore[arg-type]
        self._check(gate, up)
        return swiglu_cast(gate, up, self._output(gate))

    def _check(self, gate: Tensor, up: Tensor | None) -> None:
        self._check_input(gate)
        if up is None and (gate.dim() == 0 or gate.shape[-1] % 2):
            raise ValueError(f"SwiGLUCast: gate and up have no halves in {tuple(gate.shape)}")
        if up is not None and up.dtype != gate.dtype:
            raise TypeError(f"SwiGLUCast: gate is {gate.dtype} and up {up.dtype}; convert one")
        if up is not None and (up.shape != gate.shape or gate.dim() == 0):
            raise ValueError(f"SwiGLUCast: gate is {tuple(gate.shape)} and up {tuple(up.shape)}")


FLOAT8_MODULES += [RMSNormCast, SwiGLUCast]
