"""`Float8Linear`: an ``nn.Linear`` whose three GEMMs run in float8.

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

Only GEMMs whose result is wanted run: a frozen weight costs no grad_weight GEMM and saves no input.
The autograd function works on plain ``(data, scale)`` pairs, opaque to nothing: compile,
checkpointing, saved-tensor hooks and FSDP see ordinary tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8 import kernels
from float8.cast import Cast, make_cast
from float8.config import Float8LinearConfig, Gemm, LinearPlan
from float8.formats import E4M3, E5M2, HIGH_PRECISION_DTYPES
from float8.kernels.scaled_mm import architecture
from float8.refusals import refuses_call, refuses_layer
from float8.scaling import DelayedState, quantize

Pair = tuple[Tensor, Tensor]
States = tuple[DelayedState | None, DelayedState | None, DelayedState | None]
STATELESS: States = (None, None, None)


def _product(
    gemm: Gemm,
    a: Pair,
    b: Pair,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: Float8LinearConfig,
) -> Tensor:
    assert gemm.a is not None
    assert gemm.b is not None
    return kernels.scaled_mm(
        *a,
        *b,
        gemm.a.block,
        gemm.b.block,
        bias,
        out_dtype=dtype,
        use_fast_accum=gemm.use_fast_accum,
        emulate=config.emulate,
        pad=config.pad_inner_dim,
    )


def _transposed(pair: Pair) -> Pair:
    data, scale = pair
    return data.t(), scale.t()


def _as_matrix(x: Tensor) -> Tensor:
    """(..., K) -> (M, K), also where M or K is 0."""
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
    ) -> Tensor:
        plan = config.plan
        # Rounding to the compute dtype first makes autocast, DDP and FSDP cast the same bits.
        x_MK = _as_matrix(x).to(dtype)
        bias = None if bias_N is None else bias_N.to(dtype)
        x_pair = w_scale = None
        if plan.output.a is not None and plan.output.b is not None:
            x_pair = quantize(x_MK, plan.output.a, states[0], record)
            w_pair = quantize(w_NK.to(dtype), plan.output.b, states[1], record)
            w_scale = w_pair[1] if plan.reuses_weight else None
            out_MN = _product(plan.output, x_pair, w_pair, bias, dtype, config)
        else:
            out_MN = F.linear(x_MK, w_NK.to(dtype), bias)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        saved_x = _saved_input(plan, x_MK, x_pair, states[0]) if needs_w else (None, None)
        saved_w = (w_NK, w_scale) if needs_x else (None, None)
        ctx.save_for_backward(*saved_x, *saved_w)
        ctx.config, ctx.dtype, ctx.states, ctx.record = config, dtype, states, record
        ctx.x_shape, ctx.x_dtype, ctx.w_dtype = x.shape, x.dtype, w_NK.dtype
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        return out_MN.reshape(*x.shape[:-1], w_NK.shape[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        with _without_autocast(g.device.type):
            return _Float8LinearFunction._gradients(ctx, g)

    @staticmethod
    def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        plan: LinearPlan = ctx.config.plan
        x_KM, x_scale, w_NK, w_scale = _saved_tensors(ctx)
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        g_MN = _as_matrix(g)
        grad_x = grad_w = g_pair = None
        if needs_x and plan.grad_input.a is not None and plan.grad_input.b is not None:
            g_pair = quantize(g_MN, plan.grad_input.a, ctx.states[2], ctx.record)
            if needs_w and plan.reuses_grad_output:
                g_pair = (kernels.prepare(g_pair[0], ctx.config.emulate), g_pair[1])
            w_pair = _weight_for_grad_input(plan, w_NK.to(ctx.dtype), w_scale, ctx.states[1])
            grad_x = _product(plan.grad_input, g_pair, w_pair, None, ctx.dtype, ctx.config)
        elif needs_x:
            grad_x = g_MN @ w_NK.to(ctx.dtype)
        if needs_w and plan.grad_weight.a is not None:
            if g_pair is not None and plan.reuses_grad_output:
                g_pair = _transposed(g_pair)
            else:
                g_pair = quantize(g_MN.t(), plan.grad_weight.a, ctx.states[2], ctx.record)
            x_pair = (x_KM, x_scale)
            grad_w = _product(plan.grad_weight, g_pair, x_pair, None, ctx.dtype, ctx.config)
        elif needs_w:
            grad_w = g_MN.t() @ x_KM.t()
        return (
            None if grad_x is None else grad_x.reshape(ctx.x_shape).to(ctx.x_dtype),
            None if grad_w is None else grad_w.to(ctx.w_dtype),
            g_MN.sum(0).to(ctx.bias_dtype) if needs_bias else None,
            *(None,) * 4,
        )


def _saved_input(
    plan: LinearPlan, x_MK: Tensor, x_pair: Pair | None, state: DelayedState | None
) -> tuple[Tensor, Tensor | None]:
    """The x_KM that grad_weight will read: float8 data and scale, or high precision and None."""
    if plan.grad_weight.b is None:
        return x_MK.t(), None
    if x_pair is not None and plan.reuses_input:
        return _transposed(x_pair)
    return quantize(x_MK.t(), plan.grad_weight.b, state)


def _weight_for_grad_input(
    plan: LinearPlan, w_NK: Tensor, w_scale: Tensor | None, state: DelayedState | None
) -> Pair:
    """w_KN in float8: forward's cast again, with its scale, where the two are the same cast."""
    if plan.output.b is not None and w_scale is not None:
        return _transposed(quantize(w_NK, plan.output.b, scale=w_scale))
    assert plan.grad_input.b is not None
    return quantize(w_NK.t(), plan.grad_input.b, state)


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


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    # Autocast would convert the codes that the reference multiplies in bfloat16.
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Float8Linear has no second derivative, and backward was called with create_graph=True;"
            " run the model under float8.high_precision(model) for it"
        )


class Float8Linear(nn.Linear):
    """An ``nn.Linear`` that multiplies in float8; parameters, shapes and checkpoints are its own.

    ``weight`` is always the high-precision parameter, so initialisation, clipping, averaging and
    optimizers see what they expect.

    Args:
        in_features, out_features, bias, device, dtype: as ``nn.Linear``.
        config: recipe or own configuration; dynamic tensorwise by default.

    Raises:
        ValueError: the config asks for a product that no hardware runs, and not for emulation.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: Float8LinearConfig | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_up(config or Float8LinearConfig())

    @classmethod
    def from_float(
        cls, linear: nn.Linear, config: Float8LinearConfig | None = None, fqn: str = ""
    ) -> Float8Linear:
        """A Float8Linear with the parameters, hooks and mode of ``linear``, which it shares.

        Args:
            linear: the layer; it stays usable.
            config: dynamic tensorwise by default.
            fqn: the layer's name in its model, for error messages.
        """
        refusal = refuses_layer(linear.weight, config or Float8LinearConfig())
        if refusal is not None:
            raise ValueError(f"{fqn or 'nn.Linear'}: {refusal}")
        self = _with_state_of(linear, cls)
        self._set_up(config or Float8LinearConfig(), fqn)
        return self

    def to_float(self) -> nn.Linear:
        """The plain ``nn.Linear``; the inverse of `from_float`, parameters shared."""
        plain = _with_state_of(self, nn.Linear)
        for name in (*_CAST_NAMES, *_OWN_ATTRIBUTES):
            plain._modules.pop(name, None)
            plain.__dict__.pop(name, None)
        return plain

    def _set_up(self, config: Float8LinearConfig, fqn: str = "") -> None:
        self.config = config
        self.fqn = fqn
        self.high_precision = False  # set by the context manager float8.high_precision
        formats = (E4M3, E4M3, E5M2)
        casts = (
            config.cast_config_input,
            config.cast_config_weight,
            config.cast_config_grad_output,
        )
        for name, cast, fmt in zip(_CAST_NAMES, casts, formats, strict=True):
            delayed, amax_init = config.delayed_scaling, config.enable_amax_init
            module = make_cast(cast, fmt, delayed, amax_init, self.weight.device)
            self.add_module(name, module.train(self.training))

    @property
    def casts(self) -> tuple[Cast, Cast, Cast]:
        """The casts of input, weight and grad_output."""
        return self.cast_input, self.cast_weight, self.cast_grad_output  # type: ignore[return-value]

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``: (..., in_features) -> (..., out_features).

        Raises:
            TypeError: the input's dtype is not the weight's (outside autocast) or not supported.
            ValueError: wrong last dimension, or a product that the device does not run; the
                message names the layer and the fix.
        """
        if self.high_precision:
            return F.linear(input, self.weight, self.bias)
        device_type = input.device.type
        autocasts = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocasts else input.dtype
        if self.config.enable_pre_and_post_forward:
            self._check_input(input, autocasts)
            self._check_device(input, dtype)
        record = self.training and torch.is_grad_enabled()
        states = tuple(cast.state for cast in self.casts)
        args = (input, self.weight, self.bias, self.config, dtype, states, record)
        with _without_autocast(device_type):
            return _Float8LinearFunction.apply(*args)

    def _check_input(self, input: Tensor, autocasts: bool) -> None:
        name = self.fqn or type(self).__name__
        if input.dtype not in HIGH_PRECISION_DTYPES:
            known = ", ".join(str(dtype) for dtype in HIGH_PRECISION_DTYPES)
            raise TypeError(f"{name}: input is {input.dtype}; float8 is cast from {known}")
        if not autocasts and input.dtype != self.weight.dtype:
            raise TypeError(
                f"{name}: input is {input.dtype} and weight {self.weight.dtype}; convert one of "
                "them or use torch.autocast"
            )
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"{name}: input has shape {tuple(input.shape)}, expected (..., {self.in_features})"
            )

    def _check_device(self, input: Tensor, dtype: torch.dtype) -> None:
        if input.device.type != "cuda" or self.config.emulate:
            return
        tokens = input.numel() // max(self.in_features, 1)
        grad = torch.is_grad_enabled()
        arch = architecture(input.device.index)
        reason = refuses_call(self.config, self.weight, tokens, dtype, arch, grad)
        if reason is not None:
            raise ValueError(f"{self.fqn or type(self).__name__}: {reason}")

    def extra_repr(self) -> str:
        """As ``nn.Linear``, and what differs from the casts printed below it."""
        parts = [super().extra_repr()]
        for field in (
            "cast_config_input_for_grad_weight",
            "cast_config_weight_for_grad_input",
            "cast_config_grad_output_for_grad_weight",
        ):
            override = getattr(self.config, field)
            if override is not None:
                parts.append(f"{field.removeprefix('cast_config_')}={override.short_str}")
        return ", ".join(parts)


_CAST_NAMES = ("cast_input", "cast_weight", "cast_grad_output")
_OWN_ATTRIBUTES = ("config", "fqn", "high_precision")


def _with_state_of(source: nn.Linear, cls: Any) -> Any:
    """A ``cls`` with the parameters, buffers, hooks and attributes of ``source``."""
    new = cls.__new__(cls)
    new.__dict__ = dict(source.__dict__)
    # Own dicts for what either module may replace; the hook dicts stay shared, because the
    # handles that users hold remove hooks from them.
    for name in ("_parameters", "_buffers", "_modules"):
        new.__dict__[name] = dict(source.__dict__[name])
    return new


def float8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    config: Float8LinearConfig | None = None,
) -> Tensor:
    """``input @ weight.T + bias`` in float8: the functional form, for recipes without state.

    Args:
        input: (..., K), float32, bfloat16 or float16.
        weight: (N, K) of the same dtype.
        bias: (N,) or None.
        config: dynamic tensorwise by default.

    Returns:
        (..., N).

    Raises:
        ValueError: the config is delayed, which needs a module to keep its history, or asks for a
            product that no hardware runs.
        TypeError: dtypes differ or are not supported.
    """
    config = config or Float8LinearConfig()
    if config.uses_delayed_scaling:
        raise ValueError(
            "float8_linear keeps no amax history; use Float8Linear for delayed scaling, or a "
            "dynamic or static recipe"
        )
    if (reason := refuses_layer(weight, config)) is not None:
        raise ValueError(f"float8_linear: {reason}")
    if input.dtype != weight.dtype:
        raise TypeError(f"float8_linear: input is {input.dtype} and weight {weight.dtype}")
    if input.dim() == 0 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"float8_linear: input {tuple(input.shape)} and weight {tuple(weight.shape)} do not "
            "multiply; expected (..., K) and (N, K)"
        )
    return _Float8LinearFunction.apply(input, weight, bias, config, input.dtype, STATELESS, False)
