"""Kernels that call the device functions of ``gpu/jit.py`` one by one; see ``test_jit.py``."""

import torch
import triton
import triton.language as tl

from float8.kernels.gpu.jit import (
    encode,
    encode_fitting,
    magnitude_bits,
    reciprocal,
    scale_from_amax,
)
from float8.kernels.gpu.launch import NO_FUSION, TRITON_FORMATS


@triton.jit
def _probe(
    x_ptr,
    scale_ptr,
    factor_ptr,
    bits_ptr,
    codes_ptr,
    fitting_ptr,
    N: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    scale = scale_from_amax(tl.abs(x), FORMAT_MAX, POWER_OF_TWO)
    tl.store(scale_ptr + at, scale)
    factor = reciprocal(scale, POWER_OF_TWO)
    tl.store(factor_ptr + at, factor)
    tl.store(bits_ptr + at, magnitude_bits(x))
    tl.store(codes_ptr + at, encode(x, 1.0, FORMAT_MAX, FORMAT))
    tl.store(fitting_ptr + at, encode_fitting(x, factor, FORMAT))


def probe(x, dtype, power_of_two):
    """Of each x: the scale of amax |x|, its reciprocal, the bits of |x|, two codes of x."""
    scale, factor = torch.empty_like(x), torch.empty_like(x)
    bits = torch.empty_like(x, dtype=torch.int32)
    codes, fitting = (torch.empty_like(x, dtype=torch.uint8) for _ in range(2))
    _probe[(1,)](
        x,
        scale,
        factor,
        bits,
        codes,
        fitting,
        N=x.numel(),
        FORMAT_MAX=torch.finfo(dtype).max,
        FORMAT=TRITON_FORMATS[dtype],
        POWER_OF_TWO=power_of_two,
        **NO_FUSION,
    )
    return scale, factor, bits, codes.view(dtype), fitting.view(dtype)
