"""`cast_rowwise`: one scale per row, of the matrix and of its transpose.

A row's scale is known once the row has been read. Rows alone are cast from one read: a program
holds whole rows in registers, finds their amaxes and writes float8; rows that do not fit are read
again from cache. The rows of the transpose are columns, and no program holds a column: a separate
read finds their amaxes, and those of the rows with them.

================= ===================== =====================================
wanted            bytes per element     launches
================= ===================== =====================================
rows              2 + 1                 1
columns           2 + 2 + 1             3 (one zeroes the amaxes)
both              2 + 2 + 1 + 1         3
================= ===================== =====================================

Casting the rows during the first read would move as many bytes, 2 + 1 and 2 + 1, and would bind
the column amaxes to programs that read whole rows. The bytes are those of a bfloat16 source;
``x.t()`` of a row-major matrix counts as that matrix, its rows and columns exchanged.

Where columns are wanted, each program of the last launch computes its scales from the amaxes, and
transposes as ``cast.py`` does. Of a copy's bandwidth 0.95 is predicted for the last launch that
writes columns, and 0.8 for both: two factors an element leave registers for four programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import WHOLE, ceil_div
from float8.kernels.gpu.amax import line_amaxes
from float8.kernels.gpu.jit import (
    encode_fitting,
    load_4_rows,
    magnitude_bits,
    outputs_of_matrix,
    place_of_tile,
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
    tiles_of,
)

_LONGEST_ROW = 16384  # what 8 warps hold in 90 registers a thread
_CHUNK = 8192  # of longer rows
_TILE = {"ROWS_BY_4": 16, "COLS": 128}
_TILE_OPTIONS = {"num_warps": 4, **NO_FUSION}


@triton.jit
def _rows_kernel(
    x_ptr,
    data_ptr,  # uint8 (M, K)
    scale_ptr,  # (M,)
    M,
    K,
    stride_e,
    stride_m,
    stride_k,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,  # K <= COLS: a row stays in registers
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    e = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, COLS).to(tl.int64)
    row = x_ptr + e * stride_e + m[:, None] * stride_m
    out = data_ptr + e * M * K + m[:, None] * K
    x = tl.load(row + k[None, :] * stride_k, (m < M)[:, None] & (k < K)[None, :], 0.0)
    bits = magnitude_bits(x.to(tl.float32))
    if not WHOLE_ROWS:
        for start in range(COLS, K, COLS):
            n = start + k
            more = tl.load(row + n[None, :] * stride_k, (m < M)[:, None] & (n < K)[None, :], 0.0)
            bits = tl.maximum(bits, magnitude_bits(more.to(tl.float32)))
    amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
    scale = scale_from_amax(amax, FORMAT_MAX, POWER_OF_TWO)
    tl.store(scale_ptr + e * M + m, scale, m < M)
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
    scale_ptr,  # (M,)
    data_t_ptr,  # uint8 (K, M); int32 where PACK
    scale_t_ptr,  # (K,)
    M,
    K,
    stride_e,
    stride_m,
    stride_k,
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WRITE_ROWS: tl.constexpr,
    PACK: tl.constexpr,  # M is a multiple of 16
):
    pid, e = tile_of_program()
    data_ptr, data_t_ptr = outputs_of_matrix(data_ptr, data_t_ptr, e, M, K, PACK)
    tiles_k = tl.cdiv(K, COLS)
    first_m4, m, k = place_of_tile(pid, K, ROWS_BY_4, COLS)
    xs = load_4_rows(x_ptr + e * stride_e, m, k, M, K, stride_m, stride_k, True)

    amax_t = tl.load(amax_t_ptr + e * K + k, k < K, 0).to(tl.float32, bitcast=True)
    scale_t = scale_from_amax(amax_t, FORMAT_MAX, POWER_OF_TWO)
    if pid < tiles_k:
        tl.store(scale_t_ptr + e * K + k, scale_t, k < K)
    factor_t = reciprocal(scale_t, POWER_OF_TWO)[None, :]
    if WRITE_ROWS:
        for i in tl.static_range(4):
            inside = (m + i < M)[:, None] & (k < K)[None, :]
            amax = tl.load(amax_ptr + e * M + m + i, m + i < M, 0).to(tl.float32, bitcast=True)
            scale = scale_from_amax(amax, FORMAT_MAX, POWER_OF_TWO)
            if pid % tiles_k == 0:
                tl.store(scale_ptr + e * M + m + i, scale, m + i < M)
            factor = reciprocal(scale, POWER_OF_TWO)[:, None]
            codes = encode_fitting(xs[i].to(tl.float32), factor, FORMAT)
            tl.store(data_ptr + (m + i)[:, None] * K + k[None, :], codes, inside)
    write_codes(
        to_float32(xs), factor_t, data_ptr, data_t_ptr, first_m4, k, M, K,
        ROWS_BY_4, FORMAT, FORMAT_MAX, True, False, True, PACK,
    )  # fmt: skip


def _rows_constants(K: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tile of a program that casts rows of K elements, 32 or 64 a thread; its options."""
    whole = K <= _LONGEST_ROW
    cols = max(16, triton.next_power_of_2(K)) if whole else _CHUNK
    tile = {"ROWS": max(1, 4096 // cols), "COLS": cols, "WHOLE_ROWS": whole}
    return tile, {"num_warps": 4 if cols <= 4096 else 8, **NO_FUSION}


def _launch(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, rows: bool, cols: bool,
) -> BothWays:  # fmt: skip
    if x.numel() == 0 or not (rows or cols):
        return _definition(x, dtype, power_of_two, rows, cols)
    outputs = _fake(x, dtype, power_of_two, rows, cols)
    x, (data, scale, data_t, scale_t) = read_row_major(x, outputs)
    (M, K), E = x.shape[-2:], count_of(x)
    constants = format_constants(dtype, power_of_two)
    if data_t.numel() == 0:
        tile, options = _rows_constants(K)
        launch(
            _rows_kernel, (ceil_div(M, tile["ROWS"]), E), x, as_bytes(data), scale,
            *sizes_of(x), **tile, **constants, **options,
        )  # fmt: skip
        return outputs
    write_rows, pack = data.numel() > 0, M % 16 == 0
    launch(
        _tiles_kernel, (tiles_of(x, _TILE), E), x, *line_amaxes(x, write_rows, True),
        as_bytes(data), scale, as_bytes(data_t, pack), scale_t, *sizes_of(x),
        **_TILE, **constants, WRITE_ROWS=write_rows, PACK=pack, **_TILE_OPTIONS,
    )  # fmt: skip
    return outputs


def _definition(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, rows: bool, cols: bool,
) -> BothWays:  # fmt: skip
    outputs = _fake(x, dtype, power_of_two, rows, cols)
    return define_both_ways(x, outputs, rows, cols, (1, WHOLE), power_of_two)


def _fake(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, rows: bool, cols: bool,
) -> BothWays:  # fmt: skip
    M, K = x.shape[-2:]
    return (
        new_data(x, M, K, rows, dtype),
        new_data(x, M, 1, rows, torch.float32),
        new_data(x, K, M, cols, dtype),
        new_data(x, K, 1, cols, torch.float32),
    )


cast_rowwise = register(
    "cast_rowwise(Tensor x, ScalarType dtype, bool power_of_two, bool rows, bool cols) -> "
    "(Tensor data, Tensor scale, Tensor data_t, Tensor scale_t)",
    kernel=_launch,
    definition=_definition,
    fake=_fake,
)
