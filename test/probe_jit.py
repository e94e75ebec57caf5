"""Kernels that call the device functions of ``gpu/jit.py`` one by one; see ``test_jit.py``."""

import torch
import triton
import triton.language as tl

from float8.kernels.gpu.jit import (
    convert_4,
    convert_to_codes,
    magnitude_bits,
    pack_4,
    reciprocal,
    scale_from_amax,
    scaled,
    scaled_4,
    unpack_4,
)
from float8.kernels.gpu.launch import NO_FUSION, TRITON_FORMATS
from scripts.kernel_tools.forms import Variant


@triton.jit
def _probe(
    x_ptr, floats_ptr, bits_ptr, codes_ptr, N: tl.constexpr,
    FORMAT_MAX: tl.constexpr, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    scale = scale_from_amax(tl.abs(x), FORMAT_MAX, POWER_OF_TWO)
    factor = reciprocal(scale, POWER_OF_TWO)
    tl.store(floats_ptr + at, scale)
    tl.store(floats_ptr + N + at, factor)
    tl.store(bits_ptr + at, magnitude_bits(x))
    tl.store(codes_ptr + at, convert_to_codes(scaled(x, 1.0, FORMAT_MAX, False), FORMAT))
    tl.store(codes_ptr + N + at, convert_to_codes(scaled(x, factor, FORMAT_MAX, True), FORMAT))


def _constants(x, dtype):
    """Of the probes of a format."""
    form = {"FORMAT_MAX": torch.finfo(dtype).max, "FORMAT": TRITON_FORMATS[dtype]}
    return {"N": x.shape[-1], **form, **NO_FUSION}


def probe(x, dtype, power_of_two):
    """Of each x: the scale of amax |x|, its reciprocal, the bits of |x|, two codes of x."""
    floats, bits = x.new_empty(2, len(x)), torch.empty_like(x, dtype=torch.int32)
    codes = torch.empty_like(floats, dtype=torch.uint8)
    _probe[(1,)](x, floats, bits, codes, **_constants(x, dtype), POWER_OF_TWO=power_of_two)
    return *floats, bits, *codes.view(dtype)


@triton.jit
def _pack(
    x_ptr, ints_ptr, rows_ptr, N: tl.constexpr, FORMAT_MAX: tl.constexpr, FORMAT: tl.constexpr
):
    at = tl.arange(0, N)
    xs = (
        tl.load(x_ptr + at),
        tl.load(x_ptr + N + at),
        tl.load(x_ptr + 2 * N + at),
        tl.load(x_ptr + 3 * N + at),
    )
    packed = convert_4(scaled_4(xs, 1.0, FORMAT_MAX, False), FORMAT)
    rows = unpack_4(packed)
    tl.store(ints_ptr + at, packed)
    tl.store(ints_ptr + N + at, pack_4(rows))
    for i in tl.static_range(4):
        tl.store(rows_ptr + i * N + at, rows[i])


def pack(x, dtype):
    """Of x (4, N): codes packed, the same unpacked and packed again, and unpacked."""
    ints, rows = torch.empty_like(x[:2], dtype=torch.int32), torch.empty_like(x, dtype=torch.uint8)
    _pack[(1,)](x, ints, rows, **_constants(x, dtype))
    return *ints, rows


@triton.jit
def _plain(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.float8e4nv).to(tl.uint8, bitcast=True))


PLAIN = Variant("plain", _plain, {"x_ptr": "*fp32", "out_ptr": "*u8"}, {"N": 512}, NO_FUSION)
