"""How an operand of a layer becomes float8: `DynamicCast`, `DelayedCast`, `StaticCast`, `NoCast`.

Each is a module that turns a high-precision tensor into a `Float8Tensor` (`NoCast` returns it as it
is) and that `Float8Linear` owns one of per operand, under ``cast_input``, ``cast_weight`` and
``cast_grad_output``. Only `DelayedCast` has state, all of it in float32 buffers:

=============== ======== =======================================================================
buffer          shape    meaning, and who writes it
=============== ======== =======================================================================
amax_history    (H,)     the last H amaxes, newest first; written by ``sync`` and by loading
scale           ()       the scale in use, 0 before the first; written by ``sync`` and by loading
current_amax    ()       the running maximum since the last ``sync``; written by forward, backward
scale_age       ()       with an ``interval`` > 1 only: how many syncs ago the scale was found, inf
                         before the first; written by ``sync`` and by loading
=============== ======== =======================================================================

The buffers stay float32 whatever ``module.to(dtype)`` asks for, come to life again after
``to_empty``, and are optional in a checkpoint: a plain one loads strictly and starts a new history.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from float8.config import CastConfig, DelayedScalingConfig, ScalingType
from float8.formats import Format, format_of, on_device
from float8.linear.scaling import DelayedState
from float8.linear.switch import Switchable
from float8.tensor import Float8Tensor


class Cast(nn.Module):
    """Abstract: how one operand becomes float8. Made by `make_cast`.

    Args:
        config: what the user asked for.
        default_format: the format where ``config.target_dtype`` is None.
    """

    def __init__(self, config: CastConfig, default_format: Format) -> None:
        super().__init__()
        self.config = config
        self.format = format_of(config.target_dtype or default_format)

    @property
    def state(self) -> DelayedState | None:
        """The buffers that a GEMM's cast reads and records in, or None."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        """Cast ``x`` of any shape, recording nothing; gradients pass straight through.

        Returns:
            a `Float8Tensor` of x's shape and dtype.
        """
        config = self.config
        return Float8Tensor.from_high_precision(
            x,
            on_device(self.format, x.device),
            config.granularity,
            self._scale(),
            config.power_of_two_scale,
        )

    def _scale(self) -> Tensor | float | None:
        """The scale to cast with; None computes it from the tensor."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def extra_repr(self) -> str:
        """The cast in a few words."""
        return self.config.short_str.replace("default", self.format.name)


class DynamicCast(Cast):
    """The scale comes from the tensor itself."""

    def _scale(self) -> None:
        return None


class StaticCast(Cast):
    """The scale is a constant."""

    def _scale(self) -> float | None:
        return self.config.static_scale


class NoCast(Cast):
    """The operand stays in high precision."""

    def forward(self, x: Tensor) -> Tensor:
        """``x``, as it is."""
        return x


# Number -> cast, for the op by which ``sync`` marks casts as ready.
DELAYED_CASTS: weakref.WeakValueDictionary[int, DelayedCast] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class DelayedCast(Switchable, Cast):
    """The scale comes from the amaxes of past steps.

    Args:
        config, default_format: see `Cast`.
        delayed: how scales follow from the history.
        amax_init: use the dynamic scale until the first ``sync``; False starts from scale 1.
        device: where the buffers live.
    """

    amax_history: Tensor
    scale: Tensor
    current_amax: Tensor
    scale_age: Tensor

    def __init__(
        self,
        config: CastConfig,
        default_format: Format,
        delayed: DelayedScalingConfig,
        amax_init: bool,
        device: torch.device | str | None,
    ) -> None:
        super().__init__(config, default_format)
        self.delayed = delayed
        self.amax_init = amax_init
        # Written by sync and by loading only: a flag that forward wrote would break recomputation
        # and CUDA graphs. Compiled code is specialised on it, hence one recompile after step 1.
        self.history_ready = not amax_init
        self.synced = False  # whether sync has ever been called, for its reminder
        self.hidden = False  # whether state dicts leave the history out, under high_precision too
        self._add_switch()
        shapes = {"amax_history": (delayed.history_len,), "scale": (), "current_amax": ()}
        if delayed.interval > 1:  # a tensor, so that a compiled sync counts without recompiling
            shapes["scale_age"] = ()
        with torch.inference_mode(False):  # or a model converted inside it could not train later
            for name, shape in shapes.items():
                self.register_buffer(name, torch.zeros(shape, dtype=torch.float32, device=device))
        self.reset_parameters()
        self._enrol()

    def _enrol(self) -> None:
        self.number = next(_numbers)  # unique in this process
        DELAYED_CASTS[self.number] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For copies and pickles, which have numbers of their own."""
        super().__setstate__(state)
        self._enrol()

    def reset_parameters(self) -> None:
        """Forget the history."""
        self.amax_history.zero_()
        self.scale.fill_(0.0 if self.amax_init else 1.0)
        self.current_amax.zero_()
        if "scale_age" in self._buffers:
            self.scale_age.fill_(torch.inf)
        self.history_ready = not self.amax_init

    @property
    def state(self) -> DelayedState:
        """The buffers that a GEMM's cast reads and records in.

        Raises:
            TypeError: somebody replaced them by others than float32, around ``module.to``.
        """
        if self.scale.dtype != torch.float32:
            raise TypeError(
                f"a delayed cast keeps its scale and history in float32, found {self.scale.dtype}: "
                "with FullyShardedDataParallel leave buffer_dtype of MixedPrecision at None"
            )
        return DelayedState(self.scale, self.current_amax, self.history_ready)

    @property
    def format_on_device(self) -> Format:
        """The format that the device of the buffers multiplies."""
        return on_device(self.format, self.scale.device)

    def _scale(self) -> Tensor | None:
        return self.scale if self.history_ready else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DelayedCast:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            assert old is not None
            assert new is not None
            if new.device == old.device:
                # model.to(bfloat16) must not round the scales; and to_empty comes again where a
                # second layer has this cast too.
                self._buffers[name] = old
            elif new.dtype != torch.float32:
                self._buffers[name] = old.to(new.device)
            if old.is_meta and not new.is_meta:  # to_empty leaves whatever was in that memory
                self.reset_parameters()
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if not (self.hidden or self.high_precision):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if not any(prefix + name in state_dict for name in self._buffers):
            return  # a plain checkpoint; if it brings a weight, the layer calls start_beside
        self._take_age_from(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.float()  # assign=True keeps a checkpoint's dtype
        scale = self.scale
        self.history_ready = not scale.is_meta and bool(scale.isfinite() & (scale > 0))

    def _take_age_from(self, state_dict: dict[str, Any], prefix: str) -> None:
        """A checkpoint of another interval loads: without an age, the scale is found at once."""
        key = prefix + "scale_age"
        if "scale_age" not in self._buffers:
            state_dict.pop(key, None)
        elif key not in state_dict:
            state_dict[key] = torch.full_like(
                state_dict.get(prefix + "scale", self.scale), torch.inf
            )

    def start_beside(self, weight: Tensor) -> None:
        """Start a new history for a weight that was loaded without one."""
        if self.scale.is_meta and not weight.is_meta:  # load_state_dict(assign=True) onto meta
            self.to_empty(device=weight.device)
        self.reset_parameters()


def make_cast(
    config: CastConfig,
    default_format: Format,
    delayed: DelayedScalingConfig,
    amax_init: bool = True,
    device: torch.device | str | None = None,
) -> Cast:
    """The `Cast` that ``config.scaling_type`` names."""
    if config.scaling_type is ScalingType.DELAYED:
        return DelayedCast(config, default_format, delayed, amax_init, device)
    stateless = {
        ScalingType.DYNAMIC: DynamicCast,
        ScalingType.STATIC: StaticCast,
        ScalingType.DISABLED: NoCast,
    }
    return stateless[config.scaling_type](config, default_format)
