"""Scale and cast of one operand: functions on plain tensors, and `Cast`, an operand's cast.

`cast_matrix` casts a matrix, in the orientation of the GEMM that reads it, to ``(data, scale)`` as
its `BoundCast` says. `cast_orientations` casts it for the two GEMMs that contract its two
dimensions, and reads it only once where a kernel does both. The scaling type decides where the
scale comes from:

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
from torch import Tensor, nn

from float8 import kernels
from float8.config import CastConfig, OperandCast, ScalingType
from float8.formats import Format, format_of, on_device
from float8.kernels import opaque
from float8.linear.bound_plan import BoundCast, BoundOperand
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
        return Float8Tensor.from_high_precision(
            x,
            on_device(self.format, x.device),
            config.granularity,
            self._scale(),
            config.scale_format,
        )

    def _scale(self) -> Tensor | float | None:
        """The scale to cast with; None computes it from the tensor."""
        return self.config.static_scale

    def extra_repr(self) -> str:
        """The summary of the config, with the format's name."""
        return self.config.summary.replace("default", self.format.name)

    def __repr__(self) -> str:
        """As that of a module."""
        return f"{type(self).__name__}({self.extra_repr()})"


Pair = tuple[Tensor, Any]  # data and scale; in high precision a matrix and None
Scales = tuple[Tensor | None, Tensor | None]  # of an operand's two casts; None computes it


def bind_and_cast(
    x: Tensor,
    cast: OperandCast,
    state: DelayedState | None = None,
    record: bool = False,
    scale: Tensor | None = None,
    emulate: bool = False,
    groups: str = "",
) -> Pair:
    """Bind a cast to the device of x, and cast x by it; see `cast_matrix`."""
    family, compiling = kernels.family_of(x.device), torch.compiler.is_compiling()
    how = BoundCast(cast, family, emulate, compiling, groups)
    return cast_matrix(x, how, state, record, scale)


def cast_matrix(
    x: Tensor,
    how: BoundCast | None,
    state: DelayedState | None,
    record: bool,
    scale: Tensor | None,
    decode: bool = False,
) -> Pair:
    """Cast a matrix (rows, contraction) to float8 for one GEMM.

    ``x`` is float32, bfloat16 or float16, with any strides. ``how`` is stated for this orientation;
    None keeps x in high precision. ``record`` says whether a delayed cast records the amax of x in
    ``state``. It records the maximum, so a recomputation of the same forward changes nothing.
    ``scale`` is the one that an earlier call computed for this x, in this orientation; None
    computes it. ``decode`` says that plain PyTorch multiplies at once: the data of experts, and
    compiled code on a CPU, is then returned in bfloat16.

    Returns float8 data of x's shape and its scale of shape ``ceil(shape / block)``; in high
    precision, x and None.
    """
    if how is None:
        return x, None
    if how.kernel is not None and not kernels.is_sharded(x):
        return _by_kernel(x, how, state, record, scale, row_major=True, transpose=False)[:2]
    if torch.compiler.is_compiling():  # the compiler casts: static scales, DTensors, emulation
        kernels.check_compiler(x.device)
    if scale is None:
        scale = _scale(x, how, state, record)
    if decode and torch.compiler.is_compiling() and kernels.compiles_for_cpu(x):
        return kernels.cast_decoded(x, scale, how.block, how.dtype, how.fits), scale
    out = None
    if decode and x.dim() == 3 and x.device.type == "cpu" and not torch.compiler.is_compiling():
        out = torch.empty_like(x, dtype=torch.bfloat16)
    return kernels.cast(x, scale, how.block, how.dtype, how.fits, out, None), scale


def cast_orientations(
    x: Tensor,
    operand: BoundOperand,
    state: DelayedState | None,
    record: bool,
    *,
    first: bool,
    second: bool,
    decode: bool,
    keeps: bool,
    offs: Tensor | None,
    scales: Scales,
    column_sums: Tensor | None,
) -> tuple[Pair | None, Pair | None]:
    """Cast a matrix for the GEMM that contracts along its rows and the one along its columns.

    No argument has a default: torch.compile guards on defaults.

    ``x`` has any strides. A `Float8Tensor` is not cast again: both GEMMs read its data. An amax is
    recorded once; see `cast_matrix` for ``state`` and ``record``. ``first`` and ``second`` say
    whether each of the two casts of ``operand`` is needed. With ``decode`` both products run in
    plain PyTorch: data that both read is converted to bfloat16 once. With ``keeps`` the second
    product runs in backward: its data stays in float8. ``offs`` has the ends of groups of tokens,
    for grouped GEMMs; see `float8.kernels.groups`. ``scales`` are known ones of the two casts,
    where both are needed. ``column_sums``, of `new_column_sums`, is filled.

    Returns the pair for x and the pair for ``x.t()``, None for one that is not needed. On a CPU the
    second is a view of the first where the casts allow it.
    """
    if offs is not None:
        return _cast_groups(x, operand, first, second, decode and not keeps, offs)
    if isinstance(x, Float8Tensor):
        pair = (x.float8_data, x.scale)
        return (pair if first else None), (transposed(pair) if second else None)
    if not (first and second):
        row_major = cast_matrix(x, operand.first, state, record, None, decode) if first else None
        second_pair = None
        if second:
            second_pair = cast_matrix(x.t(), operand.second, state, record, None, decode)
        return row_major, second_pair
    if _is_cast_at_once(x, operand):
        assert operand.first is not None
        both = _by_kernel(x, operand.first, state, record, scales[0], True, True, column_sums)
        return both[:2], both[2:]
    of_first = decode and not (keeps and operand.is_shared)
    row_major = cast_matrix(x, operand.first, state, record, scales[0], of_first)
    if not operand.is_shared:
        # An amax is recorded once: by the first cast, or by the second if there is no first.
        record, decode = record and operand.first is None, decode and not keeps
        return row_major, cast_matrix(x.t(), operand.second, state, record, scales[1], decode)
    second_pair = transposed(row_major)
    if decode and not keeps:
        row_major = (kernels.decode(row_major[0], None), row_major[1])
        second_pair = transposed(row_major)
    elif decode and torch.compiler.is_compiling() and kernels.compiles_for_cpu(x):
        # From x: one loop casts it to both.
        row_major = cast_matrix(x, operand.first, None, False, row_major[1], decode)
    return row_major, second_pair


def _is_cast_at_once(x: Tensor, operand: BoundOperand) -> bool:
    return operand.at_once and not kernels.is_sharded(x)


def new_column_sums(x: Tensor, operand: BoundOperand) -> Tensor | None:
    """For `cast_orientations` to fill, where both casts are needed; their ``sum(0)`` is x's.

    None if no kernel adds the columns of x while it casts.
    """
    # The tiles of a column-major x are read along its columns: another read costs less.
    if isinstance(x, Float8Tensor) or not _is_cast_at_once(x, operand) or x.stride(-1) != 1:
        return None
    assert operand.first is not None
    assert operand.first.kernel is not None
    return kernels.new_column_sums(operand.first.kernel, x)


def _cast_groups(
    x: Tensor, operand: BoundOperand, first: bool, second: bool, decode: bool, offs: Tensor
) -> tuple[Pair | None, Pair | None]:
    """`cast_orientations` of tokens in groups."""

    def cast(how: BoundCast | None, row_major: bool, transpose: bool) -> tuple[Pair, Pair]:
        if how is None:
            return (x, None), (x.t(), None)
        scale = None if how.static is None else constant(how.static, x)
        both = kernels.cast_tokens(
            how.kernel,
            x,
            offs,
            how.block,
            how.dtype,
            how.scale_format,
            scale,
            operand.align,
            row_major,
            transpose,
        )
        return both[:2], both[2:]

    if operand.is_shared and operand.align == 1:  # no padding: a view
        row_major = cast(operand.first, True, False)[0]
        if decode and first and second:
            row_major = (kernels.decode(row_major[0], None), row_major[1])
        return (row_major if first else None), (transposed(row_major) if second else None)
    if first and second and operand.is_same:
        return cast(operand.first, True, True)
    return (
        cast(operand.first, True, False)[0] if first else None,
        cast(operand.second, False, True)[1] if second else None,
    )


def cast_again(
    x: Tensor, how: BoundCast, scale: Tensor, decode: bool = False, alone: bool = False
) -> Pair:
    """Repeat an earlier ``cast_matrix(x, how)`` and return the transpose of its data.

    For an operand whose second GEMM reads the data of the first cast, if that was not kept.
    ``scale`` is the one that the earlier call returned. For ``decode`` see `cast_matrix`. ``alone``
    says that no op computes x, with which a compiler could fuse the cast.
    """
    kernel = how.kernel_alone if alone else how.kernel
    if kernel is not None and not kernels.is_sharded(x):
        return _by_kernel(x, how, None, False, scale, row_major=False, transpose=True)[2:]
    if decode and torch.compiler.is_compiling() and kernels.compiles_for_cpu(x) and x.dim() == 2:
        # Not the nodes of forward, or their result would be kept: see `kernels.opaque`.
        if how.is_whole:
            return kernels.cast_decoded(x.t(), scale, how.block, how.dtype, how.fits), scale
        data_t = opaque.cast_transposed(x, scale, how.block, how.dtype, how.fits)
        return data_t, scale.t()
    return transposed(cast_matrix(x, how, None, False, scale, decode))


def transposed(pair: Pair) -> Pair:
    """The transpose of a pair, as views."""
    data, scale = pair
    if data.dim() == 3:
        return data.mT, scale.mT
    return data.t(), scale if scale.numel() == 1 else scale.t()


def _by_kernel(
    x: Tensor,
    how: BoundCast,
    state: DelayedState | None,
    record: bool,
    scale: Tensor | None,
    row_major: bool,
    transpose: bool,
    column_sums: Tensor | None = None,
) -> kernels.Orientations:
    assert how.kernel_alone is not None
    amax = None
    if how.static is not None:
        scale = constant(how.static, x) if scale is None else scale
    elif state is not None:
        amax = state.current_amax if how.is_delayed and record else None
        scale = _scale_of_state(x, how, state) if scale is None else scale
    return kernels.cast_by_kernel(
        how.kernel_alone,
        x,
        how.block,
        how.dtype,
        how.scale_format,
        scale,
        row_major,
        transpose,
        amax,
        how.swizzled,
        column_sums,
    )


def _scale_of_state(x: Tensor, how: BoundCast, state: DelayedState) -> Tensor | None:
    """The scale from past steps, or from the amax over a group; None if the kernel computes it."""
    if how.is_delayed and state.ready:
        return state.scale.reshape(1, 1)
    if not how.is_whole or state.group is None:
        return None
    found = max_over_ranks(kernels.amax(x, how.block), state.group)
    return kernels.scale_from_amax(found, how.largest, how.scale_format)


def known_scale(cast: OperandCast, state: DelayedState | None, x: Tensor) -> Tensor | None:
    """The scale of a static cast, or of a delayed one that has a scale; None for a dynamic scale.

    ``x`` is the operand, or a tensor on its device. For ``cast`` and ``state`` see `bind_and_cast`.
    """
    if cast.static_scale is not None:
        return constant(float(cast.static_scale), x)
    is_delayed = cast.scaling_type is ScalingType.DELAYED
    if is_delayed and state is not None and state.ready:
        return state.scale.reshape(1, 1)
    return None


def amax_to_record(cast: OperandCast, state: DelayedState | None, record: bool) -> Tensor | None:
    """The buffer into which a cast writes the amax of its operand, or None."""
    if state is None or not record or cast.scaling_type is not ScalingType.DELAYED:
        return None
    return state.current_amax


def multiply_scale(scale: Tensor, how: BoundCast, factor: float) -> Tensor:
    """``scale * factor`` for a scale of ``how``; in eager mode a static one launches no kernel."""
    if how.static is None or torch.compiler.is_compiling():
        return scale * factor
    return constant(how.static * factor, scale)


def constant(value: float, like: Tensor) -> Tensor:
    """(1, 1) float32 on the device of ``like``, read-only.

    Each value is filled once per device, and cached. Under tracing (``like`` is not a plain tensor)
    the cache is neither read nor filled. The capture of a CUDA graph does not fill it.
    """
    if torch.compiler.is_compiling() or type(like) not in (Tensor, nn.Parameter):
        return torch.full((1, 1), value, dtype=torch.float32, device=like.device)
    known = _CONSTANTS.get((value, like.device))
    if known is not None:
        return known
    with torch.inference_mode(False):  # a backward cannot save an inference tensor
        filled = torch.full((1, 1), value, dtype=torch.float32, device=like.device)
    if len(_CONSTANTS) < MAX_CONSTANTS and not _captures(like.device):
        if like.device.type == "cuda":  # once: another stream may be the next to read it
            torch.cuda.current_stream(like.device).synchronize()
        _CONSTANTS[value, like.device] = filled
    return filled


MAX_CONSTANTS = 4096  # a factor that depends on the number of tokens may take many values
_CONSTANTS: dict[tuple[float, torch.device], Tensor] = {}


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _scale(x: Tensor, how: BoundCast, state: DelayedState | None, record: bool) -> Tensor:
    if how.static is not None:
        return constant(how.static, x)
    if state is not None and how.is_delayed:
        if state.ready and not record:
            return state.scale.reshape(1, 1)
        amax = kernels.amax(x, how.block)
        if record:
            kernels.record_amax(state.current_amax, amax)
        if state.ready:
            return state.scale.reshape(1, 1)
    elif torch.compiler.is_compiling() and kernels.compiles_for_cpu(x) and not how.is_whole:
        return opaque.dynamic_scale(x, how.block, how.largest, how.scale_format)
    else:
        amax = kernels.amax(x, how.block)
    if state is not None and state.group is not None and how.is_whole:
        amax = max_over_ranks(amax, state.group)
    return kernels.scale_from_amax(amax, how.largest, how.scale_format)


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
