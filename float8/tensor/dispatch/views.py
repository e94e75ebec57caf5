"""Shape changes: the data, the scale and the block change together, or the op refuses.

The rules follow from the block. A dimension of extent -1 (one scale) or 1 (one scale per index)
can be sliced anywhere; one of extent B only at multiples of B, because a partial block would shift
the others. Dimensions may be merged or split where the scale has the same structure:

- tensorwise: any reshape, the scale stays a single number;
- otherwise dimensions of extent 1 merge and split freely before the first blocked dimension and
  after the last one; those between stay as they are (``x.view(-1, K)`` of a rowwise tensor,
  ``x.view(M, -1)`` of one that is scaled over dim 0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8.granularity import WHOLE, Block, scale_shape
from float8.tensor.tensor import NOT_SHARDED, Float8Tensor, blame, implements

aten = torch.ops.aten


@implements(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, x: Float8Tensor, shape: Sequence[int]) -> Float8Tensor:
    data = func(x.float8_data, shape)
    block = _reshaped_block(x, data.shape)
    return x._replace(data, x.scale.reshape(scale_shape(data.shape, block)), block)


def _reshaped_block(x: Float8Tensor, shape: Sequence[int]) -> Block:
    if all(extent == WHOLE for extent in x.block):
        return (WHOLE,) * len(shape)
    # From the first to the last dimension whose extent is not 1: they carry the blocks and stay.
    blocked = [dim for dim, extent in enumerate(x.block) if extent != 1]
    first, end = (blocked[0], blocked[-1] + 1) if blocked else (len(x.block), len(x.block))
    before, after = tuple(x.shape), tuple(shape)
    for start in range(len(after) - (end - first), -1, -1):
        stop = start + end - first
        same_elements = x.numel() == 0 or math.prod(after[:start]) == math.prod(before[:first])
        if same_elements and after[start:stop] == before[first:end]:
            return (1,) * start + tuple(x.block[first:end]) + (1,) * (len(after) - stop)
    raise ValueError(
        f"cannot view a Float8Tensor of shape {before} and block {x.block} as {after}: its "
        f"dimensions {first} to {end - 1} share scales and must stay; call .dequantize() first"
        + (f". {NOT_SHARDED}" if len(after) == 1 else "")
    )


@implements(aten.t.default)
def _t(func: Any, x: Float8Tensor) -> Float8Tensor:
    return x._replace(x.float8_data.t(), x.scale.t(), x.block[::-1])


@implements(aten.transpose.int)
def _transpose(func: Any, x: Float8Tensor, dim0: int, dim1: int) -> Float8Tensor:
    block = list(x.block)
    block[dim0], block[dim1] = block[dim1], block[dim0]
    return x._replace(
        x.float8_data.transpose(dim0, dim1), x.scale.transpose(dim0, dim1), tuple(block)
    )


@implements(aten.permute.default)
def _permute(func: Any, x: Float8Tensor, dims: Sequence[int]) -> Float8Tensor:
    block = tuple(x.block[dim] for dim in dims)
    return x._replace(func(x.float8_data, dims), func(x.scale, dims), block)


@implements(aten.unsqueeze.default)
def _unsqueeze(func: Any, x: Float8Tensor, dim: int) -> Float8Tensor:
    dim = dim % (x.dim() + 1)
    # A new dimension has one index: it may share (-1) with a tensorwise tensor, else it is its own.
    extent = WHOLE if all(e == WHOLE for e in x.block) else 1
    block = (*x.block[:dim], extent, *x.block[dim:])
    return x._replace(x.float8_data.unsqueeze(dim), x.scale.unsqueeze(dim), block)


@implements(aten.slice.Tensor)
def _slice(
    func: Any,
    x: Float8Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Float8Tensor:
    dim, size = dim % x.dim(), x.shape[dim]
    start, end, _ = slice(start, end).indices(size)
    extent = x.block[dim]
    data = func(x.float8_data, dim, start, end, step)
    if extent == WHOLE:
        return x._replace(data)
    if extent == 1:
        return x._replace(data, func(x.scale, dim, start, end, step))
    if step != 1 or start % extent or (end % extent and end != size):
        raise ValueError(
            f"cannot slice [{start}:{end}:{step}] along dim {dim} of a Float8Tensor with block "
            f"{x.block}: bounds must be multiples of {extent}; call .dequantize() first"
            + (f". {NOT_SHARDED}" if isinstance(x, torch.nn.Parameter) else "")
        )
    return x._replace(data, func(x.scale, dim, start // extent, -(-end // extent)))


@implements(aten.select.int)
def _select(func: Any, x: Float8Tensor, dim: int, index: int) -> Float8Tensor:
    dim = dim % x.dim()
    if x.block[dim] not in (WHOLE, 1):
        raise ValueError(
            f"cannot select along dim {dim} of a Float8Tensor with block {x.block}: that splits a "
            "block; call .dequantize() first"
        )
    block = x.block[:dim] + x.block[dim + 1 :]
    scale_index = 0 if x.block[dim] == WHOLE else index
    return x._replace(func(x.float8_data, dim, index), func(x.scale, dim, scale_index), block)


@implements(aten.split.Tensor)
def _split(func: Any, x: Float8Tensor, size: int, dim: int = 0) -> list[Float8Tensor]:
    total = x.shape[dim]
    if size < 1 and total:
        raise ValueError(f"{func}: split_size must be positive, got {size}")
    return [
        _slice(aten.slice.Tensor, x, dim, start, min(start + size, total))
        for start in range(0, max(total, 1), max(size, 1))
    ]


@implements(aten.split_with_sizes.default)
def _split_with_sizes(
    func: Any, x: Float8Tensor, sizes: Sequence[int], dim: int = 0
) -> list[Float8Tensor]:
    if sum(sizes) != x.shape[dim]:
        raise ValueError(f"{func}: sizes {list(sizes)} do not sum to {x.shape[dim]}, dim {dim}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [
        _slice(aten.slice.Tensor, x, dim, end - size, end)
        for size, end in zip(sizes, ends, strict=True)
    ]


@implements(aten.cat.default)
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Float8Tensor:
    first = tensors[0]
    assert isinstance(first, Float8Tensor) or any(isinstance(t, Float8Tensor) for t in tensors)
    for t in tensors:
        if not isinstance(t, Float8Tensor) or not isinstance(first, Float8Tensor):
            raise TypeError(
                "cannot cat a Float8Tensor with a plain tensor "
                f"({[type(t).__name__ for t in tensors]}); call .dequantize() on the "
                "Float8Tensors first" + blame(tensors)
            )
        if (t.block, t.format, t.dtype) != (first.block, first.format, first.dtype):
            raise ValueError(f"cannot cat Float8Tensors of different kinds: {first!r} and {t!r}")
    parts = [t for t in tensors if isinstance(t, Float8Tensor)]
    dim = dim % parts[0].dim()
    # cat is not defined for float8 dtypes everywhere; it is for bytes.
    data = func([t.float8_data.view(torch.uint8) for t in parts], dim).view(
        parts[0].float8_data.dtype
    )
    extent = parts[0].block[dim]
    if extent == WHOLE:
        return parts[0]._replace(data, _common_scale(parts, dim))
    if any(t.shape[dim] % extent for t in parts[:-1]):
        raise ValueError(
            f"cannot cat along dim {dim}: {[t.shape[dim] for t in parts]} are not multiples of the "
            f"block {extent}; call .dequantize() first"
        )
    return parts[0]._replace(data, func([t.scale for t in parts], dim))


def _common_scale(parts: list[Float8Tensor], dim: int) -> Tensor:
    """The scale of tensors that share it along ``dim``: equal in all of them, or there is none."""
    scale = parts[0].scale
    for t in parts[1:]:
        if t.scale is not scale and not torch.equal(t.scale, scale):
            raise ValueError(
                f"cannot cat along dim {dim}, which shares one scale per tensor: the scales differ "
                f"({scale.flatten()[:4].tolist()} and {t.scale.flatten()[:4].tolist()}); call "
                ".dequantize() first, or cast all parts with one scale"
            )
    return scale
