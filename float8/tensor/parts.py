"""Checks of the parts of a `Float8Tensor`: data, scale, block, dtype."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.arguments import check_type
from float8.formats import HIGH_PRECISION_DTYPES, format_of
from float8.granularity import Block, scale_shape


def check_parts(
    data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype, data_t: Tensor | None
) -> None:
    """Raise unless these are the parts of a `Float8Tensor`; see its class."""
    check_type(block, (tuple, list), "Float8Tensor", "block", "one extent per dimension")
    format_of(data.dtype)
    if dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"a Float8Tensor stands for a float32, bfloat16 or float16, not {dtype}")
    _check_scale_dtype(scale)
    if len(block) != data.dim():
        raise ValueError(f"block {tuple(block)} does not fit shape {tuple(data.shape)}")
    if tuple(scale.shape) != (expected := scale_shape(data.shape, block)):
        raise ValueError(
            f"scale must have shape {expected} for data of shape {tuple(data.shape)} and block "
            f"{tuple(block)}, got {tuple(scale.shape)}"
        )
    if data_t is not None:
        expected = (data.shape[-1], math.prod(data.shape[:-1]))
        if (data_t.dtype, data_t.shape) != (data.dtype, expected):
            raise ValueError(
                f"data_t must be {data.dtype} of shape {tuple(expected)} for data of shape "
                f"{tuple(data.shape)}, got {data_t.dtype} {tuple(data_t.shape)}"
            )
    # On a device the look would stall the stream; fake and traced tensors have nothing to look at.
    is_plain_cpu = type(scale) is Tensor and scale.device.type == "cpu" and not is_e8m0(scale)
    if is_plain_cpu and not torch.compiler.is_compiling() and bool((scale <= 0).any()):
        raise ValueError(f"scale must be > 0, got {scale[scale <= 0][0].item()}")


def is_e8m0(scale: Tensor) -> bool:
    """Whether scales are exponents of one byte, which are all > 0 or NaN."""
    return scale.dtype == torch.float8_e8m0fnu


def _check_scale_dtype(scale: Tensor) -> None:
    if scale.dtype != torch.float32 and not is_e8m0(scale):
        raise TypeError(f"scale must be float32 or torch.float8_e8m0fnu, got {scale.dtype}")


def given_scale(scale: Tensor | float, x: Tensor, block: Block) -> Tensor:
    """A scale that the caller gives, checked and of the shape that ``x`` needs."""
    shape = scale_shape(x.shape, block)
    if not isinstance(scale, Tensor):
        check_type(scale, numbers.Real, "from_high_precision", "scale", "a float or a tensor")
        _check_scale_value(scale)
        scale = torch.full(shape, scale, dtype=torch.float32, device=x.device)
    _check_scale_dtype(scale)
    scale = scale.expand(shape) if scale.dim() == 0 else scale
    if tuple(scale.shape) != shape:
        raise ValueError(
            f"scale must have shape {shape} for x of shape {tuple(x.shape)} and block {block}, "
            f"got {tuple(scale.shape)}"
        )
    # A CPU tensor is checked at once; on a device the check would stall the stream.
    if (
        scale.device.type == "cpu"
        and not is_e8m0(scale)
        and not torch.compiler.is_compiling()
        and not has_no_values(scale)
    ):
        own: Any = scale  # the part of this rank, if it is a DTensor
        own = own.to_local() if kernels.is_sharded(scale) else own
        bad = own[~(own.isfinite() & (own >= kernels.MIN_SCALE))]
        if bad.numel():
            _check_scale_value(bad[0].item())
    return scale.clone(memory_format=torch.contiguous_format)  # the caller's may change


def _check_scale_value(scale: float) -> None:
    # Below 2^-126 the reciprocal is infinite, and zeros would become NaN.
    if not kernels.MIN_SCALE <= scale <= torch.finfo(torch.float32).max:
        raise ValueError(f"scale must be finite and > 0 (at least 2^-126), got {scale}")


def has_no_values(x: Tensor) -> bool:
    """Whether a tensor is on the meta device, or a FakeTensor."""
    if x.device.type == "meta":
        return True
    from torch._subclasses.fake_tensor import is_fake

    return is_fake(x)
