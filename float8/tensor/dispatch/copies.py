"""Copies, casts, moves and creation: every result keeps scale, block and dtype.

``x.to(dtype)`` changes the dtype that the tensor stands for, not its bytes; ``x.to(device)`` moves
data and scale together. ``copy_`` from a high-precision tensor casts with the destination's own
scales' granularity and format, computing new scales; from a Float8Tensor of the same kind it copies
bytes. Into a view of part of a tensor it casts with the scales that are there, which other elements
share; ``x[indices] = values`` does too. The ``*_like`` and ``new_*`` functions make Float8Tensors
of the same kind with scale 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.formats import ScaleFormat
from float8.granularity import WHOLE, scale_shape
from float8.tensor.parts import check_high_precision, is_e8m0
from float8.tensor.tensor import Float8Tensor, implements

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
def _is_pinned(func: Any, x: Float8Tensor, *args: Any, **kwargs: Any) -> bool:
    pinned: bool = func(x.float8_data, *args, **kwargs)
    return pinned


@implements(aten.copy_.default)
def _copy_(func: Any, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(destination, Float8Tensor):
        assert isinstance(source, Float8Tensor)
        return func(destination, source.dequantize(), non_blocking)
    if is_part(destination):
        # Its scales may serve elements outside of this view: they stay, and the source saturates.
        plain = source.dequantize() if isinstance(source, Float8Tensor) else source
        destination.float8_data.copy_(_cast_like(destination, plain, destination.scale).float8_data)
        return destination
    if not isinstance(source, Float8Tensor):
        source = _cast_like(destination, source)
    if (source.block, source.format) != (destination.block, destination.format):
        raise ValueError(
            f"cannot copy a Float8Tensor of {source.format}, block {source.block} into one of "
            f"{destination.format}, block {destination.block}; copy source.dequantize() instead"
        )
    destination.float8_data.copy_(source.float8_data, non_blocking)
    destination.scale.copy_(source.scale, non_blocking)
    return destination


@implements(aten.index_put_.default)
def _index_put_(
    func: Any,
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
) -> Tensor:
    """``x[indices] = values`` with the scales that are there, which other elements share."""
    plain = values.dequantize() if isinstance(values, Float8Tensor) else values
    if not isinstance(x, Float8Tensor):
        return func(x, indices, plain, accumulate)
    if accumulate:
        raise NotImplementedError(f"{func} of a Float8Tensor x has no accumulate=True: use x.copy_")
    check_high_precision(plain)
    scale = aten.index.Tensor(_scale_of_each_element(x), indices)
    plain = plain.to(x.device).expand(scale.shape)
    codes = kernels.cast(plain, scale, (1,) * plain.dim(), x.float8_data.dtype)
    func(x.float8_data.view(torch.uint8), indices, codes.view(torch.uint8))
    return x


@implements(aten.masked_fill_.Scalar)
def _masked_fill_(func: Any, x: Tensor, mask: Tensor, value: float) -> Tensor:
    """``x.masked_fill_(mask, value)``; from torch 2.15 on ``x[mask] = value`` calls it too."""
    filled = torch.tensor(float(value), device=x.device)
    return _index_put_(aten.index_put_.default, x, [mask.expand(x.shape)], filled)


def _scale_of_each_element(x: Float8Tensor) -> Tensor:
    scale = x.scale
    for dim, extent in enumerate(x.block):
        if extent not in (WHOLE, 1):
            scale = scale.repeat_interleave(extent, dim).narrow(dim, 0, x.shape[dim])
    return scale.expand(x.shape)


def is_part(x: Float8Tensor) -> bool:
    """Whether x is a view of some elements of a larger tensor."""
    return x.numel() != x.float8_data.untyped_storage().nbytes()  # one byte per element


def _cast_like(
    destination: Float8Tensor, source: Tensor, scale: Tensor | None = None
) -> Float8Tensor:
    check_high_precision(source)
    source = source.to(destination.device).expand(destination.shape)
    fmt, block = destination.format, destination.block
    if scale is None:
        scales = ScaleFormat.E8M0 if is_e8m0(destination.scale) else ScaleFormat.FLOAT32
        scale = kernels.scale_from_amax(kernels.amax(source, block), fmt.max, scales.value)
    return destination._replace(kernels.cast(source, scale, block, fmt.dtype), scale)


@implements(
    aten.empty_like.default, aten.zeros_like.default, aten.new_empty.default, aten.new_zeros.default
)
def _new(
    func: Any,
    x: Float8Tensor,
    *size: Sequence[int],
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Float8Tensor:
    data = func(x.float8_data.view(torch.uint8), *size, **kwargs).view(x.float8_data.dtype)
    if data.dim() != x.dim():
        raise ValueError(
            f"{func} from a Float8Tensor with block {x.block}: the number of dimensions must stay, "
            f"got shape {tuple(data.shape)}"
        )
    scale = x.scale.new_ones(scale_shape(data.shape, x.block), device=data.device)
    return x._replace(data, scale, dtype=dtype)


@implements(aten.is_same_size.default)
def _is_same_size(func: Any, x: Tensor, other: Tensor) -> bool:
    return x.shape == other.shape


@implements(aten.equal.default)
def _equal(func: Any, x: Float8Tensor, other: Tensor) -> bool:
    if not isinstance(x, Float8Tensor) or not isinstance(other, Float8Tensor):
        raise TypeError(
            "torch.equal of a Float8Tensor and a plain tensor: call .dequantize() on the former"
        )
    return x.shape == other.shape and bool(torch.equal(x.dequantize(), other.dequantize()))
