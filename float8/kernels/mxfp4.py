"""MXFP4: 4-bit E2M1 values, 32 consecutive ones of a row with one E8M0 scale.

OCP Microscaling Formats 1.0, sections 5.3.3 (E2M1), 5.4.1 (E8M0) and 6.3 (the conversion)::

    scale = 2^(floor(log2(amax)) - 2)          2 is the exponent of 6, the largest E2M1 value
    value = round_to_nearest_even(x / scale)   one of 0, 0.5, 1, 1.5, 2, 3, 4, 6, with a sign
    project(x) = value * scale                 values above 6 become 6, up to a quarter less

Every operation but the rounding is exact in float32, so all backends and compilers agree on the
bits. The result is exact in the dtype of x, float16 and subnormals included, and `project` does not
change it again: the largest value of a block becomes 4 or 6 times the scale, of which the same
scale follows. A block with a NaN or an infinity is NaN, with scale NaN: nothing makes it finite.

`cast_to_mxfp4` writes the E2M1 values as float8: all are E4M3 numbers. So an MXFP4 weight is a
`Float8Tensor` with 1x32 blocks, which has the same value bit for bit.

**Packed**, a byte has two values: that of the even column in its low half. A half is the sign and
the number of the value among the eight (gpt-oss, ``gpt_oss/torch/weights.py``; compressed-tensors
0.20, ``compressors/nvfp4/helpers.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from float8.kernels import e8m0

MXFP4_BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _values_and_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 values (..., K / 32, 32) in float32 and scales (..., K / 32, 1) of x (..., K)."""
    blocks = x.unflatten(-1, (-1, MXFP4_BLOCK)).to(torch.float32)
    amax = blocks.abs().amax(-1, keepdim=True)
    amax = torch.where(amax.isinf(), torch.nan, amax)
    scale = e8m0.e8m0_scale_from_amax(amax, 6.0, rounds_up=False)
    scaled = blocks * e8m0.e8m0_reciprocal(scale)
    # The distance between neighbours, at least that of subnormals. In place: stacks are large.
    step = torch.where(scaled.abs() < 2, 0.5, torch.where(scaled.abs() < 4, 1.0, 2.0))
    return scaled.div_(step).round_().mul_(step).clamp_(-6.0, 6.0), scale  # rounds to even


def project(x: Tensor) -> Tensor:
    """x (..., K) rounded to MXFP4, in its dtype; K is a multiple of 32."""
    values, scale = _values_and_scale(x)
    return values.mul_(e8m0.as_float32(scale)).flatten(-2).to(x.dtype)


def cast_to_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """The E2M1 values (..., K) of x in E4M3, and their E8M0 scales (..., K / 32)."""
    values, scale = _values_and_scale(x)
    return values.flatten(-2).to(torch.float8_e4m3fn), scale.squeeze(-1)


def pack(values: Tensor) -> Tensor:
    """E2M1 values (..., K) in E4M3 as bytes (..., K / 2), uint8."""
    values32 = values.to(torch.float32)
    magnitudes = torch.tensor(_MAGNITUDES, device=values.device)
    codes = torch.bucketize(values32.abs().contiguous(), magnitudes) + 8 * values32.signbit()
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int32)
    both = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], device=packed.device)
    return both.to(torch.float8_e4m3fn).view(torch.uint8)[codes].view(torch.float8_e4m3fn)
