"""`cast_rowwise`: one scale per row, of the matrix and of its transpose.

PLACEHOLDER
"""

from __future__ import annotations

import triton
import triton.language as tl

from float8.kernels.gpu.jit import (
    encode_fitting,
    load_4_rows,
    magnitude_bits,
    reciprocal,
    scale_from_amax,
)


@triton.jit
def _rows_kernel(
    x_ptr,
    data_ptr,  # uint8 (M, K)
    scale_ptr,  # (M,)
    M,
    K,
    stride_m,
    stride_k,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,  # K <= COLS: a row stays in registers
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLS).to(tl.int64)
    row = x_ptr + m[:, None] * stride_m
    out = data_ptr + m[:, None] * K
    x = tl.load(row + k[None, :] * stride_k, (m < M)[:, None] & (k < K)[None, :], 0.0)
    bits = magnitude_bits(x.to(tl.float32))
    if not WHOLE_ROWS:
        for start in range(COLS, K, COLS):
            n = start + k
            more = tl.load(row + n[None, :] * stride_k, (m < M)[:, None] & (n < K)[None, :], 0.0)
            bits = tl.maximum(bits, magnitude_bits(more.to(tl.float32)))
    amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
    scale = scale_from_amax(amax, FORMAT_MAX, POWER_OF_TWO)
    tl.store(scale_ptr + m, scale, m < M)
    factor = reciprocal(scale, POWER_OF_TWO)[:, None]
    if WHOLE_ROWS:
        codes = encode_fitting(x.to(tl.float32), factor, FORMAT)
        tl.store(out + k[None, :], codes, (m < M)[:, None] & (k < K)[None, :])
    else:
        for start in range(0, K, COLS):
            n = start + k
            inside = (m < M)[:, None] & (n < K)[None, :]
            again = tl.load(row + n[None, :] * stride_k, inside, 0.0).to(tl.float32)
            tl.store(out + n[None, :], encode_fitting(again, factor, FORMAT), inside)


@triton.jit
def _tiles_kernel(
    x_ptr,
    amax_ptr,  # int32 bits, of rows (M,)
    amax_t_ptr,  # of columns (K,)
    data_ptr,  # uint8 (M, K)
    scale_ptr,
    data_t_ptr,  # uint8 (K, M); int32 where PACK
    scale_t_ptr,
    M,
    K,
    stride_m,
    stride_k,
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WRITE_ROWS: tl.constexpr,
    WRITE_COLS: tl.constexpr,
    PACK: tl.constexpr,  # M is a multiple of 16
):
    pid = tl.program_id(0)
    tiles_k = tl.cdiv(K, COLS)
    first_m4 = (pid // tiles_k).to(tl.int64) * ROWS_BY_4
    m = (first_m4 + tl.arange(0, ROWS_BY_4)) * 4
    k = (pid % tiles_k).to(tl.int64) * COLS + tl.arange(0, COLS)
    xs = load_4_rows(x_ptr, m, k, M, K, stride_m, stride_k)
    if WRITE_COLS:
        amax_t = tl.load(amax_t_ptr + k, k < K, 0).to(tl.float32, bitcast=True)
        scale_t = scale_from_amax(amax_t, FORMAT_MAX, POWER_OF_TWO)
        factor_t = reciprocal(scale_t, POWER_OF_TWO)[None, :]
        if pid < tiles_k:
            tl.store(scale_t_ptr + k, scale_t, k < K)
    packed = tl.zeros((ROWS_BY_4, COLS), tl.int32)
    for i in tl.static_range(4):
        inside = (m + i < M)[:, None] & (k < K)[None, :]
        x = xs[i].to(tl.float32)
        if WRITE_ROWS:
            amax = tl.load(amax_ptr + m + i, m + i < M, 0).to(tl.float32, bitcast=True)
            scale = scale_from_amax(amax, FORMAT_MAX, POWER_OF_TWO)
            if pid % tiles_k == 0:
                tl.store(scale_ptr + m + i, scale, m + i < M)
            codes = encode_fitting(x, reciprocal(scale, POWER_OF_TWO)[:, None], FORMAT)
            tl.store(data_ptr + (m + i)[:, None] * K + k[None, :], codes, inside)
        if WRITE_COLS:
            codes_t = encode_fitting(x, factor_t, FORMAT)
            if PACK:
                packed |= codes_t.to(tl.int32) << (8 * i)
            else:
                tl.store(data_t_ptr + k[None, :] * M + (m + i)[:, None], codes_t, inside)
    if WRITE_COLS and PACK:
        M4 = (M // 16) * 4  # spelt so that the compiler sees rows of whole 16-byte words
        m4 = first_m4 + tl.arange(0, ROWS_BY_4)
        inside_t = (k < K)[:, None] & (m4 < M4)[None, :]
        tl.store(data_t_ptr + k[:, None] * M4 + m4[None, :], tl.trans(packed), inside_t)
