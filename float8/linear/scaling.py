"""Scale and cast of one operand: functions on plain tensors, and `Cast`, an operand's cast.

`cast_matrix` casts a matrix, in the orientation of the GEMM that reads it, to ``(data, scale)`` as
its `OperandCast` says. `cast_operand` casts it for the two GEMMs that contract its two dimensions,
and reads it only once where a kernel does both. The scaling type decides where the scale comes
from:

- dynamic: from the amax of this tensor;
- static: a constant;
- delayed: from the amaxes of past steps. The operand has a `DelayedState`: ``scale`` is used, and
  ``current_amax`` records the amax of this step. `float8.linear.delayed` turns records into scales.

A tensorwise dynamic scale of a tensor whose parts lie on several ranks needs the amax over those
ranks: `max_over_ranks`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8 import kernels
from float8.config import CastConfig, OperandCast, ScalingType
from float8.config.plan import Operand
from float8.formats import Format, format_of, twin_factor
from float8.kernels.scaled_mm import on_device
from float8.linear.plan import bind_cast, load_kernels
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


class Cast:
    """How one operand becomes a `Float8Tensor`; `float8.linear.delayed.DelayedCast` has state too.

    ``default_format`` is the format where ``config.target_dtype`` is None.
    """

    def __init__(self, config: CastConfig, default_format: Format) -> None:
        self.config = config
        self.format = format_of(config.target_dtype or default_format)

    @property
    def state(self) -> DelayedState | None:
        """The buffers that a delayed cast reads and records in, or None."""
        return None

    def __call__(self, x: Tensor) -> Tensor:
        """Cast ``x`` of any shape, recording nothing; gradients pass straight through.

        Returns a `Float8Tensor` of x's shape and dtype; x where the config disables the cast.
        """
        config = self.config
        if config.scaling_type is ScalingType.DISABLED:
            return x
        fmt = on_device(self.format, x.device)
        return Float8Tensor.from_high_precision(
            x, fmt, config.granularity, self._scale(fmt), config.scale_format
        )

    def _scale(self, fmt: Format) -> Tensor | float | None:
        """The scale of data in ``fmt``, this format or its twin; None computes it from x."""
        scale = self.config.static_scale
        return None if scale is None else scale * twin_factor(self.format, fmt)

    def extra_repr(self) -> str:
        """The summary of the config, with the format's name."""
        return self.config.summary.replace("default", self.format.name)

    def __repr__(self) -> str:
        """As that of a module."""
        return f"{type(self).__name__}({self.extra_repr()})"


Pair = tuple[Tensor, Any]  # data and scale; in high precision a matrix and None
NOTHING: Pair = (None, None)  # type: ignore[assignment]


def bind_and_cast(
    x: Tensor,
    cast: OperandCast,
    state: DelayedState | None = None,
    record: bool = False,
    scale: Tensor | None = None,
    emulate: bool = False,
) -> Pair:
    """Bind a cast to the device of x, and cast x by it; see `cast_matrix`."""
    how = bind_cast(cast, kernels.family_of(x.device), emulate)
    load_kernels(how)
    return cast_matrix(x, how, state, record, scale)


def cast_matrix(
    x: Tensor,
    how: OperandCast | None,
    state: DelayedState | None = None,
    record: bool = False,
    scale: Tensor | None = None,
) -> Pair:
    """Cast a matrix (rows, contraction) to float8 for one GEMM.

    ``x`` is float32, bfloat16 or float16, with any strides. ``how`` is stated for this orientation;
    None keeps x in high precision. ``record`` says whether a delayed cast records the amax of x in
    ``state``. It records the maximum, so a recomputation of the same forward changes nothing.
    ``scale`` is the one that an earlier call computed for this x, in this orientation; None
    computes it.

    Returns float8 data of x's shape and its scale of shape ``ceil(shape / block)``; in high
    precision, x and None.
    """
    return (x, None) if how is None else cast_both(x, how, state, record, scale, True, False)[:2]


def cast_operand(
    x: Tensor,
    operand: Operand,
    state: DelayedState | None = None,
    record: bool = False,
    first: bool = True,
    second: bool = True,
    scale: Tensor | None = None,
    offs: Tensor | None = None,
) -> tuple[Pair, Pair]:
    """Cast a matrix for the GEMM that contracts along its rows and the one along its columns.

    ``x`` has any strides. A `Float8Tensor` is not cast again: both GEMMs read its data. An amax is
    recorded once; see `cast_matrix` for ``state`` and ``record``. ``first`` and ``second`` say
    whether each of the two casts is needed. ``scale`` is the one that the second cast takes where
    it is the only one, or None. ``offs`` has the ends of groups of tokens, or is None.

    Returns the pair for x and the pair for its transpose. A pair that is not needed is unspecified.
    Where no kernel writes both, the second is a view of the first if they share data.
    """
    a, b = operand.first, operand.second
    if isinstance(x, Float8Tensor):
        pair = (x.float8_data, x.scale)
        return pair, transposed(pair)
    if offs is not None:
        return _cast_groups(x, operand, offs, first, second)
    if first and operand.is_shared and a.kernel is None:  # type: ignore[union-attr]
        pair = cast_matrix(x, a, state, record, None)
        return pair, transposed(pair)
    if a is not None and operand.is_same:
        both = cast_both(x, a, state, record, scale, first, second)
        return both[:2], both[2:]
    # An amax is recorded once: by the first cast, or by the second if there is no first.
    is_recorded = first and a is not None
    return (
        cast_matrix(x, a, state, record) if first else NOTHING,
        cast_matrix(x.mT, b, state, record and not is_recorded, scale) if second else NOTHING,
    )


def cast_both(
    x: Tensor,
    how: OperandCast,
    state: DelayedState | None,
    record: bool,
    scale: Tensor | None,
    row_major: bool,
    transpose: bool,
) -> kernels.Orientations:
    """`cast_matrix` of x, of its transpose, or of both, by casts that are alike."""
    kernel = how.kernel
    if kernels.is_sharded(x):
        # Importing DTensor takes most of a second.
        from float8.linear.sharded_cast import cast_sharded, is_cast_in_parts

        if is_cast_in_parts(x, how):
            return cast_sharded(x, how, state, record, scale, row_major, transpose)
        kernel = None
    is_recorded = record and how.is_delayed and state is not None
    amax = state.current_amax if is_recorded else None  # type: ignore[union-attr]
    scale = known_scale(how, state, x) if scale is None else scale
    if scale is None and how.is_whole and state is not None and state.group is not None:
        found = kernels.amax(x, how.block)
        if amax is not None:
            kernels.record_amax(amax, found)
            amax = None
        found = max_over_ranks(found, state.group)
        scale = kernels.scale_from_amax(found, how.largest, how.scales)
    return kernels.cast_operand(
        kernel,
        x,
        how.block,
        how.dtype,
        how.scales,
        scale,
        row_major,
        transpose,
        amax,
        how.swizzled,
    )


def _cast_groups(
    x: Tensor, operand: Operand, offs: Tensor, first: bool, second: bool
) -> tuple[Pair, Pair]:
    """`cast_operand` of tokens in groups, whose ends are ``offs``; see `float8.kernels.groups`."""
    if operand.is_shared and operand.align == 1:  # no padding: a view
        row_major = cast_tokens(x, operand.first, operand, offs, transposed=False)[0]
        return row_major, transposed(row_major)
    if operand.is_same:
        return cast_tokens(x, operand.first, operand, offs, first, second)
    return (
        cast_tokens(x, operand.first, operand, offs, first, False)[0],
        cast_tokens(x, operand.second, operand, offs, False, second)[1],
    )


def cast_tokens(
    x: Tensor,
    how: OperandCast | None,
    operand: Operand,
    offs: Tensor,
    row_major: bool = True,
    transposed: bool = True,
    scale: float | None = None,
) -> tuple[Pair, Pair]:
    """Cast tokens in groups, and their transpose with padded groups; ``scale`` is one of all."""
    if how is None or not (row_major or transposed):
        return (x, None), (x.t(), None)
    scale = how.static if scale is None else scale
    both = kernels.cast_tokens(
        how.kernel,
        x,
        offs,
        how.block,
        how.dtype,
        how.scales,
        None if scale is None else constant(scale, x),
        operand.align,
        row_major,
        transposed,
    )
    return both[:2], both[2:]


def transposed(pair: Pair) -> Pair:
    """The transpose of a pair, as views."""
    data, scale = pair
    return data.mT, transposed_scale(scale)


def transposed_scale(scale: Tensor | None) -> Tensor | None:
    """The scale of the transposed data; a single or swizzled one is returned as it is."""
    return scale if scale is None or scale.dim() == 1 or scale.numel() == 1 else scale.mT


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
