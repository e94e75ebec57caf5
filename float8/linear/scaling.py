"""Scale and cast of one operand: functions on plain tensors, and the base class of cast modules.

`quantize` turns a matrix, in the orientation of the GEMM that reads it, into ``(data, scale)`` as
its `OperandCast` says. `quantize_both` does it for the two GEMMs that contract its two dimensions,
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
from float8.granularity import WHOLE
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
    if state is None:  # not delayed: only the group is read, see `_of_delayed`
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


Pair = tuple[Tensor, Tensor]


def quantize(
    x: Tensor,
    cast: OperandCast,
    state: DelayedState | None = None,
    record: bool = False,
    scale: Tensor | None = None,
    emulate: bool = False,
) -> Pair:
    """Cast a matrix to float8 for one GEMM.

    Args:
        x: (rows, contraction), float32, bfloat16 or float16, any strides.
        cast: the resolved cast, stated for this orientation.
        state: the buffers of a delayed cast, else None.
        record: whether a delayed cast records the amax of x (as a maximum, so that a
            recomputation of the same forward changes nothing).
        scale: the scale that an earlier call found for this x (transposed with it), to save the
            second search.
        emulate: run the reference on a CUDA device too.

    Returns:
        float8 data of x's shape, and its float32 scale of shape ``ceil(shape / block)``.
    """
    fmt = on_device(cast.format, x.device)
    if _runs_kernel(x, cast, emulate):
        return _by_kernel(x, cast, state, record, scale, rows=True, cols=False)[:2]
    fits = cast.scaling_type is ScalingType.DYNAMIC
    if scale is None:
        scale = _scale(x, cast, fmt.max, state, record)
    return kernels.cast(x, scale, cast.block, fmt.dtype, fits), scale


def quantize_both(
    x: Tensor,
    by_row: OperandCast | None,
    by_col: OperandCast | None,
    share: bool,
    state: DelayedState | None = None,
    record: bool = False,
    emulate: bool = False,
    used_at_once: bool = False,
) -> tuple[Pair | None, Pair | None]:
    """Cast a matrix for the GEMM that contracts its rows and the one that contracts its columns.

    Args:
        x: any strides; or a tensor in float8 already (one with ``_data`` and ``_scale``), which is
            not cast again: its one cast has to serve both.
        by_row: the cast for the GEMM whose operand is x; None if there is no such GEMM.
        by_col: the cast for the GEMM whose operand is ``x.t()``, stated for that; or None.
        share: whether the two are one cast, so that the second has the first one's bytes.
        state, record, emulate: see `quantize`; an amax is recorded once.
        used_at_once: both pairs go into products and nowhere else, so what the reference would
            decode for each is decoded once.

    Returns:
        the pair for x and the pair for ``x.t()``, None where not asked for. On a CPU the second
        shares the first one's bytes where the casts allow it.
    """
    if hasattr(x, "_data"):  # by name: the tensor type lives above
        pair = (x._data, x._scale)  # type: ignore[attr-defined]
        return (None if by_row is None else pair), (None if by_col is None else transposed(pair))
    if by_row is None or by_col is None:
        rows = None if by_row is None else quantize(x, by_row, state, record, None, emulate)
        cols = None if by_col is None else quantize(x.t(), by_col, state, record, None, emulate)
        return rows, cols
    if _runs_kernel(x, by_row, emulate) and by_row == by_col:
        both = _by_kernel(x, by_row, state, record, None, rows=True, cols=True)
        return both[:2], both[2:]
    rows = quantize(x, by_row, state, record, None, emulate)
    if share and used_at_once:
        rows = (kernels.prepare(rows[0], emulate), rows[1])
    if share:
        return rows, transposed(rows)
    return rows, quantize(x.t(), by_col, state, False, None, emulate)


def quantize_again(x: Tensor, cast: OperandCast, scale: Tensor, emulate: bool = False) -> Pair:
    """What an earlier ``quantize(x, cast)`` returned, transposed: the same bytes, from x again.

    For an operand whose second use shares the first one's bytes, where those were not kept.

    Args:
        x, cast, emulate: as then.
        scale: the scale that it found.
    """
    if _runs_kernel(x, cast, emulate):
        return _by_kernel(x, cast, None, False, scale, rows=False, cols=True)[2:]
    return transposed(quantize(x, cast, scale=scale, emulate=emulate))


def transposed(pair: Pair) -> Pair:
    """The same bytes for the transpose."""
    data, scale = pair
    return data.t(), scale if scale.numel() == 1 else scale.t()


def _runs_kernel(x: Tensor, cast: OperandCast, emulate: bool) -> bool:
    is_static = cast.static_scale is not None
    if is_static and torch.compiler.is_compiling() and kernels.compiler_may_cast(x.device):
        # Elementwise by a constant: it joins the op that makes x, which then writes one byte and
        # no bfloat16, and a transposed copy is 1 + 1: 3 bytes per element. With a kernel, opaque to
        # the compiler, x is written (2) and read (2), both orientations are written (1 + 1): 6.
        return False
    if kernels.runs_kernel(x.device, cast.block, emulate) and not kernels.is_sharded(x):
        return True
    if torch.compiler.is_compiling():  # the compiler casts: DTensors, emulation
        kernels.check_compiler(x.device)
    return False


def _by_kernel(
    x: Tensor,
    cast: OperandCast,
    state: DelayedState | None,
    record: bool,
    scale: Tensor | None,
    rows: bool,
    cols: bool,
) -> kernels.Orientations:
    fmt = on_device(cast.format, x.device)
    scale = known_scale(cast, state, x) if scale is None else scale
    if scale is None and (group := _shares_amax(cast, state)) is not None:
        found = max_over_ranks(kernels.amax(x, cast.block), group)
        scale = kernels.scale_from_amax(found, fmt.max, cast.power_of_two_scale)
    amax = amax_to_record(cast, state, record)
    return kernels.cast_operand(
        x, cast.block, fmt.dtype, cast.power_of_two_scale, scale, rows, cols, amax
    )


def known_scale(cast: OperandCast, state: DelayedState | None, x: Tensor) -> Tensor | None:
    """The scale that is known before the values are seen, or None: it is dynamic.

    Args:
        cast, state: see `quantize`.
        x: what is cast, or a tensor beside it.
    """
    state = _of_delayed(cast, state)
    if state is None:
        return _static_scale(cast, x)
    return state.scale.reshape(1, 1) if state.ready else None


def amax_to_record(cast: OperandCast, state: DelayedState | None, record: bool) -> Tensor | None:
    """Where a cast writes the largest magnitude that it sees, or None."""
    state = _of_delayed(cast, state)
    return None if state is None or not record else state.current_amax


def _of_delayed(cast: OperandCast, state: DelayedState | None) -> DelayedState | None:
    return state if cast.scaling_type is ScalingType.DELAYED else None


def _static_scale(cast: OperandCast, x: Tensor) -> Tensor | None:
    return None if cast.static_scale is None else constant(float(cast.static_scale), x)


def multiply_scale(scale: Tensor, cast: OperandCast, factor: float) -> Tensor:
    """``scale * factor`` for a scale of ``cast``; eagerly a static one takes no kernel."""
    if cast.static_scale is None or torch.compiler.is_compiling():
        return scale * factor
    return constant(float(cast.static_scale) * factor, scale)


def constant(value: float, like: Tensor) -> Tensor:
    """(1, 1) float32 on the device of ``like``, read-only.

    Filled once per value and device, not at every step. What a tracer or a CUDA graph would fill
    is never kept, and none of it is handed what was kept: there ``like`` is no plain tensor.
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


def _scale(
    x: Tensor, cast: OperandCast, format_max: float, state: DelayedState | None, record: bool
) -> Tensor:
    if (static := _static_scale(cast, x)) is not None:
        return static
    delayed = _of_delayed(cast, state)
    if delayed is not None and delayed.ready and not record:
        return delayed.scale.reshape(1, 1)
    amax = kernels.amax(x, cast.block)
    if delayed is not None and record:
        kernels.record_amax(delayed.current_amax, amax)
    if delayed is not None and delayed.ready:
        return delayed.scale.reshape(1, 1)
    if (group := _shares_amax(cast, state)) is not None:
        amax = max_over_ranks(amax, group)
    return kernels.scale_from_amax(amax, format_max, cast.power_of_two_scale)


def _shares_amax(cast: OperandCast, state: DelayedState | None) -> str | None:
    """The group over whose ranks one scale of this operand reaches, or None."""
    whole = cast.block.count(WHOLE) == len(cast.block)
    return None if state is None or not whole else state.group


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
