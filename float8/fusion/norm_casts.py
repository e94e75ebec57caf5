"""Norms that return float8: `RMSNormCast` and `LayerNormCast`.

Often only GEMMs read the result of a norm. Written in bfloat16 and cast by the layers that read
it, it crosses memory two to five times. These modules write it once, as a `Float8Tensor` with its
transpose for the weight gradient, and `Float8Linear` takes that as its input::

    config = Float8LinearConfig.from_recipe_name("delayed")

    class Readout(nn.Module):
        def __init__(self, dim, classes):
            super().__init__()
            self.norm = RMSNormCast(dim, config=config)
            self.linear = nn.Linear(dim, classes, bias=False)

        def forward(self, x):
            return self.linear(self.norm(x))

    model = convert_to_float8_training(Readout(64, 128), config=config)

The modules and the layers that read them take the same config, whose input cast is tensorwise:
dynamic, delayed or static. ``cast_output`` replaces the layers' ``cast_input`` and has its state,
which ``sync_float8_amax_and_scale_history(model)`` updates. Compile a module together with the
layers that read it, in one graph: torch.compile cannot pass the gradient of a float8 result from
one graph to another. `float8.fuse_norms` replaces the norms of a model that is converted already.

Values are computed in float32, rounded once to the compute dtype and then cast. On a GPU a Triton
kernel does that (two for a dynamic scale, or few rows); elsewhere, and with ``emulate=True``, plain
PyTorch. Roots and sums may differ between the two by float32 ulps; equal float32 values are cast to
equal bits.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from float8.config import Float8LinearConfig, check_config
from float8.formats import E4M3
from float8.fusion.norm_autograd import NormCall, cast_norm, runs_kernels
from float8.granularity import WHOLE
from float8.linear.casts import DelayedCast, set_cast, start_histories
from float8.linear.module import Float8Module, with_state_of
from float8.linear.plan import plan_of

N = TypeVar("N", bound="NormCast")


def reason_against_config(config: Float8LinearConfig) -> str | None:
    """The reason why the input of a layer of this config cannot be cast before it, or None."""
    cast, second = config.gemms.output.a, config.cast_config_input_for_grad_weight
    if config.smooth_input:
        return "finds no factors of channels, and the config has smooth_input=True"
    x_again = config.gemms.grad_weight.b
    reads_once = config.dequantize_in_backward or (cast is not None and cast == x_again)
    if cast is not None and cast.block == (WHOLE, WHOLE) and reads_once:
        return None
    again = f", for grad_weight '{second.summary}'" if second is not None else ""
    return (
        "casts once, by one scale per tensor; cast_config_input is "
        f"'{config.cast_config_input.summary}'{again}"
    )


class NormCast(Float8Module):
    """Abstract: a norm over the last dimension, cast with ``cast_output``."""

    is_centred: ClassVar[bool]  # whether it subtracts the mean
    own_names: tuple[str, ...] = ("config", "fqn", "cast_output")
    cast_output: DelayedCast | None  # None of a cast without state
    fqn: str
    normalized_shape: tuple[int, ...]
    weight: Any
    bias: Any
    eps: Any

    def __init__(
        self, *args: Any, config: Float8LinearConfig | str | None = None, **kwargs: Any
    ) -> None:
        self.plain_type.__init__(self, *args, **kwargs)
        self._set_up(config, kwargs.get("device") if self.weight is None else self.weight.device)

    @classmethod
    def from_float(
        cls: type[N],
        norm: nn.Module,
        config: Float8LinearConfig | str | None = None,
        fqn: str = "",
        attributes: dict[str, Any] | None = None,
    ) -> N:
        """One with the parameters, hooks and mode of ``norm``, which it shares.

        ``config`` is that of the layers that read the result, dynamic tensorwise by default.
        ``fqn`` is the norm's name in its model, for error messages. A norm of another type than
        ``plain_type`` that computes the same needs ``attributes``: those of torch's
        ``normalized_shape``, ``eps`` and ``elementwise_affine`` that it lacks. Raises TypeError for
        another type without them, and ValueError for more than one dimension or an input cast that
        is not tensorwise.
        """
        if attributes is None and not isinstance(norm, cls.plain_type):
            plain = cls.plain_type.__name__
            raise TypeError(f"{fqn or cls.__name__}: a {type(norm).__name__} is not nn.{plain}")
        self: N = with_state_of(norm, cls)
        if attributes is not None:
            self.__dict__ |= attributes
            self.plain_type, self.own_names = type(norm), (*cls.own_names, *attributes)
        self._set_up(config, None if self.weight is None else self.weight.device, fqn)
        return self

    def _set_up(self, config: Float8LinearConfig | str | None, device: Any, fqn: str = "") -> None:
        self.fqn = fqn
        config = check_config("tensorwise" if config is None else config, self._name)
        reason = reason_against_config(config)
        if len(self.normalized_shape) != 1:
            reason = f"normalized_shape is {tuple(self.normalized_shape)}, and a GEMM reads rows"
        if reason is not None:
            plain = type(self).plain_type.__name__
            raise ValueError(
                f"{self._name} {reason}: use nn.{plain}, and Float8Linear casts its input"
            )
        self.config = config
        self._add_switch()
        set_cast(self, "cast_output", config.cast_config_input, E4M3, config, device)

    def share_cast(self, cast: DelayedCast) -> None:
        """Cast with the ``cast_input`` of a layer, which saves, loads and moves it."""
        self._modules.pop("cast_output", None)
        self.__dict__["cast_output"] = cast  # no child of this module

    @property
    def _name(self) -> str:
        # For messages only, as of `Float8Linear`.
        return f"{self.fqn} ({type(self).__name__})" if self.fqn else type(self).__name__

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x: (..., K) -> a `Float8Tensor` (..., K).

        Raises ValueError if its last dimension is not K.
        """
        if self.high_precision:
            return self.plain_type.forward(self, x)
        if x.shape[-1:] != self.normalized_shape:
            expected = f"(..., {self.normalized_shape[0]})"
            raise ValueError(f"{self._name}: input is {tuple(x.shape)}, expected {expected}")
        state = None if self.cast_output is None else self.cast_output.state
        grad = torch.is_grad_enabled()
        if state is not None and state.scale.device != x.device:  # it would stay dynamic
            raise ValueError(f"{self._name}: input is on {x.device}, cast_output is not: move it")
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        by_kernel = runs_kernels(x.device, self.config.emulate)
        how = plan_of(self.config, x), state, self.training and grad, grad, by_kernel
        return cast_norm(x, self.weight, self.bias, NormCall(eps, self.is_centred, *how))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        start_histories(self, state_dict, prefix)


class RMSNormCast(NormCast, nn.RMSNorm):
    """``nn.RMSNorm`` over the last dimension, in float8; parameters and checkpoints are its own.

    ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        normalized_shape: K, the size of the last dimension.
        eps: added to the mean square; float32's epsilon by default.
        args, kwargs: as ``nn.RMSNorm``, elementwise_affine, device and dtype too.
        config: of the layers that read the result; dynamic tensorwise by default.

    Raises:
        ValueError: more than one dimension, or an input cast that is not tensorwise.
    """

    is_centred = False
    plain_type = nn.RMSNorm
    bias = None


class LayerNormCast(NormCast, nn.LayerNorm):
    """``nn.LayerNorm`` over the last dimension, in float8; parameters and checkpoints are its own.

    ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Args:
        normalized_shape: K, the size of the last dimension.
        eps: added to the variance.
        args, kwargs: as ``nn.LayerNorm``, elementwise_affine, bias, device and dtype too.
        config: of the layers that read the result; dynamic tensorwise by default.

    Raises:
        ValueError: more than one dimension, or an input cast that is not tensorwise.
    """

    is_centred = True
    plain_type = nn.LayerNorm
