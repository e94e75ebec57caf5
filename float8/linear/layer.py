"""`Float8Linear`: an ``nn.Linear`` whose three GEMMs run in float8 (see `float8.linear.autograd`).

The layer owns the parameters, the configuration, the three casts and their state, and the checks
that put its name in their messages. `float8_linear` is the functional form, for recipes without
state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8.arguments import check_tensors, check_type, described
from float8.config import Float8LinearConfig, check_config
from float8.formats import E4M3, E5M2
from float8.linear.autograd import (
    STATELESS,
    Call,
    Float8LinearFunction,
    States,
)
from float8.linear.casts import DelayedCast, set_cast, start_histories
from float8.linear.float8_weight import float8_weight
from float8.linear.module import with_state_of
from float8.linear.onnx_graph import linear_in_onnx, to_onnx, weight_in_onnx
from float8.linear.plan import autocasts, plan_of
from float8.linear.refusals import error_of_call, reason_against_layer
from float8.linear.resident import input_scale_of, is_resident
from float8.linear.smoothing import SmoothLinearFunction, factors_of_channels
from float8.linear.weight_cache import CastsWeights
from float8.tensor import Float8Tensor

_CAST_NAMES = ("cast_input", "cast_weight", "cast_grad_output")


class Float8Linear(CastsWeights, nn.Linear):
    """An ``nn.Linear`` that multiplies in float8, with the same parameters and checkpoints.

    ``weight`` is the high-precision parameter, so initialisation, clipping, averaging and
    optimizers work as on ``nn.Linear``. It is a `Float8Tensor` while FSDP2 has gathered it in
    float8, and after `float8.convert_to_float8_inference`; forward does not cast it then.

    Args:
        in_features, out_features, bias, device, dtype: as ``nn.Linear``.
        config: a config or the name of a recipe; by default dynamic tensorwise.

    Raises:
        TypeError: ``config`` has another type, such as torchao's config.
        ValueError: an unknown recipe; or no hardware runs one of the config's products, and
            ``emulate`` is False.
    """

    plain_type: type[nn.Linear] = nn.Linear
    own_names = (*_CAST_NAMES, "config", "function", "fqn", "cached_weights")
    function: Any = Float8LinearFunction  # forward, and ``gradients``, those of its backward
    cast_input: DelayedCast | None  # None of a cast without state
    cast_weight: DelayedCast | None
    cast_grad_output: DelayedCast | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: Float8LinearConfig | str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_up(config)

    @classmethod
    def from_float(
        cls, linear: nn.Linear, config: Float8LinearConfig | str | None = None, fqn: str = ""
    ) -> Float8Linear:
        """A Float8Linear that shares the parameters and hooks of ``linear``, in the same mode.

        The inverse is ``to_float``, which gives a plain ``nn.Linear``.

        Args:
            linear: the layer, an ``nn.Linear`` of any sizes; it stays usable.
            config: a config or the name of a recipe; dynamic tensorwise by default.
            fqn: the layer's name in its model, for error messages.
        """
        check_type(linear, nn.Linear, f"{cls.__name__}.from_float", "linear", "an nn.Linear")
        self = with_state_of(linear, cls)
        self._set_up(config, fqn)
        return self

    def _set_up(self, config: Float8LinearConfig | str | None, fqn: str = "") -> None:
        config = "tensorwise" if config is None else config
        config = check_config(config, fqn or type(self).__name__)
        if (reason := reason_against_layer(self.weight, config)) is not None:
            raise ValueError(f"{fqn or 'Float8Linear'}: {reason}")
        self.config = config
        self.function = function_of(config)
        self.fqn = fqn
        self._add_switch()
        self.cached_weights = {}
        for name, cast, fmt in zip(_CAST_NAMES, config.operand_casts, _FORMATS, strict=True):
            set_cast(self, name, cast, fmt, config, self.weight.device)

    @property
    def float8_config(self) -> Float8LinearConfig:  # type: ignore[override]
        """The config of the layer's products."""
        return self.config

    @property
    def casts(self) -> list[DelayedCast]:
        """The casts that have a state, in the order of input, weight and grad_output."""
        casts = self.cast_input, self.cast_weight, self.cast_grad_output
        return [cast for cast in casts if cast is not None]

    @property
    def states(self) -> States:
        """The states of the casts of input, weight and grad_output, None of one without state."""
        x, w, g = self.cast_input, self.cast_weight, self.cast_grad_output
        return (
            None if x is None else x.state,
            None if w is None else w.state,
            None if g is None else g.state,
        )

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``: (..., in_features) -> (..., out_features).

        An input that is a `Float8Tensor` in the format and granularity of the config is not cast
        again; its gradient has the high-precision dtype that it reports.

        Raises:
            TypeError: the input's dtype is not the weight's (outside autocast) or not supported.
            ValueError: wrong last dimension, or a product that the device does not run; the
                message names the layer and the fix.
        """
        is_evaluated = self.evaluates_in_high_precision and not (
            self.training or torch.is_grad_enabled()
        )
        if self.switch.is_off or is_evaluated:  # `high_precision`, without a call
            return self._plain_forward(
                input.dequantize() if isinstance(input, Float8Tensor) else input
            )
        if not isinstance(input, Tensor):
            raise TypeError(f"{self._name}: input must be a torch.Tensor, got {described(input)}")
        weight = self.weight
        call = self.begin_call(input, weight)
        if torch.compiler.is_exporting() and to_onnx():
            return linear_in_onnx(self, input, call)
        return self.function.apply(input, weight, self.bias, call)

    def _plain_forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self._plain_weight(), self.bias)

    def _plain_weight(self) -> Tensor:
        """The weight in high precision; a float8 weight is dequantised."""
        weight = self.weight
        if not isinstance(weight, Float8Tensor):
            return weight
        return weight_in_onnx(weight) if to_onnx() else weight.dequantize()

    # --- for `float8.numerics`; tensor-parallel layers have others

    def local_operands(self, input: Tensor) -> tuple[Tensor, Tensor, States]:
        """This rank's part of the input and of the weight, as a call casts them, and the states.

        With ``smooth_input`` a call casts their products with `local_factors`.
        """
        return input, self.weight, self.states

    def local_factors(self, input: Tensor, x_MK: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of a smooth input: those of this rank's part, and those of all its columns.

        Args:
            input: of the call.
            x_MK: its part that `local_operands` returns, in the compute dtype.
        """
        factors_1K = factors_of_channels(x_MK)
        return factors_1K, factors_1K

    def local_grad_output(self, grad_output: Tensor) -> Tensor:
        """This rank's part of a gradient of the layer's output, as backward casts it."""
        return grad_output

    # ---

    @property
    def _name(self) -> str:
        # For error messages only. torch.compile guards on all that forward reads, and a guard on a
        # name would keep layers from sharing a graph.
        return self.fqn or type(self).__name__

    def begin_call(self, input: Tensor, weight: Tensor) -> Call:
        """The parameters of a call with this input and weight, which are noted to run in float8.

        Raises what `forward` does for an input that does not fit.
        """
        plan, grad = plan_of(self.config, input, weight), torch.is_grad_enabled()
        if torch.compiler.is_compiling():
            self.switch.note_call(traced=True)
        else:
            self.switch.was_on = True
        # A Float8Tensor that does not fit, or blocks that cross the parts of a DTensor, would be
        # multiplied by scales of other elements.
        is_risky = isinstance(input, Float8Tensor) or plan.is_tiled
        if self.config.enable_pre_and_post_forward or is_risky:
            error = error_of_call(input, weight, plan)
            if error is not None:
                raise type(error)(f"{self._name}: {error}")
        is_cast = self.cached_weights or isinstance(weight, Float8Tensor)
        cast = float8_weight(self, plan) if is_cast else None
        states = self.states if plan.has_delayed else STATELESS
        return Call(plan, states, self.training and grad, cast, has_backward=grad)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        start_histories(self, state_dict, prefix)

    @property
    def weight_scale(self) -> Tensor | None:
        """The scale of a resident float8 weight, under its name in checkpoints; else None."""
        return self.weight.scale if is_resident(self.weight) else None

    @property
    def input_scale(self) -> Tensor | None:
        """The static scale of inputs beside a resident weight, under its name in checkpoints."""
        return input_scale_of(self)

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without the cached weight."""
        return self.__dict__ | {"cached_weights": {}}

    def extra_repr(self) -> str:
        """As ``nn.Linear``, and the casts of the config."""
        flags = ("smooth_input", "dequantize_in_backward", "mxfp4_weights")
        parts = [super().extra_repr(), *[f"{n}=True" for n in flags if getattr(self.config, n)]]
        shown = _OPERANDS[:2] if self.config.dequantize_in_backward else _OPERANDS
        for name, fmt in zip(shown, (*_FORMATS, *_FORMATS), strict=False):
            if (cast := getattr(self.config, f"cast_config_{name}")) is not None:
                parts.append(f"{name}={cast.summary.replace('default', fmt.name)}")
        return ", ".join(parts)


_HALVES = (torch.bfloat16, torch.float16)


class Float8CastingLinear(Float8Linear):
    """A Float8Linear that converts its weight to the dtype of its input, such as bfloat16.

    It replaces layers of scripts without autocast, whose forward is
    ``F.linear(x, self.weight.to(x.dtype), self.bias)``; see `float8.convert.register_linear_type`.
    """

    @classmethod
    def from_float(
        cls, linear: nn.Linear, config: Float8LinearConfig | str | None = None, fqn: str = ""
    ) -> Float8Linear:
        """As `Float8Linear.from_float`; ``to_float`` gives the type of ``linear`` again."""
        self = super().from_float(linear, config, fqn)
        self.plain_type = type(linear)
        return self

    def forward(self, input: Tensor) -> Tensor:
        """As `Float8Linear`, in the dtype of ``input``: that of the weight, bfloat16 or float16."""
        dtype = input.dtype if isinstance(input, Tensor) else None
        is_other = dtype in _HALVES and dtype != self.weight.dtype
        if self.high_precision or not is_other or autocasts(input.device.type):
            return super().forward(input)
        if input.device.type == "meta":  # which has no autocast, and no values
            return self._plain_forward(input)
        with torch.autocast(input.device.type, dtype):
            return super().forward(input)

    def _plain_forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self._plain_weight().to(input.dtype), bias)


_OPERANDS = (
    *("input", "weight", "grad_output"),
    *("input_for_grad_weight", "weight_for_grad_input", "grad_output_for_grad_weight"),
)
_FORMATS = (E4M3, E4M3, E5M2)  # of the casts, by default


def function_of(config: Float8LinearConfig) -> Any:
    """The autograd function that multiplies; a feature of backward or of operands is another."""
    return SmoothLinearFunction if config.smooth_input else Float8LinearFunction


def float8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    config: Float8LinearConfig | str | None = None,
) -> Tensor:
    """``input @ weight.T + bias`` in float8: the functional form, for recipes without state.

    Args:
        input: (..., K), float32, bfloat16 or float16; or a `Float8Tensor` in the config's
            format and granularity.
        weight: (N, K) of the same dtype; for a float32 weight pass ``weight.to(input.dtype)``.
        bias: (N,) or None.
        config: a config or the name of a recipe; dynamic tensorwise by default.

    Returns:
        (..., N).

    Raises:
        ValueError: the config is delayed, which needs a module to keep its history; or no hardware
            runs one of its products.
        TypeError: an argument has another type, or dtypes differ or are not supported.
    """
    optional = {} if bias is None else {"bias": bias}
    check_tensors("float8_linear", input=input, weight=weight, **optional)
    config = check_config("tensorwise" if config is None else config, "float8_linear")
    if config.uses_delayed_scaling:
        raise ValueError(
            "float8_linear keeps no amax history; use Float8Linear for delayed scaling, or a "
            "dynamic or static recipe"
        )
    if (reason := reason_against_layer(weight, config)) is not None:
        raise ValueError(f"float8_linear: {reason}")
    if isinstance(weight, Float8Tensor):
        raise TypeError("float8_linear: weight is a Float8Tensor; pass weight.dequantize()")
    if weight.dim() != 2:
        raise ValueError(f"float8_linear: weight must be (N, K), got {tuple(weight.shape)}")
    plan, grad = plan_of(config, input, weight), torch.is_grad_enabled()
    if (error := error_of_call(input, weight, plan)) is not None:
        raise type(error)(f"float8_linear: {error}")
    call = Call(plan, has_backward=grad)
    return function_of(config).apply(input, weight, bias, call)
