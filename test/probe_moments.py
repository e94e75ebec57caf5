"""A kernel that calls the device functions of ``gpu/moments.py`` one by one; see its test."""

import torch
import triton
import triton.language as tl

from float8.kernels.gpu.launch import NO_FUSION
from float8.kernels.gpu.moments import (
    decode_expanded_tile,
    encode_expanded_tile,
    encode_linear,
    stochastic_round_tile,
)


@triton.jit
def _probe(
    x_ptr,
    half_ptr,
    half_scale_ptr,
    codes_ptr,
    scale_ptr,
    exponent_ptr,
    decoded_ptr,
    rounded_ptr,
    random_half_ptr,
    random_linear_ptr,
    random_expanded_ptr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    n = tl.arange(0, GROUPS)
    at = n[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + at)
    first = n * GROUP
    seed, offset = tl.full((), 5, tl.int32), tl.full((), 7, tl.int32)
    half, half_scale = encode_linear(x, True, first, seed, offset, 0, False)
    tl.store(half_ptr + at, half)
    tl.store(half_scale_ptr + n, half_scale)
    codes, scale, exponent = encode_expanded_tile(x, first, seed, offset, 0, False)
    tl.store(codes_ptr + at, codes)
    tl.store(scale_ptr + n, scale)
    tl.store(exponent_ptr + n, exponent)
    tl.store(decoded_ptr + at, decode_expanded_tile(codes, scale[:, None], exponent[:, None]))
    DTYPE: tl.constexpr = rounded_ptr.dtype.element_ty
    tl.store(rounded_ptr + at, stochastic_round_tile(x, first, seed, offset, DTYPE).to(DTYPE))
    tl.store(random_half_ptr + at, encode_linear(x, True, first, seed, offset, -1, True)[0])
    tl.store(random_linear_ptr + at, encode_linear(x, False, first, seed, offset, 0, True)[0])
    tl.store(random_expanded_ptr + at, encode_expanded_tile(x, first, seed, offset, 1, True)[0])


def probe(x, dtype):
    """Of rows of x: float16 codes, scale; expanded codes, scale, exponent, values; x rounded at
    random; at random too: float16, E4M3 and expanded codes.
    """
    rows, group = x.shape
    half, codes = torch.empty_like(x, dtype=torch.float16), torch.empty_like(x, dtype=torch.uint8)
    half_scale, scale, exponent = (x.new_empty(rows, 1) for _ in range(3))
    decoded, rounded = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    at_random = half.clone(), codes.clone(), codes.clone()
    outputs = (half, half_scale, codes, scale, exponent, decoded, rounded, *at_random)
    _probe[(1,)](x, *outputs, GROUPS=rows, GROUP=group, **NO_FUSION)
    return outputs
