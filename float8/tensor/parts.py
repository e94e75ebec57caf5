"""Checks of the parts of a `Float8Tensor`: its scale, and the dtype that it stands for."""

from __future__ import annotations

import torch
from torch import Tensor

from float8 import kernels
from float8.formats import HIGH_PRECISION_DTYPES
from float8.granularity import Block, scale_shape


def check_high_precision(dtype: torch.dtype) -> None:
    """Raise TypeError unless float8 is cast from this dtype, and dequantised to it."""
    if dtype not in HIGH_PRECISION_DTYPES:
        known = ", ".join(str(d) for d in HIGH_PRECISION_DTYPES)
        raise TypeError(f"float8 stands for one of {known}, not {dtype}: convert or .dequantize()")


def is_e8m0(scale: Tensor) -> bool:
    """Whether scales are exponents of one byte."""
    return scale.dtype == torch.float8_e8m0fnu


def check_scale(scale: Tensor, shape: torch.Size, block: Block) -> None:
    """Raise ValueError unless these are the scales of a tensor of this shape."""
    expected = scale_shape(shape, block)
    is_scale = scale.dtype == torch.float32 or is_e8m0(scale)
    if not is_scale or tuple(scale.shape) != expected:
        raise ValueError(
            f"scale must be float32 or torch.float8_e8m0fnu of shape {expected} for shape "
            f"{tuple(shape)} and block {tuple(block)}, got {scale.dtype} {tuple(scale.shape)}"
        )


def given_scale(scale: Tensor | float, x: Tensor, block: Block) -> Tensor:
    """A scale that the caller gives, of the shape that ``x`` needs."""
    if not isinstance(scale, Tensor):
        # Below 2^-126 the reciprocal is infinite, and zeros would become NaN.
        if not kernels.MIN_SCALE <= scale <= torch.finfo(torch.float32).max:
            raise ValueError(f"scale must be finite and > 0 (at least 2^-126), got {scale}")
        scale = torch.full((), scale, dtype=torch.float32, device=x.device)
    scale = scale.expand(scale_shape(x.shape, block)) if scale.dim() == 0 else scale
    check_scale(scale, x.shape, block)
    return scale.clone(memory_format=torch.contiguous_format)  # the caller's may change
