"""Shape changes: the data, the scale and the block change together, or the op refuses.

The rules follow from the block. A dimension of extent -1 (one scale) or 1 (one scale per index)
can be sliced anywhere; one of extent B only at multiples of B, because a partial block would shift
the others. For FSDP2 ``split`` makes `Float8Shard`s. Dimensions may be merged or split where the
scale has the same structure:

- tensorwise: any reshape, the scale stays a single number;
- otherwise leading dimensions of extent 1 merge and split freely, as in ``x.view(-1, K)`` of a
  rowwise tensor; those from the first blocked dimension on stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from float8.granularity import WHOLE, Block, scale_shape
from float8.tensor.shard import Float8Shard, is_for_fsdp
from float8.tensor.tensor import Float8Tensor, implements

aten = torch.ops.aten


@implements(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, x: Float8Tensor, shape: Sequence[int]) -> Float8Tensor:
    data = func(x.float8_data, shape)
    block = _reshaped_block(x, data.shape)
    return x._replace(data, x.scale.reshape(scale_shape(data.shape, block)), block)


def _reshaped_block(x: Float8Tensor, shape: Sequence[int]) -> Block:
    if all(extent == WHOLE for extent in x.block):
        return (WHOLE,) * len(shape)
    first = next((dim for dim, extent in enumerate(x.block) if extent != 1), x.dim())
    stay, before, after = x.dim() - first, tuple(x.shape), tuple(shape)
    leading = len(after) - stay
    if leading < 0 or after[leading:] != before[first:]:
        raise ValueError(
            f"cannot view a Float8Tensor of shape {before} and block {x.block} as {after}: its "
            f"dimensions {first} to {x.dim() - 1} share scales and must stay; call .dequantize() "
            "first"
        )
    return (1,) * leading + x.block[first:]


@implements(aten.permute.default)
def _permute(func: Any, x: Float8Tensor, dims: Sequence[int]) -> Float8Tensor:
    block = tuple(x.block[dim] for dim in dims)
    order = tuple(dims)
    return x._replace(x.float8_data.permute(order), x.scale.permute(order), block)


@implements(aten.t.default, aten.transpose.int)
def _transpose(func: Any, x: Float8Tensor, dim0: int = 0, dim1: int = -1) -> Float8Tensor:
    dims = list(range(x.dim()))
    if dims:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(func, x, dims)


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
    if extent > 1 and (step != 1 or start % extent or (end % extent and end != size)):
        raise ValueError(
            f"cannot slice [{start}:{end}:{step}] along dim {dim} of a Float8Tensor with block "
            f"{x.block}: bounds must be multiples of {extent}; call .dequantize() first"
        )
    return x._replace(data, func(x.scale, dim, start // extent, -(-end // extent), step))


@implements(aten.select.int)
def _select(func: Any, x: Float8Tensor, dim: int, index: int) -> Float8Tensor:
    data, dim = func(x.float8_data, dim, index), dim % x.dim()
    one = _slice(aten.slice.Tensor, x, dim, index, index + 1 or None)
    return x._replace(data, one.scale.squeeze(dim), x.block[:dim] + x.block[dim + 1 :])


@implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, x: Float8Tensor, sizes: int | Sequence[int], dim: int = 0) -> list[Any]:
    parts, start, datas = [], 0, func(x.float8_data, sizes, dim)
    if dim == 0 and is_for_fsdp(x):
        has_rows = x.block[0] == 1
        scales = func(x.scale, sizes) if has_rows else [x.scale] * len(datas)
        shards = zip(datas, scales, strict=True)
        return [Float8Shard(*both, x.block, x.dtype, has_rows) for both in shards]
    for data in datas:
        end = start + data.shape[dim]
        parts.append(_slice(aten.slice.Tensor, x, dim, start, end))
        start = end
    return parts


@implements(aten.as_strided.default)
def _as_strided(
    func: Any, x: Float8Tensor, size: Any, stride: Any, offset: int | None = None
) -> Any:
    """The whole of x, as FSDP2 asks for it; other views are refused."""
    if (tuple(size), tuple(stride), offset or 0) != (tuple(x.shape), x.stride(), 0):
        raise ValueError(f"{func} of a part of a Float8Tensor: call .dequantize() first")
    return aten.alias.default(x)
