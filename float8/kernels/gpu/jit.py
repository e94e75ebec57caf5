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


@triton.jit
def load_4_rows(x_ptr, m, k, M, K, stride_m, stride_k):
    """Rows m, m + 1, m + 2, m + 3 of x, columns k, each as a tile; 0 outside (M, K).

    All at once, because no load overtakes a store: the pointers might be the same.
    """
    return (
        _load_row(x_ptr, m, k, M, K, stride_m, stride_k),
        _load_row(x_ptr, m + 1, k, M, K, stride_m, stride_k),
        _load_row(x_ptr, m + 2, k, M, K, stride_m, stride_k),
        _load_row(x_ptr, m + 3, k, M, K, stride_m, stride_k),
    )


@triton.jit
def _load_row(x_ptr, m, k, M, K, stride_m, stride_k):
    offsets = m[:, None] * stride_m + k[None, :] * stride_k
    return tl.load(x_ptr + offsets, (m < M)[:, None] & (k < K)[None, :], 0.0)


@triton.jit
def store_packed(out_ptr, packed, first_m4, k, M, K):
    """Store the transpose of a tile of codes, four rows packed into each int32.

    Args:
        out_ptr: int32, (K, M / 4): the bytes of (K, M); M is a multiple of 16.
        packed: int32 (rows / 4, columns).
        first_m4: a quarter of the tile's first row.
        k: int64, the tile's columns.
        M, K: of the matrix before it is transposed.
    """
    M4 = (M // 16) * 4  # spelt so that the compiler sees rows of whole 16-byte words
    m4 = first_m4 + tl.arange(0, packed.shape[0])
    inside = (k < K)[:, None] & (m4 < M4)[None, :]
    tl.store(out_ptr + k[:, None] * M4 + m4[None, :], tl.trans(packed), inside)
