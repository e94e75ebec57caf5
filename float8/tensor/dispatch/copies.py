"""Copies, casts, moves and creation: every result keeps scale, block and dtype.

``x.to(dtype)`` changes the dtype that the tensor stands for, not its bytes; ``x.to(device)`` moves
data and scale together. ``copy_`` from a high-precision tensor casts with the destination's own
granularity and formats, computing new scales; from a Float8Tensor of the same kind it copies bytes,
and one of another kind is dequantised first. Into a view of part of a tensor it casts with
the scales that are there, which other elements share. The ``*_like`` and ``new_*`` functions make
Float8Tensors of the same kind with scale 1; for FSDP2 ``new_zeros`` makes a `Float8Shard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.granularity import scale_shape
from float8.tensor.shard import Float8Shard, is_for_fsdp
from float8.tensor.tensor import Float8Tensor, check_high_precision, implements

aten = torch.ops.aten


@implements(
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten._pin_memory.default,
)
def _of_both(
    func: Any, x: Float8Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any
) -> Float8Tensor:
    """The same op of the data and of the scale. ``dtype`` is what the result stands for."""
    return x._replace(
        func(x.float8_data, *args, **kwargs), func(x.scale, *args, **kwargs), dtype=dtype
    )


@implements(aten.is_pinned.default)
def _of_data(func: Any, x: Float8Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(x.float8_data, *args, **kwargs)


@implements(aten.copy_.default)
def _copy_(func: Any, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(destination, Float8Tensor):
        assert isinstance(source, Float8Tensor)
        return func(destination, source.dequantize(), non_blocking)
    # The scales of a part may serve elements outside of it: they stay, and the source saturates.
    known = destination.scale if is_part(destination) else None
    is_same = isinstance(source, Float8Tensor) and (
        (source.block, source.format, source.scale.dtype)
        == (destination.block, destination.format, destination.scale.dtype)
    )
    if known is not None or not is_same:
        source = _cast_like(destination, _plain(source), known)
    assert isinstance(source, Float8Tensor)
    destination.float8_data.copy_(source.float8_data, non_blocking)
    if known is None:
        destination.scale.copy_(source.scale, non_blocking)
    return destination


def _plain(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, Float8Tensor) else x


def is_part(x: Float8Tensor) -> bool:
    """Whether x is a view of some elements of a larger tensor."""
    return x.numel() != x.float8_data.untyped_storage().nbytes()  # one byte per element


def _cast_like(destination: Float8Tensor, source: Tensor, scale: Tensor | None) -> Float8Tensor:
    check_high_precision(source.dtype)
    source = source.to(destination.device).expand(destination.shape)
    fmt, block = destination.format, destination.block
    if scale is None:
        amax = kernels.amax(source, block)
        scale = kernels.scale_from_amax(amax, fmt.max, destination.scale_format)
    return destination._replace(kernels.cast_by_scale(source, scale, block, fmt.dtype), scale)


@implements(
    aten.empty_like.default, aten.zeros_like.default, aten.new_empty.default, aten.new_zeros.default
)
def _new(
    func: Any,
    x: Float8Tensor,
    *size: Sequence[int],
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Tensor:
    if func is aten.new_zeros.default and is_for_fsdp(x):
        return Float8Shard.zeros(x, torch.Size(*size))
    data = func(x.float8_data.view(torch.uint8), *size, **kwargs).view(x.float8_data.dtype)
    scale = x.scale.new_ones(scale_shape(data.shape, x.block), device=data.device)
    return x._replace(data, scale, dtype=dtype)


@implements(aten.is_same_size.default)
def _is_same_size(func: Any, x: Tensor, other: Tensor) -> bool:
    return x.shape == other.shape


@implements(aten.equal.default)
def _equal(func: Any, x: Tensor, other: Tensor) -> bool:
    return torch.equal(_plain(x), _plain(other))
