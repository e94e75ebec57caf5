"""The weights of experts in float8, as published: one matrix per expert and projection.

A stack (E, N, K) is cast for a grouped GEMM with scales for each expert (`cast_stack`), and files
have its parts. `part_of` takes them out of the cast, so that a file has the bits that train:

=============== ================================================================================
scales          bits of a part that is some rows of an expert, such as gate or up
=============== ================================================================================
rowwise         those of the stack, and of the part cast on its own
128x128 blocks  those of the stack where the part's blocks lie inside the stack's: where gate has a
                multiple of 128 rows, which also gives those of the part cast on its own
tensorwise      those of the stack: gate and up have the scale of their expert, the same
=============== ================================================================================

Where gate has another number of rows, a block of the stack holds rows of both, while blocks in a
file begin with the part. Gate still has the stack's bits. Up would have blocks with two scales, so
`part_of` returns None: it is cast on its own, to other bits than those that trained, with errors of
the same size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from float8.checkpoints.stacks import Slot
from float8.config import Float8LinearConfig
from float8.distributed.float8_gather import block_of
from float8.granularity import WHOLE, Block
from float8.linear.bound_plan import EXPERTS
from float8.linear.scaling import bind_and_cast
from float8.tensor import Float8Tensor


def cast_stack(stack: Tensor, config: Float8LinearConfig) -> Float8Tensor | None:
    """The weights of experts, cast as the output's grouped GEMM casts them.

    Args:
        stack: (E, N, K), in high precision.
        config: of the experts module.

    Returns:
        (E, N, K), with scales for each expert; None if the GEMM reads them in high precision.
    """
    cast = config.plan.output.b
    if cast is None:
        return None
    with torch.no_grad():
        data, scale = bind_and_cast(stack.detach(), cast, emulate=config.emulate, groups=EXPERTS)
    block = block_of(cast, stack)
    if scale.shape[0] != stack.shape[0]:  # a static scale is one for all experts
        scale = scale.reshape(1, *scale.shape[-2:]).expand(stack.shape[0], -1, -1)
    return Float8Tensor(data, scale, block, stack.dtype)


def part_of(stack: Float8Tensor, slot: Slot) -> Float8Tensor | None:
    """The matrix that a slot takes out of a stack in float8, with the same bits; a view.

    Args:
        stack: (E, N, K), or a matrix (N, K), of which a slot may take rows or columns.
        slot: of a published matrix.

    Returns:
        (rows, columns) with its scales; None if a block of it would lie in two of the stack's.
    """
    index = (*slot.index, *[slice(None)] * (stack.dim() - len(slot.index)))
    scale_index: list[int | slice] = []
    for i, extent, size in zip(index, stack.block, stack.shape, strict=True):
        found = _scales_of(i, size if extent == WHOLE else extent, size)
        if found is None:
            return None
        scale_index.append(found)
    block: Block = tuple(
        extent for i, extent in zip(index, stack.block, strict=True) if isinstance(i, slice)
    )
    data, scale = stack.float8_data[index], stack.scale[tuple(scale_index)]
    if slot.transposed:
        data, scale, block = data.mT, scale.mT, (block[1], block[0])
    return Float8Tensor(data, scale, block, stack.dtype)


def _scales_of(index: int | slice, extent: int, size: int) -> int | slice | None:
    """The scales of an index or of a range of a dimension, or None where a block would have two."""
    if isinstance(index, int):
        return index // extent
    start, stop, _ = index.indices(size)
    first, last = start // extent, (max(stop, start + 1) - 1) // extent
    if start % extent and last > first:
        return None
    return slice(first, last + 1)
