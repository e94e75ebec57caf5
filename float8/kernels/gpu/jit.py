"""Device functions of the Triton kernels: the twins of ``reference.scale_from_amax`` and ``cast``.

Tested for equal bits. Amaxes travel as the int32 bits of a non-negative float32: integers order
them as floats do, with NaN above infinity, so that one integer maximum propagates NaNs, and an
atomic one is deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

# 2^-126, as a constexpr: reference.MIN_SCALE.
_MIN_SCALE = tl.constexpr(2.0**-126)


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
def encode(x32, factor, FORMAT_MAX: tl.constexpr, FORMAT: tl.constexpr):
    """float32 -> float8 codes as uint8: nearest even, saturating; an infinite x becomes NaN."""
    y = tl.clamp(x32 * factor, -FORMAT_MAX, FORMAT_MAX, propagate_nan=tl.PropagateNan.ALL)
    y = tl.where(tl.abs(x32) == float("inf"), float("nan"), y)
    return y.to(FORMAT).to(tl.uint8, bitcast=True)


@triton.jit
def encode_fitting(x32, factor, FORMAT: tl.constexpr):
    """`encode` under the factor of x's own amax, with half the instructions.

    Nothing finite exceeds the format by more than rounding takes back; an infinite x makes the
    factor 0 and itself NaN.
    """
    return (x32 * factor).to(FORMAT).to(tl.uint8, bitcast=True)
