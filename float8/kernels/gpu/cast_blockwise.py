"""`cast_blockwise`: one scale per 1x128 or 128x128 block, and both orientations from one read.

A tile of 128 x 128 holds whole blocks of the matrix and of its transpose. So one program reads a
tile, finds the amaxes in registers, and writes float8 both ways: 2 + 1 + 1 bytes per element of a
bfloat16 source, in one launch that zeroes nothing and reads nothing twice.

======== ======================= ===================== ============================
block    scale                   scale_t               strides
======== ======================= ===================== ============================
1x128    (M, ceil(K / 128))      (K, ceil(M / 128))    (1, M) and (1, K)
128x128  ceil((M, K) / 128)      its transpose         row-major
======== ======================= ===================== ============================

``data_t`` is ``x.t()`` cast in the same blocks, so for 128x128 the transpose of ``data``.
The strides are those that cuBLASLt reads, so that no GEMM copies a scale first.

The tile is held as four sets of every fourth row: a thread then holds 4 adjacent rows of 16
columns, and packs the 4 bytes of a column into one int32 (see ``jit.py``).

With 1x128 blocks both ways, a multiprocessor holds two programs: 8 warps of 128 registers, because
a thread holds 64 elements until both its rows' and its columns' scales are known. Two programs do
not always have loads under way, so about 0.7 of a copy's bandwidth is predicted. Three programs
(80 registers) would spill, and smaller tiles do not hold whole blocks of both matrices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import Block, ceil_div, scale_shape
from float8.kernels.gpu.jit import (
    encode_fitting,
    load_4_rows,
    magnitude_bits,
    outputs_of_matrix,
    reciprocal,
    scale_from_amax,
    tile_of_program,
    to_float32,
    write_codes,
)
from float8.kernels.gpu.launch import (
    NO_FUSION,
    BothWays,
    as_bytes,
    count_of,
    define_both_ways,
    format_constants,
    launch,
    new_data,
    read_row_major,
    register,
    sizes_of,
)

_BLOCKS: tuple[Block, ...] = ((1, 128), (128, 128))
_TILE = {"BLOCK": 128, "BLOCK_BY_4": 32}


@triton.jit
def _blocks_kernel(
    x_ptr,
    data_ptr,  # uint8 (M, K)
    scale_ptr,  # (ceil(K / BLOCK), M); where SQUARE (ceil(M / BLOCK), ceil(K / BLOCK))
    data_t_ptr,  # uint8 (K, M); int32 where PACK
    scale_t_ptr,  # (ceil(M / BLOCK), K); where SQUARE (ceil(K / BLOCK), ceil(M / BLOCK))
    M,
    K,
    stride_e,
    stride_m,
    stride_k,
    BLOCK: tl.constexpr,
    BLOCK_BY_4: tl.constexpr,
    SQUARE: tl.constexpr,  # blocks of 128x128, not 1x128
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WRITE_ROWS: tl.constexpr,
    WRITE_COLS: tl.constexpr,
    PACK: tl.constexpr,  # M is a multiple of 16
):
    pid, e = tile_of_program()
    data_ptr, data_t_ptr = outputs_of_matrix(data_ptr, data_t_ptr, e, M, K, PACK)
    blocks_m = tl.cdiv(M, BLOCK)
    blocks_k = tl.cdiv(K, BLOCK)
    block_m = (pid // blocks_k).to(tl.int64)
    block_k = (pid % blocks_k).to(tl.int64)
    scale_ptr += e * blocks_k * (blocks_m if SQUARE else M)
    scale_t_ptr += e * blocks_m * (blocks_k if SQUARE else K)
    first_m4 = block_m * BLOCK_BY_4
    m = (first_m4 + tl.arange(0, BLOCK_BY_4)) * 4
    k = block_k * BLOCK + tl.arange(0, BLOCK)
    xs = load_4_rows(x_ptr + e * stride_e, m, k, M, K, stride_m, stride_k)

    seen = tl.zeros((BLOCK_BY_4, BLOCK), tl.int32)
    for i in tl.static_range(4):
        bits = magnitude_bits(xs[i].to(tl.float32))
        seen = tl.maximum(seen, bits)
        if WRITE_ROWS and not SQUARE:
            amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
            scale = scale_from_amax(amax, FORMAT_MAX, POWER_OF_TWO)
            tl.store(scale_ptr + block_k * M + m + i, scale, m + i < M)
            factor = reciprocal(scale, POWER_OF_TWO)[:, None]
            codes = encode_fitting(xs[i].to(tl.float32), factor, FORMAT)
            inside = (m + i < M)[:, None] & (k < K)[None, :]
            tl.store(data_ptr + (m + i)[:, None] * K + k[None, :], codes, inside)

    if WRITE_COLS or SQUARE:
        amax_t = (tl.max(seen) if SQUARE else tl.max(seen, 0)).to(tl.float32, bitcast=True)
        scale_t = scale_from_amax(amax_t, FORMAT_MAX, POWER_OF_TWO)
        factor_t = reciprocal(scale_t, POWER_OF_TWO)
        if not SQUARE:
            tl.store(scale_t_ptr + block_m * K + k, scale_t, k < K)
            factor_t = factor_t[None, :]
        if SQUARE and WRITE_ROWS:
            tl.store(scale_ptr + block_m * blocks_k + block_k, scale_t)
        if SQUARE and WRITE_COLS:
            tl.store(scale_t_ptr + block_k * blocks_m + block_m, scale_t)
        write_codes(
            to_float32(xs), factor_t, data_ptr, data_t_ptr, first_m4, k, M, K,
            BLOCK_BY_4, FORMAT, FORMAT_MAX, True, SQUARE and WRITE_ROWS, WRITE_COLS, PACK,
        )  # fmt: skip


def _launch(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, block_rows: int, block_cols: int,
    rows: bool, cols: bool,
) -> BothWays:  # fmt: skip
    outputs = _fake(x, dtype, power_of_two, block_rows, block_cols, rows, cols)
    if x.numel() == 0 or not (rows or cols):
        return outputs
    x, (data, scale, data_t, scale_t) = read_row_major(x, outputs)
    M, K = x.shape[-2:]
    pack, square = M % 16 == 0, block_rows != 1
    write_rows, write_cols = data.numel() > 0, data_t.numel() > 0
    launch(
        _blocks_kernel, (ceil_div(M, 128) * ceil_div(K, 128), count_of(x)), x,
        as_bytes(data), scale, as_bytes(data_t, pack and write_cols), scale_t, *sizes_of(x),
        **_TILE, **format_constants(dtype, power_of_two), SQUARE=square, PACK=pack,
        WRITE_ROWS=write_rows, WRITE_COLS=write_cols, num_warps=8, **NO_FUSION,
    )  # fmt: skip
    return outputs


def _definition(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, block_rows: int, block_cols: int,
    rows: bool, cols: bool,
) -> BothWays:  # fmt: skip
    block = (block_rows, block_cols)
    outputs = _fake(x, dtype, power_of_two, *block, rows, cols)
    return define_both_ways(x, outputs, rows, cols, block, power_of_two)


def _fake(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, block_rows: int, block_cols: int,
    rows: bool, cols: bool,
) -> BothWays:  # fmt: skip
    block = (block_rows, block_cols)
    if block not in _BLOCKS:
        raise ValueError(
            f"float8::cast_blockwise: no kernel casts blocks {block}; use one of {_BLOCKS}"
        )
    M, K = x.shape[-2:]
    return (
        new_data(x, M, K, rows, dtype),
        new_scale(x, M, K, rows, block),
        new_data(x, K, M, cols, dtype),
        new_scale(x, K, M, cols, block),
    )


def new_scale(x: Tensor, rows: int, cols: int, wanted: bool, block: Block) -> Tensor:
    """An empty scale of an operand (rows, cols), as cuBLASLt reads it."""
    down, across = scale_shape((rows, cols), block)
    if block[0] == 1:
        return new_data(x, across, down, wanted, torch.float32).mT
    return new_data(x, down, across, wanted, torch.float32)


cast_blockwise = register(
    "cast_blockwise(Tensor x, ScalarType dtype, bool power_of_two, int block_rows, int block_cols, "
    "bool rows, bool cols) -> (Tensor data, Tensor scale, Tensor data_t, Tensor scale_t)",
    kernel=_launch,
    definition=_definition,
    fake=_fake,
)
