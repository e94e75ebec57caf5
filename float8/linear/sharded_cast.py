"""Casts of DTensors, as torch's ``ColwiseParallel`` and ``RowwiseParallel`` hand them to a layer.

With one scale per tensor each rank casts its own part, by the kernel of any tensor, and the scale
is computed from the amax over the ranks, so the bits are those of one process. Other scales of
sharded operands are left to aten (`float8.kernels.plain`), whose ops have sharding rules: a kernel
computes scales of rows from what it reads, which would be a part of the row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from float8 import kernels
from float8.config import OperandCast
from float8.granularity import scale_shape
from float8.kernels import Casts, Float8Matrix
from float8.linear.scaling import DelayedState, known_scale, max_over_ranks


def cast_sharded(
    x: Any,
    how: OperandCast,
    state: DelayedState | None,
    scale: Tensor | None,
    row_major: bool,
    transposed: bool,
    finds_amax: bool,
) -> Casts:
    """`float8.linear.scaling.cast_matrix` of a DTensor; the results are DTensors.

    Experts (E, N, K) share no scale, so those of sharded experts are sharded with them.
    """
    finds_amax = finds_amax and how.is_delayed and state is not None
    if not is_cast_in_parts(x, how):
        scale = known_scale(how, state, x) if scale is None else scale
        return kernels.cast(x, replace(how, kernel=None), scale, row_major, transposed, finds_amax)
    whole: Any = [
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
    simple = all([type(p) is Shard or p.is_replicate() or p.is_partial() for p in x.placements])
    return simple and (how.is_whole or not any([p.is_shard() for p in x.placements]))


def placed(part: Tensor, shape: Any, mesh: Any, placements: Any) -> DTensor:
    """The row-major DTensor of this shape of which ``part`` is this rank's."""
    sizes: dict[str, Any] = {
        "shape": torch.Size(shape),
        "stride": torch.empty(shape, device="meta").stride(),
    }
    own = part.contiguous()
    return DTensor.from_local(own, mesh, tuple(placements), run_check=False, **sizes)
