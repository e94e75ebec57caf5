"""Device functions of the Triton kernels: the twins of ``reference.scale_from_amax`` and ``cast``.

Tested for equal bits. Amaxes travel as the int32 bits of a non-negative float32: integers order
them as floats do, with NaN above infinity, so that one integer maximum propagates NaNs, and an
atomic one is deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# 2^-126, as a constexpr: reference.MIN_SCALE.
_MIN_SCALE = tl.constexpr(2.0**-126)

# Conversions are written in PTX, but for AMD GPUs and Triton's interpreter. Triton's own leave the
# result of a conversion in 16 bits, which several stores then take apart, and ptxas 12.8 and 12.9
# gets that wrong: one of them stores bits of the stack pointer (triton#11111). Here the results of
# two conversions become one 32-bit register at once, and everything later is integer arithmetic on
# it. It also rounds once, where Triton on sm_89 rounds to float16 first.
_PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)

_CONVERT_4 = """{{
.reg .b16 low, high;
cvt.rn.satfinite.{0}x2.f32 low, $2, $1;
cvt.rn.satfinite.{0}x2.f32 high, $4, $3;
mov.b32 $0, {{low, high}};
}}"""
_E4M3 = tl.constexpr(_CONVERT_4.format("e4m3"))
_E5M2 = tl.constexpr(_CONVERT_4.format("e5m2"))

# $0 to $3 are the columns of the rows $4 to $7, a byte per element.
_TRANSPOSE_4X4 = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $4, $5, 0x5140;
prmt.b32 b, $4, $5, 0x7362;
prmt.b32 c, $6, $7, 0x5140;
prmt.b32 d, $6, $7, 0x7362;
prmt.b32 $0, a, c, 0x5410;
prmt.b32 $1, a, c, 0x7632;
prmt.b32 $2, b, d, 0x5410;
prmt.b32 $3, b, d, 0x7632;
}""")


@triton.constexpr_function
def _is_e4m3(FORMAT):
    if FORMAT not in (tl.float8e4nv, tl.float8e5):
        raise ValueError(f"an NVIDIA GPU converts to float8e4nv and float8e5, not to {FORMAT}")
    return tl.float8e4nv == FORMAT


@triton.jit
def magnitude_bits(x32):
    """The bits of |x|."""
    return x32.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_from_amax(amax, FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """float32 amaxes -> dequantisation scales; NaN and inf stay what they are."""
    scale = tl.maximum(amax * (1.0 / FORMAT_MAX), _MIN_SCALE, propagate_nan=tl.PropagateNan.ALL)
    if POWER_OF_TWO:
        # Adding the largest mantissa carries into the exponent unless the mantissa is zero.
        bits = scale.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(bits < 0x7F800000, rounded, scale)
    return scale


@triton.jit
def reciprocal(scale, POWER_OF_TWO: tl.constexpr = False):
    """Of a scale, correctly rounded, unlike Triton's own division.

    A power of two is turned over in three integer operations; a division takes twenty, a call for
    the rare operand, and that many more registers.
    """
    if not POWER_OF_TWO:
        return tl.div_rn(1.0, scale)
    bits = scale.to(tl.int32, bitcast=True)
    finite = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, finite, tl.where(bits == 0x7F800000, 0.0, scale))


@triton.jit
def scaled(x32, factor, FORMAT_MAX: tl.constexpr, FITS: tl.constexpr):
    """What `convert` rounds: x * factor; an infinite x becomes NaN.

    FITS: the factor comes from x's own amax. Then nothing finite exceeds the format by more than
    rounding takes back, and an infinite x makes the factor 0 and itself NaN.
    """
    y = x32 * factor
    if not FITS:
        if not _PTX:
            y = tl.clamp(y, -FORMAT_MAX, FORMAT_MAX, propagate_nan=tl.PropagateNan.ALL)
        y = tl.where(tl.abs(x32) == float("inf"), float("nan"), y)
    return y


@triton.jit
def convert(y, FORMAT: tl.constexpr):
    """float32 -> float8 codes as uint8: nearest even; an NVIDIA GPU saturates."""
    if _PTX:
        # Four neighbours at a time: their codes are one register.
        return tl.inline_asm_elementwise(
            asm=_E4M3 if _is_e4m3(FORMAT) else _E5M2, constraints="=r,f,f,f,f",
            args=[y], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    return y.to(FORMAT).to(tl.uint8, bitcast=True)


@triton.jit
def convert_4(y0, y1, y2, y3, FORMAT: tl.constexpr):
    """`pack_4` of the codes of four tiles."""
    if _PTX:
        return tl.inline_asm_elementwise(
            asm=_E4M3 if _is_e4m3(FORMAT) else _E5M2, constraints="=r,f,f,f,f",
            args=[y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return pack_4(
        convert(y0, FORMAT), convert(y1, FORMAT), convert(y2, FORMAT), convert(y3, FORMAT)
    )


@triton.jit
def pack_4(codes0, codes1, codes2, codes3):
    """Four uint8 tiles -> int32, the first in the low byte."""
    if _PTX:
        return tl.inline_asm_elementwise(
            asm=_TRANSPOSE_4X4, constraints="=r,=r,=r,=r,r,r,r,r",
            args=[codes0, codes1, codes2, codes3], dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    low = codes0.to(tl.int32) | (codes1.to(tl.int32) << 8)
    return low | (codes2.to(tl.int32) << 16) | (codes3.to(tl.int32) << 24)


@triton.jit
def unpack_4(packed):
    """The four uint8 tiles of `pack_4`."""
    if _PTX:
        return tl.inline_asm_elementwise(
            asm=_TRANSPOSE_4X4, constraints="=r,=r,=r,=r,r,r,r,r",
            args=[packed], dtype=(tl.uint8, tl.uint8, tl.uint8, tl.uint8), is_pure=True, pack=4,
        )  # fmt: skip
    return (
        packed.to(tl.uint8),
        (packed >> 8).to(tl.uint8),
        (packed >> 16).to(tl.uint8),
        (packed >> 24).to(tl.uint8),
    )


@triton.jit
def encode(x32, factor, FORMAT_MAX: tl.constexpr, FORMAT: tl.constexpr):
    """float32 -> float8 codes as uint8: nearest even, saturating; an infinite x becomes NaN."""
    return convert(scaled(x32, factor, FORMAT_MAX, False), FORMAT)


@triton.jit
def encode_fitting(x32, factor, FORMAT: tl.constexpr):
    """`encode` under the factor of x's own amax, with fewer instructions; see `scaled`."""
    return convert(x32 * factor, FORMAT)
