"""Checks of the parts of a `Float8Tensor`: data, scale, block, dtype."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.formats import HIGH_PRECISION_DTYPES, format_of
from float8.granularity import Block, scale_shape


def check_parts(
    data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype, data_t: Tensor | None
) -> None:
    """Raise unless these are the parts of a `Float8Tensor`; see its class."""
    format_of(data.dtype)
    if dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"a Float8Tensor stands for a float32, bfloat16 or float16, not {dtype}; for another "
            "dtype call .dequantize() first"
        )
    if len(block) != data.dim():
        raise ValueError(f"block {tuple(block)} does not fit shape {tuple(data.shape)}")
    _check_scale(scale, data.shape, block)
    transposed = (data.shape[-1], math.prod(data.shape[:-1])) if data.dim() else ()
    if data_t is not None and (data_t.dtype, data_t.shape) != (data.dtype, transposed):
        raise ValueError(
            f"data_t must be {data.dtype} of shape {transposed} for data of shape "
            f"{tuple(data.shape)}, got {data_t.dtype} {tuple(data_t.shape)}"
        )
    values = _known_values(scale)
    if values is not None and bool((values <= 0).any()):
        raise ValueError(f"scale must be > 0, got {values.min().item()}")


def check_high_precision(x: Tensor) -> None:
    """Raise TypeError unless a tensor has a dtype from which float8 is cast."""
    if x.dtype not in HIGH_PRECISION_DTYPES:
        known = ", ".join(str(d) for d in HIGH_PRECISION_DTYPES)
        raise TypeError(f"cannot cast {x.dtype} to float8: convert it to one of {known} first")


def is_e8m0(scale: Tensor) -> bool:
    """Whether scales are exponents of one byte, which are all > 0 or NaN."""
    return scale.dtype == torch.float8_e8m0fnu


def given_scale(scale: Tensor | float, x: Tensor, block: Block) -> Tensor:
    """A scale that the caller gives, checked and of the shape that ``x`` needs."""
    shape, largest = scale_shape(x.shape, block), torch.finfo(torch.float32).max
    values = _known_values(scale) if isinstance(scale, Tensor) else scale
    # Below 2^-126 the reciprocal is infinite, and zeros would become NaN.
    fits = True if values is None else (values >= kernels.MIN_SCALE) & (values <= largest)
    if not (bool(fits.all()) if isinstance(fits, Tensor) else fits):
        raise ValueError(f"scale must be finite and > 0 (at least 2^-126), got {scale}")
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float32, device=x.device)
    scale = scale.expand(shape) if scale.dim() == 0 else scale
    _check_scale(scale, x.shape, block)
    return scale.clone(memory_format=torch.contiguous_format)  # the caller's may change


def _check_scale(scale: Tensor, shape: torch.Size, block: Block) -> None:
    if scale.dtype != torch.float32 and not is_e8m0(scale):
        raise TypeError(f"scale must be float32 or torch.float8_e8m0fnu, got {scale.dtype}")
    if tuple(scale.shape) != (expected := scale_shape(shape, block)):
        raise ValueError(
            f"scale must have shape {expected} for shape {tuple(shape)} and block {tuple(block)}, "
            f"got {tuple(scale.shape)}"
        )


def _known_values(scale: Tensor) -> Tensor | None:
    """The scales of this rank, where looking at them costs nothing, or None.

    On a device the look would stall the stream; fake and traced tensors have nothing to look at.
    """
    if is_e8m0(scale) or torch.compiler.is_compiling():
        return None
    own: Any = scale  # the part of this rank, if it is a DTensor
    own = own.to_local() if kernels.is_sharded(scale) else own
    return own if type(own) is Tensor and own.device.type == "cpu" else None
