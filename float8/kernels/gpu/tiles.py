"""Tiles of a matrix whose codes are written in both orientations: what the casts of tensors share.

A program's tile is 4 tiles of every fourth row, so that a thread holds 4 rows that are adjacent: it
packs the 4 codes of a column into one int32 in registers, and shared memory and the transposed
store move 4 codes at a time instead of single bytes (8 times fewer instructions, read from the
machine code). ``m`` are the first rows of those fours, ``first_m4 * 4`` the tile's first row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from float8.kernels.gpu.jit import (
    convert,
    convert_4,
    magnitude_bits,
    scale_from_amax,
    scaled,
    unpack_4,
)


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
    return tl.load(x_ptr + offsets, (m < M)[:, None] & (k < K)[None, :], 0)


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


@triton.jit
def amax_bits_of(ys):
    """Of 4 float32 tiles, element by element."""
    first = tl.maximum(magnitude_bits(ys[0]), magnitude_bits(ys[1]))
    return tl.maximum(first, tl.maximum(magnitude_bits(ys[2]), magnitude_bits(ys[3])))


@triton.jit
def scale_of_tensor(
    given_ptr,  # the scale; unused where PARTIALS
    scale_ptr,  # written where STORE
    partials_ptr,  # amax bits (PARTIALS,); unused where PARTIALS is 0
    amax_ptr,  # int32 bits of a running maximum, where RECORD
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PARTIALS: tl.constexpr,
    RECORD: tl.constexpr,
    STORE: tl.constexpr,
):
    """A scale that is given, or follows from partial amaxes; program 0 writes it, and the amax."""
    is_first = tl.program_id(0) == 0
    if PARTIALS:
        amax_bits = tl.max(tl.load(partials_ptr + tl.arange(0, PARTIALS)))
        scale = scale_from_amax(amax_bits.to(tl.float32, bitcast=True), FORMAT_MAX, POWER_OF_TWO)
        if RECORD:
            tl.atomic_max(amax_ptr, amax_bits, is_first, sem="relaxed")
    else:
        scale = tl.load(given_ptr)
    if STORE:
        tl.store(scale_ptr, scale, is_first)
    return scale


@triton.jit
def write_codes(
    ys,  # 4 float32 tiles: of rows m, m + 1, m + 2, m + 3
    factor,
    data_ptr,  # uint8 (M, K)
    data_t_ptr,  # uint8 (K, M); int32 where PACK
    first_m4,
    k,
    M,
    K,
    ROWS_BY_4: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    FITS: tl.constexpr,  # the factor comes from the amax of what ys belong to
    WRITE_ROWS: tl.constexpr,
    WRITE_COLS: tl.constexpr,
    PACK: tl.constexpr,  # M is a multiple of 16
):
    """Write a tile of codes, row-major and transposed."""
    m = (first_m4 + tl.arange(0, ROWS_BY_4)) * 4
    if WRITE_COLS and PACK:
        packed = convert_4(
            scaled(ys[0], factor, FORMAT_MAX, FITS),
            scaled(ys[1], factor, FORMAT_MAX, FITS),
            scaled(ys[2], factor, FORMAT_MAX, FITS),
            scaled(ys[3], factor, FORMAT_MAX, FITS),
            FORMAT,
        )
        store_packed(data_t_ptr, packed, first_m4, k.to(tl.int64), M, K)
        rows = unpack_4(packed)
    for i in tl.static_range(4):
        inside = (m + i < M)[:, None] & (k < K)[None, :]
        if WRITE_COLS and PACK:
            row = rows[i]
        else:
            row = convert(scaled(ys[i], factor, FORMAT_MAX, FITS), FORMAT)
        if WRITE_ROWS:
            tl.store(data_ptr + (m + i)[:, None] * K + k[None, :], row, inside)
        if WRITE_COLS and not PACK:
            tl.store(data_t_ptr + k.to(tl.int64)[None, :] * M + (m + i)[:, None], row, inside)
