"""Casts of DTensors, as torch's ``ColwiseParallel`` and ``RowwiseParallel`` hand them to a layer.

Each rank casts its own part. A scale that serves elements on several ranks is computed from the
amax over these ranks, so the bits are those of one process. Data is placed as the operand. A scale
is sharded with it, except along a dimension that it serves whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from float8 import kernels
from float8.config import OperandCast
from float8.granularity import WHOLE, scale_shape
from float8.linear.scaling import DelayedState, cast_both, known_scale, max_over_ranks


def cast_sharded(
    x: Any,
    how: OperandCast,
    state: DelayedState | None,
    record: bool,
    scale: Tensor | None,
    row_major: bool,
    transpose: bool,
) -> kernels.Orientations:
    """`float8.linear.scaling.cast_both` of a DTensor; the results are DTensors."""
    whole = [Replicate() if p.is_partial() else p for p in x.placements]  # a cast needs the sum
    x = x if whole == list(x.placements) else x.redistribute(placements=whole)
    results: list[Any] = []
    for wanted, matrix in ((row_major, x), (transpose, x.t())):
        if not wanted:
            results += [x, None]
            continue
        part, of_data, mesh = matrix.to_local(), matrix.placements, matrix.device_mesh
        known = scale.to_local() if isinstance(scale, DTensor) else scale
        is_recorded = record and how.is_delayed and state is not None
        is_known = known is not None or known_scale(how, state, part) is not None
        if is_recorded or not is_known:
            amax = kernels.amax(part, how.block)
            for index, placement in enumerate(of_data):
                if placement.is_shard() and how.block[placement.dim] == WHOLE:
                    amax = max_over_ranks(amax, mesh.get_group(index))
            if is_recorded:  # once, for ranks whose `sync` does not reduce over this mesh
                kernels.record_amax(state.current_amax, amax)  # type: ignore[union-attr]
                record = False
            if not is_known:
                known = kernels.scale_from_amax(amax, how.largest, how.scales)
        data, known = cast_both(part, how, state, False, known, True, False)[:2]
        of_scale = [
            p if p.is_shard() and how.block[p.dim] != WHOLE else Replicate() for p in of_data
        ]
        results += [
            _placed(data, matrix, matrix.shape, of_data),
            _placed(known, matrix, scale_shape(matrix.shape, how.block), of_scale),
        ]
    return kernels.Orientations(*results)


def _placed(part: Tensor, like: Any, shape: Any, placements: Any) -> DTensor:
    """The DTensor of this shape of which ``part`` is this rank's."""
    stride = torch.empty(shape, device="meta").stride()
    sizes: dict[str, Any] = {"shape": torch.Size(shape), "stride": stride}
    own: tuple[Placement, ...] = tuple(placements)
    return DTensor.from_local(part, like.device_mesh, own, run_check=False, **sizes)
