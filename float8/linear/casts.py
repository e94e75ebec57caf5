"""The casts of a layer: functions that cast one operand, and `DelayedCast`, which keeps the state.

`cast_operand` casts a matrix for the two GEMMs that contract its two dimensions, and reads it only
once where a kernel does both. `cast_matrix` casts it as one `OperandCast` says. The scaling type
decides where the scale comes from:

- dynamic: from the amax of this tensor;
- static: a constant;
- delayed: from the amaxes of past steps. The operand has a `DelayedState`: ``scale`` is used, and
  ``current_amax`` records the amax of this step. `float8.distributed.sync` turns records into
  scales.

A tensorwise dynamic scale of a tensor whose parts lie on several ranks needs the amax over those
ranks: `max_over_ranks`.

`DelayedCast` owns the state of a delayed cast, all of it in float32 buffers:

=============== ======== =======================================================================
buffer          shape    meaning, and what writes it
=============== ======== =======================================================================
amax_history    (H,)     the last H amaxes, newest first; written by ``sync`` and by loading
scale           ()       the scale in use, 0 before the first; written by ``sync`` and by loading
current_amax    ()       the running maximum since the last ``sync``; written by forward, backward
=============== ======== =======================================================================

``module.to(dtype)`` leaves the buffers in float32, and ``to_empty`` resets them. They are optional
in a checkpoint: a plain one loads strictly and starts a new history.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.config import CastConfig, Float8LinearConfig, OperandCast, ScalingType
from float8.formats import Format, format_of
from float8.granularity import scale_shape
from float8.kernels import Casts, Float8Matrix
from float8.kernels.registration import load_kernels
from float8.linear.module import Switchable
from float8.linear.plan import PAIR, VIEW, Operand, cast_on
from float8.tensor import Float8Tensor


class DelayedState(NamedTuple):
    """The buffers of a delayed cast that a forward or backward touches; float32, 0-dim.

    While ``ready`` is False, the operand has no scale yet, and the dynamic scale is used.
    ``group`` is the name of the process group over which the tensor is sharded, or None if each
    rank has the whole tensor. See `sharded_state`.
    """

    scale: Tensor
    current_amax: Tensor
    ready: bool
    group: str | None = None


def sharded_state(state: DelayedState | None, group: str | None) -> DelayedState | None:
    """The state of an operand that is sharded over the ranks of a process group.

    A tensorwise scale of such an operand is computed from the amax over those ranks. Scales of rows
    and blocks are computed from this rank's part. ``state`` is that of a delayed cast, and
    ``group`` is ``ProcessGroup.group_name``; both may be None.
    """
    if group is None:
        return state
    if state is None:  # not delayed: only the group is read
        return DelayedState(None, None, False, group)  # type: ignore[arg-type]
    return state._replace(group=group)


# Number -> cast, for the op by which `sync_float8_amax_and_scale_history` marks casts as ready.
DELAYED_CASTS: weakref.WeakValueDictionary[int, DelayedCast] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class DelayedCast(Switchable):
    """A cast with delayed scaling: its scale is computed from the amaxes of past steps.

    ``default_format`` is the format where ``cast.target_dtype`` is None. ``config`` is the layer's:
    it says how scales are computed from the history, and whether the first steps use dynamic ones
    or start with scale 1. The buffers live on ``device``.
    """

    amax_history: Tensor
    scale: Tensor
    current_amax: Tensor

    def __init__(
        self, cast: CastConfig, default_format: Format, config: Float8LinearConfig, device: Any
    ) -> None:
        super().__init__()
        self.config, self.format = cast, format_of(cast.target_dtype or default_format)
        self.delayed, self.amax_init = config.delayed_scaling, config.enable_amax_init
        # Written only by sync and by loading, because recomputation and CUDA graphs replay forward
        # and backward. Compiled code is specialised on it: it is compiled again when it changes.
        self.history_ready = not self.amax_init
        self.synced = False  # whether sync has ever been called
        self.hidden = False  # whether state dicts always leave the history out
        self._add_switch()
        shapes = {"amax_history": (self.delayed.history_len,), "scale": (), "current_amax": ()}
        with torch.inference_mode(False):  # or a model converted inside it could not train later
            for name, shape in shapes.items():
                self.register_buffer(name, torch.zeros(shape, dtype=torch.float32, device=device))
        self.reset_parameters()
        self._enrol()

    def extra_repr(self) -> str:
        """The summary of the config, with the format's name."""
        return self.config.summary.replace("default", self.format.name)

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
        state_dict.pop(prefix + "scale_age", None)  # of 1.0.0, where scales had an ``interval``
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.float()  # assign=True keeps a checkpoint's dtype
        scale = self.scale
        self.history_ready = not scale.is_meta and bool(scale.isfinite() & (scale > 0))

    def start_beside(self, weight: Tensor) -> None:
        """Start a new history: ``weight`` was loaded from a checkpoint without one."""
        if self.scale.is_meta and not weight.is_meta:  # load_state_dict(assign=True) onto meta
            self.to_empty(device=weight.device)
        self.reset_parameters()


def set_cast(owner: nn.Module, name: str, cast: CastConfig, *of: Any) -> None:
    """Give a module the `DelayedCast` of an operand, or None for a cast without state.

    ``of`` are the other arguments of `DelayedCast`.
    """
    owner._modules.pop(name, None)
    is_delayed = cast.scaling_type is ScalingType.DELAYED
    setattr(owner, name, DelayedCast(cast, *of).train(owner.training) if is_delayed else None)


def start_histories(owner: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Start new histories of a module's casts where the state dict that was loaded has none.

    A part of a checkpoint without the module's weight, such as adapters, leaves them as they are.
    """
    key = prefix + "weight"
    has_weight = owner._parameters.get("weight", key) is not None  # or a wrapper has taken it
    if has_weight and key not in state_dict:
        return
    for name, cast in owner.named_children():
        has_history = any([known.startswith(f"{prefix}{name}.") for known in state_dict])
        if isinstance(cast, DelayedCast) and not has_history:
            cast.start_beside(state_dict.get(key, cast.scale))


# --- casts of operands

Operands = tuple[Any, Any, Tensor | None]
# A `Float8Matrix`, or a Tensor in high precision, or None: for the first and for the second GEMM;
# and the amax that a delayed cast found, for `record`.


def cast_operand(
    x: Tensor,
    operand: Operand,
    state: DelayedState | None = None,
    records: bool = False,
    *,
    first: bool = True,
    second: bool = True,
    scale: Tensor | None = None,
) -> Operands:
    """Cast a matrix for the GEMM that contracts along its rows and the one along its columns.

    ``x`` has any strides. A `Float8Tensor` is not cast again: both GEMMs read its data. ``first``
    and ``second`` say whether each of the two is needed; ``records`` whether a delayed cast finds
    the amax. ``scale`` is that of the first, if an earlier call computed it for this x, else None.

    Returns the operand of each GEMM, x or x.mT where that is in high precision, and the amax.
    """
    if isinstance(x, Float8Tensor):
        matrix = Float8Matrix(x.float8_data, x.scale, x.block)
        return matrix, matrix.t(), None
    how, again, is_view = operand.first, operand.second, operand.second_is == VIEW
    if operand.second_is == PAIR:
        assert how is not None
        return cast_matrix(
            x, how, state, scale, row_major=first, transposed=second, finds_amax=records
        )
    one: Any = x if first else None
    other: Any = None
    amax = None
    # Without a kernel another op casts the second alone: compilers would save the first's result.
    if how is not None and (first or (is_view and how.kernel is not None)):
        one, _, amax = cast_matrix(x, how, state, scale, finds_amax=records)
        records = False  # an amax is found once
    if second and is_view and one is not None:
        assert again is not None
        its = one.scale if one.scale.numel() == 1 else _turned(one.scale)
        other = Float8Matrix(one.data.mT, its, again.block)
    elif second:
        other = x.mT
        if again is not None:
            known = _turned(scale) if is_view else None
            other, _, found = cast_matrix(other, again, state, known, finds_amax=records)
            amax = found if amax is None else amax
    return one, other, amax


def _turned(scale: Any) -> Any:
    """A scale, or None, stated for the transpose: one of a whole tensor or swizzled stays."""
    return scale if scale is None or scale.dim() == 1 or scale.numel() == 1 else scale.mT


def cast_matrix(
    x: Tensor,
    how: OperandCast,
    state: DelayedState | None = None,
    scale: Tensor | None = None,
    *,
    row_major: bool = True,
    transposed: bool = False,
    finds_amax: bool = False,
) -> Casts:
    """Cast a matrix (rows, contraction) to float8, its transpose, or both by casts that are alike.

    ``x`` is float32, bfloat16 or float16, with any strides. ``how`` is stated for this orientation.
    A delayed cast has a ``state``, whose scale is taken; ``finds_amax`` asks for its amax.
    ``scale`` is the one that an earlier call computed for this x, in this orientation; None
    computes it.
    """
    finds_amax = finds_amax and how.is_delayed and state is not None
    if hasattr(x, "device_mesh"):
        return cast_sharded(x, how, state, scale, row_major, transposed, finds_amax)
    if scale is None and (how.static is not None or state is not None):
        scale = known_scale(how, state, x)
        if scale is None and how.is_whole and state is not None and state.group is not None:
            amax = kernels.amax(x, how.block)
            largest = max_over_ranks(amax, state.group)
            scale = kernels.scale_from_amax(largest, how.largest, how.scales)
            found = kernels.cast(x, how, scale, row_major, transposed)
            return found._replace(amax=amax if finds_amax else None)
    return kernels.cast(x, how, scale, row_major, transposed, finds_amax)


def cast_alone(
    x: Tensor,
    cast: OperandCast,
    state: DelayedState | None = None,
    scale: Tensor | None = None,
    emulate: bool = False,
) -> Float8Matrix:
    """Cast x by a cast of a config, outside of any plan; nothing is recorded."""
    how = cast_on(cast, kernels.family_of(x.device), emulate)
    load_kernels(*[how.kernel] if how.kernel else [])
    return cast_matrix(x, how, state, scale).row_major  # type: ignore[return-value]


def record(state: DelayedState | None, amax: Tensor | None) -> None:
    """Raise the running maximum of a delayed cast to an amax, if there is one.

    The maximum: a recomputation of the same forward changes nothing.
    """
    if amax is not None and state is not None:
        torch.maximum(state.current_amax, amax.reshape(()), out=state.current_amax)


# --- DTensors


def cast_sharded(
    x: Any,
    how: OperandCast,
    state: DelayedState | None,
    scale: Tensor | None,
    row_major: bool,
    transposed: bool,
    finds_amax: bool,
) -> Casts:
    """`cast_matrix` of a DTensor, as torch's ``ColwiseParallel`` hands it to a layer, to DTensors.

    With one scale per tensor each rank casts its own part, by the kernel of any tensor, and the
    scale is computed from the amax over the ranks, so the bits are those of one process. Other
    scales of sharded operands are left to aten, whose ops have sharding rules: a kernel computes
    scales of rows from what it reads, which would be a part of the row. Experts (E, N, K) share no
    scale, so those of sharded experts are sharded with them.
    """
    from torch.distributed.tensor import DTensor, Replicate  # which takes most of a second

    if not is_cast_in_parts(x, how):
        scale = known_scale(how, state, x) if scale is None else scale
        return kernels.cast(x, replace(how, kernel=None), scale, row_major, transposed, finds_amax)
    whole: list[Any] = [
        Replicate() if p.is_partial() else p for p in x.placements
    ]  # a cast needs the sum
    x = x if whole == list(x.placements) else x.redistribute(placements=whole)
    part, mesh, one = x.to_local(), x.device_mesh, [Replicate()] * x.device_mesh.ndim
    is_cut = [p.is_shard() and p.dim >= x.dim() - 2 for p in whole]  # whether it cuts matrices
    scale, amax = scale.to_local() if isinstance(scale, DTensor) else scale, None
    scale = known_scale(how, state, part) if scale is None else scale
    if how.is_whole and (finds_amax or scale is None):
        amax = kernels.amax(part, how.block)
        for index, cut in enumerate(is_cut):
            if cut:  # here, for a `sync` that does not reduce over this mesh
                amax = max_over_ranks(amax, mesh.get_group(index))
        if scale is None:
            scale = kernels.scale_from_amax(amax, how.largest, how.scales)

    def placed_cast(matrix: Any) -> Float8Matrix:
        data, its, block = kernels.cast(matrix.to_local(), how, scale).row_major  # type: ignore
        shape, placements = its.shape, one
        if its.dim() > 2:
            shape = scale_shape(matrix.shape, how.block)
            placements = [n if cut else p for n, cut, p in zip(one, is_cut, whole, strict=True)]
        data = placed(data, matrix.shape, mesh, matrix.placements)
        return Float8Matrix(data, placed(its, shape, mesh, placements), block)

    return Casts(
        placed_cast(x) if row_major else None,
        placed_cast(x.mT) if transposed else None,
        amax if finds_amax else None,
    )


def is_cast_in_parts(x: Any, how: OperandCast) -> bool:
    """Whether `cast_sharded` casts a DTensor: by one scale, or where each rank has all of it."""
    from torch.distributed.tensor import Shard

    simple = all([type(p) is Shard or p.is_replicate() or p.is_partial() for p in x.placements])
    return simple and (how.is_whole or not any([p.is_shard() for p in x.placements]))


def placed(part: Tensor, shape: Any, mesh: Any, placements: Any) -> Any:
    """The row-major DTensor of this shape of which ``part`` is this rank's."""
    from torch.distributed.tensor import DTensor

    sizes: dict[str, Any] = {
        "shape": torch.Size(shape),
        "stride": torch.empty(shape, device="meta").stride(),
    }
    own = part.contiguous()
    return DTensor.from_local(own, mesh, tuple(placements), run_check=False, **sizes)


# --- scales


def known_scale(cast: OperandCast, state: DelayedState | None, x: Tensor) -> Tensor | None:
    """The scale of a static cast, or of a delayed one that has a scale; None for a dynamic scale.

    ``x`` is the operand, or a tensor on its device. For ``cast`` and ``state`` see `cast_matrix`.
    """
    if cast.static is not None:
        return constant(cast.static, x)
    if cast.is_delayed and state is not None and state.ready:
        return state.scale.reshape(1, 1)
    return None


def constant(value: float, like: Tensor) -> Tensor:
    """(1, 1) float32 on the device of ``like``."""
    return torch.full((1, 1), value, dtype=torch.float32, device=like.device)


def max_over_ranks(amax: Tensor, group: Any) -> Tensor:
    """The element-wise maximum of amaxes over the ranks of a process group; inf if not finite.

    gloo's MAX loses a NaN that is not on rank 0. Every backend keeps an infinity, which also makes
    the scale and every product NaN. ``amax`` is float32, of equal shape on all ranks, on a device
    that the group's backend reduces. ``group`` is a ``ProcessGroup``, or its name, which compiled
    code needs.
    """
    name = group if isinstance(group, str) else group.group_name
    ops = torch.ops._c10d_functional  # by name, so that importing float8 imports no collectives
    finite_or_inf = torch.where(amax.isfinite(), amax, torch.inf)
    return ops.wait_tensor(ops.all_reduce(finite_or_inf, "max", name))
