"""`cast_rowwise`: one scale per row, of the matrix and of its transpose.

A row's scale is known once the row has been read. Rows alone are cast from one read: a program
holds whole rows in registers, finds their amaxes and writes the codes; rows that do not fit are
read again from cache. The rows of the transpose are columns, and no program holds a column: their
amaxes cost a read of their own, which then finds those of the rows too.

================= ===================== =====================================
wanted            bytes per element     launches
================= ===================== =====================================
rows              2 + 1                 1
columns           2 + 2 + 1             3 (one zeroes the amaxes)
both              2 + 2 + 1 + 1         3
================= ===================== =====================================

Casting the rows during the first read would make it 2 + 1 and 2 + 1, as many bytes, and would tie
the column amaxes to programs that walk whole rows. The bytes are those of a bfloat16 source;
``x.t()`` of a row-major matrix counts as that matrix, its rows and columns exchanged.

The second launch of the last two turns the amaxes into scales itself, program by program, and
transposes as ``cast.py`` does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import WHOLE, Block
from float8.kernels import reference
from float8.kernels.gpu.amax import is_transposed, line_amaxes
from float8.kernels.gpu.jit import (
    encode_fitting,
    magnitude_bits,
    reciprocal,
    scale_from_amax,
)
from float8.kernels.gpu.launch import (
    NO_FUSION,
    TRITON_FORMATS,
    Variant,
    new_codes,
    on_device_of,
    register,
)
from float8.kernels.gpu.tiles import load_4_rows, write_codes

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
    scale_ptr,  # (M,)
    data_t_ptr,  # uint8 (K, M); int32 where PACK
    scale_t_ptr,  # (K,)
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
    PACK: tl.constexpr,  # M is a multiple of 16
):
    pid = tl.program_id(0)
    tiles_k = tl.cdiv(K, COLS)
    first_m4 = (pid // tiles_k).to(tl.int64) * ROWS_BY_4
    m = (first_m4 + tl.arange(0, ROWS_BY_4)) * 4
    k = (pid % tiles_k).to(tl.int64) * COLS + tl.arange(0, COLS)
    xs = load_4_rows(x_ptr, m, k, M, K, stride_m, stride_k)

    amax_t = tl.load(amax_t_ptr + k, k < K, 0).to(tl.float32, bitcast=True)
    scale_t = scale_from_amax(amax_t, FORMAT_MAX, POWER_OF_TWO)
    if pid < tiles_k:
        tl.store(scale_t_ptr + k, scale_t, k < K)
    factor_t = reciprocal(scale_t, POWER_OF_TWO)[None, :]
    if WRITE_ROWS:
        for i in tl.static_range(4):
            inside = (m + i < M)[:, None] & (k < K)[None, :]
            amax = tl.load(amax_ptr + m + i, m + i < M, 0).to(tl.float32, bitcast=True)
            scale = scale_from_amax(amax, FORMAT_MAX, POWER_OF_TWO)
            if pid % tiles_k == 0:
                tl.store(scale_ptr + m + i, scale, m + i < M)
            factor = reciprocal(scale, POWER_OF_TWO)[:, None]
            codes = encode_fitting(xs[i].to(tl.float32), factor, FORMAT)
            tl.store(data_ptr + (m + i)[:, None] * K + k[None, :], codes, inside)
    ys = (xs[0].to(tl.float32), xs[1].to(tl.float32), xs[2].to(tl.float32), xs[3].to(tl.float32))
    write_codes(
        ys, factor_t, data_ptr, data_t_ptr, first_m4, k, M, K,
        ROWS_BY_4, FORMAT, FORMAT_MAX, True, False, True, PACK,
    )  # fmt: skip


def _rows_constants(K: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tile of a program that casts rows of K elements, 32 or 64 a thread; its options."""
    whole = K <= _LONGEST_ROW
    cols = max(16, triton.next_power_of_2(K)) if whole else _CHUNK
    tile = {"ROWS": max(1, 4096 // cols), "COLS": cols, "WHOLE_ROWS": whole}
    return tile, {"num_warps": 4 if cols <= 4096 else 8, **NO_FUSION}


def _format_constants(dtype: torch.dtype, power_of_two: bool) -> dict[str, Any]:
    return {
        "FORMAT": TRITON_FORMATS[dtype],
        "FORMAT_MAX": torch.finfo(dtype).max,
        "POWER_OF_TWO": power_of_two,
    }


def _launch(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, rows: bool, cols: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.numel() == 0 or not (rows or cols):
        return _reference(x, dtype, power_of_two, rows, cols)
    outputs = _fake(x, dtype, power_of_two, rows, cols)
    wanted = [(rows, *outputs[:2]), (cols, *outputs[2:])]
    if is_transposed(x):
        x, wanted = x.t(), wanted[::-1]
    (of_rows, data, scale), (of_cols, data_t, scale_t) = wanted
    M, K = x.shape
    codes = _format_constants(dtype, power_of_two)
    with on_device_of(x):
        if not of_cols:
            tile, options = _rows_constants(K)
            _rows_kernel[(triton.cdiv(M, tile["ROWS"]),)](
                x, data.view(torch.uint8), scale, M, K, *x.stride(), **tile, **codes, **options
            )
            return outputs
        amax, amax_t = line_amaxes(x, of_rows, True)
        pack = M % 16 == 0
        grid = (triton.cdiv(M, 4 * _TILE["ROWS_BY_4"]) * triton.cdiv(K, _TILE["COLS"]),)
        _tiles_kernel[grid](
            x,
            amax,
            amax_t,
            data.view(torch.uint8),
            scale,
            data_t.view(torch.int32 if pack else torch.uint8),
            scale_t,
            M,
            K,
            *x.stride(),
            **_TILE,
            **codes,
            WRITE_ROWS=of_rows,
            PACK=pack,
            **_TILE_OPTIONS,
        )
    return outputs


def reference_rows(
    x: Tensor, block: Block, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """The codes of x, row-major, and its scales, in plain PyTorch."""
    x = x.clone(memory_format=torch.contiguous_format)
    found = reference.amax(x, block)
    scale = reference.scale_from_amax(found, torch.finfo(dtype).max, power_of_two)
    return reference.cast(x, scale, block, dtype, fits=True), scale


def _reference(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, rows: bool, cols: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data, scale, data_t, scale_t = _fake(x, dtype, power_of_two, rows, cols)
    if rows:
        data, scale = reference_rows(x, (1, WHOLE), dtype, power_of_two)
    if cols:
        data_t, scale_t = reference_rows(x.t(), (1, WHOLE), dtype, power_of_two)
    return data, scale, data_t, scale_t


def _fake(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, rows: bool, cols: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    M, K = x.shape
    return (
        new_codes(x, M, K, rows, dtype),
        new_codes(x, M, 1, rows, torch.float32),
        new_codes(x, K, M, cols, dtype),
        new_codes(x, K, 1, cols, torch.float32),
    )


cast_rowwise = register(
    "cast_rowwise(Tensor x, ScalarType dtype, bool power_of_two, bool rows, bool cols)"
    " -> (Tensor data, Tensor scale, Tensor data_t, Tensor scale_t)",
    kernel=_launch,
    reference=_reference,
    fake=_fake,
)


def shipped() -> list[Variant]:
    """The forms that the rowwise recipe launches on bfloat16, and rows that do not fit."""
    return [
        _rows_variant("rows of 4096", 4096),
        _rows_variant("rows in chunks", 2 * _LONGEST_ROW),
        _tiles_variant("rows and columns", True),
        _tiles_variant("columns", False),
    ]


_SIZES = dict.fromkeys(("M", "K", "stride_m"), "i32")


def _rows_variant(what: str, K: int) -> Variant:
    types = {"x_ptr": "*bf16", "data_ptr": "*u8", "scale_ptr": "*fp32", **_SIZES}
    tile, options = _rows_constants(K)
    codes = _format_constants(torch.float8_e4m3fn, True)
    constants = {"stride_k": 1, **tile, **codes}
    return Variant(f"cast_rowwise, e4m3, {what}", _rows_kernel, types, constants, options)


def _tiles_variant(what: str, rows: bool) -> Variant:
    types = {
        "x_ptr": "*bf16",
        "amax_ptr": "*i32",
        "amax_t_ptr": "*i32",
        "data_ptr": "*u8",
        "scale_ptr": "*fp32",
        "data_t_ptr": "*i32",
        "scale_t_ptr": "*fp32",
        **_SIZES,
    }
    constants = {
        "stride_k": 1,
        **_TILE,
        **_format_constants(torch.float8_e4m3fn, True),
        "WRITE_ROWS": rows,
        "PACK": True,
    }
    return Variant(f"cast_rowwise, e4m3, {what}", _tiles_kernel, types, constants, _TILE_OPTIONS)
