"""`cast_blockwise`: PLACEHOLDER"""

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
def _blocks_kernel(
    x_ptr,
    data_ptr,  # uint8 (M, K)
    scale_ptr,
    data_t_ptr,  # uint8 (K, M); int32 where PACK
    scale_t_ptr,
    M,
    K,
    stride_m,
    stride_k,
    BLOCK_BY_4: tl.constexpr,
    BLOCK: tl.constexpr,
    SQUARE: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WRITE_ROWS: tl.constexpr,
    WRITE_COLS: tl.constexpr,
    PACK: tl.constexpr,  # M is a multiple of 16
):
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(M, BLOCK)
    blocks_k = tl.cdiv(K, BLOCK)
    block_m = (pid // blocks_k).to(tl.int64)
    block_k = (pid % blocks_k).to(tl.int64)
    first_m4 = block_m * BLOCK_BY_4
    m = (first_m4 + tl.arange(0, BLOCK_BY_4)) * 4
    k = block_k * BLOCK + tl.arange(0, BLOCK)
    xs = load_4_rows(x_ptr, m, k, M, K, stride_m, stride_k)

    seen = tl.zeros((BLOCK_BY_4, BLOCK), tl.int32)
    for i in tl.static_range(4):
        bits = magnitude_bits(xs[i].to(tl.float32))
        seen = tl.maximum(seen, bits)
        if not SQUARE and WRITE_ROWS:
            amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
            scale = scale_from_amax(amax, FORMAT_MAX, POWER_OF_TWO)
            codes = encode_fitting(xs[i].to(tl.float32), reciprocal(scale)[:, None], FORMAT)
            inside = (m + i < M)[:, None] & (k < K)[None, :]
            tl.store(scale_ptr + block_k * M + m + i, scale, m + i < M)
            tl.store(data_ptr + (m + i)[:, None] * K + k[None, :], codes, inside)

    if SQUARE or WRITE_COLS:
        amax_t = tl.max(seen, 0, keep_dims=True)
        if SQUARE:
            amax_t = tl.max(amax_t, 1, keep_dims=True)
        scale_t = scale_from_amax(amax_t.to(tl.float32, bitcast=True), FORMAT_MAX, POWER_OF_TWO)
        factor_t = reciprocal(scale_t)
        if SQUARE:
            one = tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :]
            tl.store(scale_ptr + block_m * blocks_k + block_k + one, scale_t)
            tl.store(scale_t_ptr + block_k * blocks_m + block_m + one, scale_t)
        else:
            tl.store(scale_t_ptr + block_m * K + k[None, :], scale_t, (k < K)[None, :])
        packed = tl.zeros((BLOCK_BY_4, BLOCK), tl.int32)
        for i in tl.static_range(4):
            inside = (m + i < M)[:, None] & (k < K)[None, :]
            codes = encode_fitting(xs[i].to(tl.float32), factor_t, FORMAT)
            if SQUARE and WRITE_ROWS:
                tl.store(data_ptr + (m + i)[:, None] * K + k[None, :], codes, inside)
            if WRITE_COLS and PACK:
                packed |= codes.to(tl.int32) << (8 * i)
            elif WRITE_COLS:
                tl.store(data_t_ptr + k[None, :] * M + (m + i)[:, None], codes, inside)
        if WRITE_COLS and PACK:
            M4 = (M // 16) * 4  # spelt so that the compiler sees rows of whole 16-byte words
            m4 = first_m4 + tl.arange(0, BLOCK_BY_4)
            inside_t = (k < K)[:, None] & (m4 < M4)[None, :]
            tl.store(data_t_ptr + k[:, None] * M4 + m4[None, :], tl.trans(packed), inside_t)
