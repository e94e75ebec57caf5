"""Scale and cast of one operand: functions on plain tensors, and `Cast`, an operand's cast.

`cast_operand` casts a matrix for the two GEMMs that contract its two dimensions, and reads it only
once where a kernel does both. `cast_matrix` casts it as one `OperandCast` says. The scaling type
decides where the scale comes from:

- dynamic: from the amax of this tensor;
- static: a constant;
- delayed: from the amaxes of past steps. The operand has a `DelayedState`: ``scale`` is used, and
  ``current_amax`` records the amax of this step. `float8.linear.delayed` turns records into scales.

A tensorwise dynamic scale of a tensor whose parts lie on several ranks needs the amax over those
ranks: `max_over_ranks`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8 import kernels
from float8.config import CastConfig, OperandCast, ScalingType
from float8.config.plan import Operand
from float8.formats import Format, format_of, twin_factor
from float8.granularity import scale_shape
from float8.kernels import Casts, Float8Matrix
from float8.kernels.products import on_device
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


Operands = tuple[Any, Any, Tensor | None]
# A `Float8Matrix`, or a Tensor in high precision, or None: for the first and for the second GEMM;
# and the amax that a delayed cast found, which `record` writes down.


def record(state: DelayedState | None, amax: Tensor | None) -> None:
    """Raise the running maximum of a delayed cast to an amax, if there is one.

    The maximum: a recomputation of the same forward changes nothing.
    """
    if amax is not None and state is not None:
        kernels.record_amax(state.current_amax, amax)


def bind_and_cast(
    x: Tensor,
    cast: OperandCast,
    state: DelayedState | None = None,
    scale: Tensor | None = None,
    emulate: bool = False,
) -> Float8Matrix:
    """Bind a cast to the device of x, and cast x by it; nothing is recorded."""
    how = bind_cast(cast, kernels.family_of(x.device), emulate)
    load_kernels(how)
    found: Float8Matrix = cast_matrix(x, how, state, scale).row_major  # type: ignore[assignment]
    return found


def cast_matrix(
    x: Tensor,
    how: OperandCast,
    state: DelayedState | None = None,
    scale: Tensor | None = None,
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
    if hasattr(x, "device_mesh"):
        return cast_sharded(x, how, state, scale, row_major, transposed, finds_amax)
    if scale is None and (how.static is not None or state is not None):
        scale = known_scale(how, state, x)
        if scale is None and how.is_whole and state is not None and state.group is not None:
            amax = kernels.amax(x, how.block)
            largest = max_over_ranks(amax, state.group)
            scale = kernels.scale_from_amax(largest, how.largest, how.scales)
            found = kernels.cast(x, how, scale, row_major, transposed)
            return found._replace(amax=amax if finds_amax and how.is_delayed else None)
    finds_amax = finds_amax and how.is_delayed and state is not None
    return kernels.cast(x, how, scale, row_major, transposed, finds_amax)


def cast_operand(
    x: Tensor,
    operand: Operand,
    state: DelayedState | None = None,
    records: bool = False,
    first: bool = True,
    second: bool = True,
    scale: Tensor | None = None,
) -> Operands:
    """Cast a matrix for the GEMM that contracts along its rows and the one along its columns.

    ``x`` has any strides. A `Float8Tensor` is not cast again: both GEMMs read its data. ``first``
    and ``second`` say whether each of the two casts is needed; ``records`` whether a delayed cast
    finds the amax. ``scale`` is the one that the second cast takes where it is the only one, or
    None.

    Returns the operand of each GEMM, x or x.mT where that is in high precision, and the amax.
    Where no kernel writes both orientations, the second is a view of the first if they share data.
    """
    a, b = operand.first, operand.second
    if isinstance(x, Float8Tensor):
        matrix = Float8Matrix(x.float8_data, x.scale, x.block)
        return matrix, matrix.t(), None
    if first and operand.is_shared and a.kernel is None:  # type: ignore[union-attr]
        matrix, _, amax = cast_matrix(x, a, state, None, True, False, records)  # type: ignore
        if not second:
            return matrix, None, amax
        data, its, _ = matrix
        its = its if its.dim() == 1 or its.numel() == 1 else its.mT
        return matrix, Float8Matrix(data.mT, its, b.block), amax  # type: ignore[union-attr]
    if a is not None and operand.is_same:
        return cast_matrix(x, a, state, scale, first, second, records)
    one: Any = x if first else None
    other: Any = x.mT if second else None
    amax = None
    if first and a is not None:
        one, _, amax = cast_matrix(x, a, state, None, True, False, records)
    if second and b is not None:
        # An amax is found once: by the first cast, or by the second if there is no first.
        alone = records and not (first and a is not None)
        other, _, found = cast_matrix(x.mT, b, state, scale, True, False, alone)
        amax = found if amax is None else amax
    return one, other, amax


def cast_groups(
    x: Tensor, operand: Operand, offs: Tensor, first: bool = True, second: bool = True
) -> Operands:
    """`cast_operand` of tokens in groups, whose ends are ``offs``; see `float8.kernels.groups`."""
    a, b, align = operand.first, operand.second, operand.align
    if operand.is_shared and align == 1:  # no padding: a view
        row_major = cast_tokens(x, a, align, offs, True, False)[0]
        return row_major, row_major.t(), None
    if operand.is_same:
        return cast_tokens(x, a, align, offs, first, second)
    one, other = (
        cast_tokens(x, a, align, offs, first, False),
        cast_tokens(x, b, align, offs, False, second),
    )
    return one[0], other[1], None


def cast_tokens(
    x: Tensor,
    how: OperandCast | None,
    align: int,
    offs: Tensor,
    first: bool,
    second: bool,
    scale: float | None = None,
) -> Operands:
    """Cast tokens in groups, and their transpose with padded groups; ``scale`` is one of all."""
    if how is None or not (first or second):
        return x, x.t(), None
    scale = how.static if scale is None else scale
    known = None if scale is None else constant(scale, x)
    return kernels.cast_grouped(x, how, offs, align, known, first, second)


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

    finds_amax = finds_amax and how.is_delayed and state is not None
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
