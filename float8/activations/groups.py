"""A tensor as what is kept of it: float8 codes, and one scale per group of elements.

A group is ``size`` consecutive elements of the last dimension (the last group of a row may be
shorter); of a tensor whose last dimension is shorter than a group, of the whole tensor in its
logical order. Legend: R rows, C elements in each, G = ceil(C / size) groups in each::

    code  = nearest(x / scale)         E4M3 (or E5M2), 1 byte per element
    value = code * scale               scale = amax / max(format), by kernels.scale_from_amax

A power-of-two scale is kept as one byte, its E8M0 code: the exponent field of the float32
(``2^(byte - 127)``; 255 stands for inf and NaN), others as a float32:

====== ================ ==============
group  scale            bytes/element
====== ================ ==============
128    power of two     1.008
128    float32          1.031
16     power of two     1.063
16     float32          1.250
====== ================ ==============

The SQNR of a normal tensor is 31.5, 31.8, 31.5 and 33.0 dB, in this order; 128 with powers of
two is the default: the fewest bytes. E4M3 is a floating point format of 18 binades, and a smaller
group gains little until magnitudes inside a large one span more.

A NaN, or an inf, makes its whole group NaN: seen, never a plausible number. Zeros stay zeros.

On CUDA a group of 128 is cast by the Triton kernel ``gpu/cast_blockwise``, one read and one launch.
Every other group size, and decoding, is plain PyTorch there as on a CPU, several passes in eager
mode; torch.compile fuses them into their neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from float8 import kernels
from float8.formats import E4M3, HIGH_PRECISION_DTYPES, format_of


class Groups(NamedTuple):
    """How tensors are kept: elements per group, the dtype, and whether scales are 1 byte."""

    size: int = 128
    dtype: torch.dtype = E4M3.dtype
    power_of_two: bool = True


class Codes(NamedTuple):
    """data (R, C) float8; scale (R, G), uint8 exponents or float32."""

    data: Tensor
    scale: Tensor


def encode(x: Tensor, groups: Groups) -> Codes:
    """Float8 codes of a float32, bfloat16 or float16 tensor of any shape and strides."""
    x_RC, block, dtype = rows_of(x, groups.size), (1, groups.size), groups.dtype
    if kernels.runs_kernel(x.device, block, emulate=False):
        cast = kernels.cast_operand(x_RC, block, dtype, groups.power_of_two)
        data, scale = cast.data, cast.scale
    else:
        amax = kernels.amax(x_RC, block)
        scale = kernels.scale_from_amax(amax, format_of(dtype).max, groups.power_of_two)
        data = kernels.cast(x_RC, scale, block, dtype, fits=True)
    if groups.power_of_two:
        scale = (scale.view(torch.int32) >> 23).to(torch.uint8)
    return Codes(data, scale)


def decode(codes: Codes, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The values, of ``shape``; in bfloat16 what was bfloat16, all else in float32.

    A code times a power of two is exact in bfloat16; in float16 it may overflow.
    """
    data, scale = codes
    if scale.dtype == torch.uint8:
        scale = (scale.to(torch.int32) << 23).view(torch.float32)
    dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    return kernels.dequantize(data, scale, (1, size), dtype).reshape(shape)


def rows_of(x: Tensor, size: int) -> Tensor:
    """x as the matrix (R, C) whose rows are cut into groups."""
    if x.dim() == 0 or x.shape[-1] < size:
        return x.reshape(1, -1)
    return x.reshape(-1, x.shape[-1])


def fits(x: Tensor) -> bool:
    """Whether a tensor has a dtype that is kept in float8 (float64 and integers have not)."""
    return x.dtype in HIGH_PRECISION_DTYPES
