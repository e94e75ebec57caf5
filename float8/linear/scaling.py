"""Scale and cast of one operand: functions on plain tensors, and the base class of cast modules.

`quantize` turns a matrix, in the orientation of the GEMM that reads it, into ``(data, scale)`` as
its `OperandCast` says. `cast_both` does it for the two GEMMs that contract its two dimensions,
from one read where there is a kernel for it. The scaling type decides where the scale comes from:

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
from float8.linear.bound_plan import BoundCast, BoundOperand
from float8.tensor import Float8Tensor


class DelayedState(NamedTuple):
    """The buffers of a delayed cast that a forward or backward touches; float32, 0-dim.

    ``ready`` is False until the operand has a scale: until then the dynamic scale is used.
    ``group`` names the process group over whose ranks the tensor is sharded. It is None where a
    rank has the whole tensor. See `sharded_state`.
    """

    scale: Tensor
    current_amax: Tensor
    ready: bool
    group: str | None = None


def sharded_state(state: DelayedState | None, group: str | None) -> DelayedState | None:
    """The state of an operand of which each rank of a process group holds a part.

    A tensorwise scale of such an operand follows from the amax over exactly those ranks. Scales of
    rows and blocks are those of the part.

    Args:
        state: of a delayed cast, or None.
        group: the name of the process group (``ProcessGroup.group_name``), or None.
    """
    if group is None:
        return state
    if state is None:  # not delayed: only the group is read
        return DelayedState(None, None, False, group)  # type: ignore[arg-type]
    return state._replace(group=group)


class Cast(nn.Module):
    """Abstract: how one operand becomes a `Float8Tensor`. `float8.linear.cast.make_cast` makes one.

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
        """The buffers that `quantize` reads and records in, or None."""
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


Pair = tuple[Tensor, Any]  # data and scale; in high precision a matrix and None


def quantize(
    x: Tensor,
    cast: OperandCast,
    state: DelayedState | None = None,
    record: bool = False,
    scale: Tensor | None = None,
    emulate: bool = False,
) -> Pair:
    """`cast_rows` by a cast that is not bound yet."""
    family, compiling = kernels.family_of(x.device), torch.compiler.is_compiling()
    how = BoundCast(cast, family, emulate, compiling)
    return cast_rows(x, how, state, record, scale)


def cast_rows(
    x: Tensor,
    how: BoundCast | None,
    state: DelayedState | None,
    record: bool,
    scale: Tensor | None,
) -> Pair:
    """Cast a matrix to float8 for one GEMM.

    Args:
        x: (rows, contraction), float32, bfloat16 or float16, any strides.
        how: the cast, stated for this orientation; None keeps x in high precision.
        state: the buffers of a delayed cast, else None.
        record: whether a delayed cast records the amax of x (as a maximum, so that a
            recomputation of the same forward changes nothing).
        scale: the scale that an earlier call found for this x (transposed with it), to save the
            second search.

    Returns:
        float8 data of x's shape, and its float32 scale of shape ``ceil(shape / block)``; x and no
        scale in high precision.
    """
    if how is None:
        return x, None
    if how.kernel is not None and not kernels.is_sharded(x):
        return _by_kernel(x, how, state, record, scale, rows=True, cols=False)[:2]
    if torch.compiler.is_compiling():  # the compiler casts: static scales, DTensors, emulation
        kernels.check_compiler(x.device)
    if scale is None:
        scale = _scale(x, how, state, record)
    return kernels.cast(x, scale, how.block, how.dtype, how.is_dynamic), scale


def cast_both(
    x: Tensor,
    operand: BoundOperand,
    state: DelayedState | None,
    record: bool,
    first: bool,
    second: bool,
    decode: bool,
) -> tuple[Pair | None, Pair | None]:
    """Cast a matrix for the GEMM that contracts its rows and the one that contracts its columns.

    Args:
        x: any strides; or a tensor in float8 already (one with ``_data`` and ``_scale``), which is
            not cast again: its one cast has to serve both.
        operand: the two casts.
        state, record: see `cast_rows`; an amax is recorded once.
        first, second: which of the two is wanted.
        decode: only products in plain PyTorch read the two: data that both read is converted to
            bfloat16 once.

    Returns:
        the pair for x and the pair for ``x.t()``, None where not wanted. On a CPU the second shares
        the first one's bytes where the casts allow it.
    """
    if isinstance(x, Float8Tensor):  # by attribute: torch.compile traces no properties of it
        pair = (x._data, x._scale)
        return (pair if first else None), (transposed(pair) if second else None)
    if not (first and second):
        rows = cast_rows(x, operand.first, state, record, None) if first else None
        cols = cast_rows(x.t(), operand.second, state, record, None) if second else None
        return rows, cols
    if operand.at_once and not kernels.is_sharded(x):
        assert operand.first is not None
        both = _by_kernel(x, operand.first, state, record, None, rows=True, cols=True)
        return both[:2], both[2:]
    rows = cast_rows(x, operand.first, state, record, None)
    if not operand.is_shared:
        # An amax is recorded once, by the cast that there is.
        record = record and operand.first is None
        return rows, cast_rows(x.t(), operand.second, state, record, None)
    if decode:
        rows = (kernels.decode(rows[0]), rows[1])
    return rows, transposed(rows)


def cast_again(x: Tensor, how: BoundCast, scale: Tensor) -> Pair:
    """What an earlier ``cast_rows(x, how)`` returned, transposed: the same bytes, from x again.

    For an operand whose second use shares the first one's bytes, which were not kept.

    Args:
        x, how: as then.
        scale: the scale that it found.
    """
    if how.kernel is not None and not kernels.is_sharded(x):
        return _by_kernel(x, how, None, False, scale, rows=False, cols=True)[2:]
    return transposed(cast_rows(x, how, None, False, scale))


def transposed(pair: Pair) -> Pair:
    """The same bytes for the transpose."""
    data, scale = pair
    return data.t(), scale if scale.numel() == 1 else scale.t()


def _by_kernel(
    x: Tensor,
    how: BoundCast,
    state: DelayedState | None,
    record: bool,
    scale: Tensor | None,
    rows: bool,
    cols: bool,
) -> kernels.Orientations:
    assert how.kernel is not None
    amax = None
    if how.static is not None:
        scale = constant(how.static, x) if scale is None else scale
    elif state is not None:
        amax = state.current_amax if how.is_delayed and record else None
        scale = _scale_of_state(x, how, state) if scale is None else scale
    return kernels.cast_by_kernel(
        how.kernel, x, how.block, how.dtype, how.power_of_two, scale, rows, cols, amax
    )


def _scale_of_state(x: Tensor, how: BoundCast, state: DelayedState) -> Tensor | None:
    """The scale that past steps or the ranks of a group have found; None: the kernel finds it."""
    if how.is_delayed and state.ready:
        return state.scale.reshape(1, 1)
    if not how.is_whole or state.group is None:
        return None
    found = max_over_ranks(kernels.amax(x, how.block), state.group)
    return kernels.scale_from_amax(found, how.largest, how.power_of_two)


def known_scale(cast: OperandCast, state: DelayedState | None, x: Tensor) -> Tensor | None:
    """The scale that is known before the values are seen, or None: it is dynamic.

    Args:
        cast, state: see `quantize`.
        x: what is cast, or a tensor beside it.
    """
    if cast.static_scale is not None:
        return constant(float(cast.static_scale), x)
    is_delayed = cast.scaling_type is ScalingType.DELAYED
    if is_delayed and state is not None and state.ready:
        return state.scale.reshape(1, 1)
    return None


def amax_to_record(cast: OperandCast, state: DelayedState | None, record: bool) -> Tensor | None:
    """Where a cast writes the largest magnitude that it sees, or None."""
    if state is None or not record or cast.scaling_type is not ScalingType.DELAYED:
        return None
    return state.current_amax


def multiply_scale(scale: Tensor, how: BoundCast, factor: float) -> Tensor:
    """``scale * factor`` for a scale of ``how``; eagerly a static one takes no kernel."""
    if how.static is None or torch.compiler.is_compiling():
        return scale * factor
    return constant(how.static * factor, scale)


def constant(value: float, like: Tensor) -> Tensor:
    """(1, 1) float32 on the device of ``like``, read-only.

    Filled once per value and device, not at every step. Tracers, where ``like`` is no plain tensor,
    neither read nor fill this cache; the capture of a CUDA graph does not fill it.
    """
    if torch.compiler.is_compiling() or type(like) not in (Tensor, nn.Parameter):
        return torch.full((1, 1), value, dtype=torch.float32, device=like.device)
    known = _CONSTANTS.get((value, like.device))
    if known is not None:
        return known
    with torch.inference_mode(False):  # or no backward could save it
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
    else:
        amax = kernels.amax(x, how.block)
    if state is not None and state.group is not None and how.is_whole:
        amax = max_over_ranks(amax, state.group)
    return kernels.scale_from_amax(amax, how.largest, how.power_of_two)


def max_over_ranks(amax: Tensor, group: Any) -> Tensor:
    """The element-wise maximum of amaxes over the ranks of a process group; inf if not finite.

    gloo's MAX loses a NaN that is not on rank 0. An infinity survives on every backend, and makes
    the scale and every product NaN as well.

    Args:
        amax: float32, of equal shape on all ranks, on a device that the group's backend reduces.
        group: a ``ProcessGroup``, or its name: compiled code takes the name.
    """
    name = group if isinstance(group, str) else group.group_name
    ops = torch.ops._c10d_functional  # by name, so that importing float8 imports no collectives
    finite_or_inf = torch.where(amax.isfinite(), amax, torch.inf)
    return ops.wait_tensor(ops.all_reduce(finite_or_inf, "max", name))
