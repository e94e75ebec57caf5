"""`DelayedCast`: a cast whose scale follows from the amaxes of past steps; and its state.

`DelayedCast` owns the state, all of it in float32 buffers:

=============== ======== =======================================================================
buffer          shape    meaning, and what writes it
=============== ======== =======================================================================
amax_history    (H,)     the last H amaxes, newest first; written by ``sync`` and by loading
scale           ()       the scale in use, 0 before the first; written by ``sync`` and by loading
current_amax    ()       the running maximum since the last ``sync``; written by forward, backward
scale_age       ()       with an ``interval`` > 1 only: how many syncs ago the scale was computed,
                         inf before the first; written by ``sync`` and by loading
=============== ======== =======================================================================

``module.to(dtype)`` leaves the buffers in float32, and ``to_empty`` resets them. They are optional
in a checkpoint: a plain one loads strictly and starts a new history.

`float8.linear.sync` computes the scales. `make_cast` makes the cast that a config names.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.config import CastConfig, DelayedScalingConfig, ScalingType
from float8.formats import Format, ScaleFormat
from float8.kernels.products import on_device
from float8.linear.scaling import Cast, DelayedState
from float8.linear.switch import Switchable

# Number -> cast, for the op by which `sync_float8_amax_and_scale_history` marks casts as ready.
DELAYED_CASTS: weakref.WeakValueDictionary[int, DelayedCast] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class DelayedCast(Cast, Switchable):
    """A cast with delayed scaling: its scale is computed from the amaxes of past steps.

    ``delayed`` says how scales are computed from the history. ``amax_init`` uses the dynamic scale
    in the first steps; if False, they start with scale 1. The buffers live on ``device``. For the
    other arguments see `Cast`.
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
        Switchable.__init__(self)
        Cast.__init__(self, config, default_format)
        self.delayed = delayed
        self.amax_init = amax_init
        # Written only by sync and by loading, because recomputation and CUDA graphs replay forward
        # and backward. Compiled code is specialised on it: it is compiled again when it changes.
        self.history_ready = not amax_init
        self.synced = False  # whether sync has ever been called
        self.hidden = False  # whether state dicts always leave the history out
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
        """Restore a copied or pickled cast, and give it a number of its own."""
        super().__setstate__(state)
        self._enrol()

    def reset_parameters(self) -> None:
        """Reset the history."""
        self.amax_history.zero_()
        self.scale.fill_(0.0 if self.amax_init else 1.0)
        self.current_amax.zero_()
        if "scale_age" in self._buffers:
            self.scale_age.fill_(torch.inf)
        self.history_ready = not self.amax_init

    @property
    def state(self) -> DelayedState:
        """The buffers that a cast reads and records in.

        Raises TypeError if they are not float32, because FSDP1's ``buffer_dtype`` replaced them.
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

    def _scale(self, fmt: Format) -> Tensor | None:
        return self.scale if self.history_ready else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DelayedCast:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            assert old is not None
            assert new is not None
            if new.device == old.device:
                # model.to(bfloat16) must not round the scales, and a second to_empty (of another
                # layer that shares this cast) must not clear them.
                self._buffers[name] = old
            elif new.dtype != torch.float32:
                self._buffers[name] = old.to(new.device)
            if old.is_meta and not new.is_meta:  # by to_empty: the memory is uninitialised
                self.reset_parameters()
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if not (self.hidden or self.high_precision):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if not any([prefix + name in state_dict for name in self._buffers]):
            return  # a plain checkpoint; if it has a weight, the layer calls start_beside
        self._take_age_from(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.float()  # assign=True keeps a checkpoint's dtype
        scale = self.scale
        self.history_ready = not scale.is_meta and bool(scale.isfinite() & (scale > 0))

    def _take_age_from(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Load the age; a checkpoint without it makes the next sync compute the scale."""
        key = prefix + "scale_age"
        if "scale_age" not in self._buffers:
            state_dict.pop(key, None)
        elif key not in state_dict:
            state_dict[key] = torch.full_like(
                state_dict.get(prefix + "scale", self.scale), torch.inf
            )

    def start_beside(self, weight: Tensor) -> None:
        """Start a new history: ``weight`` was loaded from a checkpoint without one."""
        if self.scale.is_meta and not weight.is_meta:  # load_state_dict(assign=True) onto meta
            self.to_empty(device=weight.device)
        self.reset_parameters()

    @torch.no_grad()
    def start_from(self, scale: Tensor) -> None:
        """Start a new history with a known scale, as if ``sync`` had computed it.

        ``scale``, one element > 0, is of data in E4M3 or E5M2, the format of the cast. The format's
        twin on AMD gfx94x gets the scale of the same amax.
        """
        self.reset_parameters()
        largest, given = self.format_on_device.max, scale.to(self.scale).reshape(())
        amax = given * self.format.max
        known = given * (self.format.max / largest)
        if self.config.scale_format is not ScaleFormat.FLOAT32:
            known = kernels.scale_from_amax(amax, largest, self.config.scale_format.value)
        self.scale.copy_(known)
        self.amax_history[0] = amax * 2.0**-self.delayed.margin
        if "scale_age" in self._buffers:
            self.scale_age.zero_()
        self.history_ready = True


def make_cast(
    config: CastConfig,
    default_format: Format,
    delayed: DelayedScalingConfig,
    amax_init: bool = True,
    device: torch.device | str | None = None,
) -> Cast:
    """The cast that ``config.scaling_type`` names."""
    if config.scaling_type is ScalingType.DELAYED:
        return DelayedCast(config, default_format, delayed, amax_init, device)
    return Cast(config, default_format)


def set_cast(owner: nn.Module, name: str, cast: Cast) -> None:
    """Give a module a cast under a name: a child where it has state, else an attribute."""
    owner._modules.pop(name, None)
    setattr(owner, name, cast.train(owner.training) if isinstance(cast, DelayedCast) else cast)
