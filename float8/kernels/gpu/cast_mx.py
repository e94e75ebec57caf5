"""`cast_mx`: E8M0 scales of 1x32 blocks, both orientations from one read, as cuBLASLt reads them.

As in `cast_blockwise`, a program reads a tile, finds the amaxes in registers, and writes float8
both ways, in one launch that zeroes nothing and reads nothing twice: 2 + 1 + 1 bytes per element of
a bfloat16 source, and 1/32 byte per element for the scales of each orientation. ``e8m0.py`` defines
the rounding of scales: integer operations on the bits of an amax.

=========== =================================== ======================
            swizzled                            plain
=========== =================================== ======================
``scale``   (128 ceil(M/128) * 4 ceil(K/128),)  (M, ceil(K / 32))
``scale_t`` (128 ceil(K/128) * 4 ceil(M/128),)  (K, ceil(M / 32))
=========== =================================== ======================

A stack of matrices (E, M, K) has a dimension E before these. `float8.kernels.cublas.swizzled`
describes the swizzled layout: 512 bytes for the 4 blocks along each of 128 rows. The tiles cover
such squares whole, and read zeros outside the matrix. So they write the padding too: bytes 0.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import ceil_div, scale_shape
from float8.kernels import cublas, definition
from float8.kernels.gpu.jit import (
    clamped,
    convert,
    convert_4,
    load_4_rows,
    magnitude_bits,
    outputs_of_matrix,
    place_of_tile,
    store_packed,
    tile_of_program,
    to_float32,
    without_infinities,
)
from float8.kernels.gpu.launch import (
    NO_FUSION,
    TRITON_FORMATS,
    BothWays,
    as_bytes,
    count_of,
    launch,
    new_data,
    read_row_major,
    register,
    sizes_of,
    tiles_of,
)

# Programs of 4 warps: three of those that write both orientations share a multiprocessor.
_TILE = {"ROWS_BY_4": 16, "COLS": 128}


@triton.jit
def exponent_of(amax_bits, LARGEST: tl.constexpr, CARRY: tl.constexpr):
    """Amax bits -> the byte of the E8M0 scale, as int32.

    By the formula of `e8m0.scale_from_amax`; LARGEST and CARRY are those of `rounding_constants`.
    """
    exponent = tl.maximum(((amax_bits + CARRY) >> 23) - LARGEST, 0)
    if CARRY:
        exponent = tl.where(amax_bits == 0x7F800000, 254, exponent)
    return tl.where(amax_bits > 0x7F800000, 255, exponent)


@triton.jit
def reciprocal_of(exponent):
    """``1 / scale`` of E8M0 bytes, in float32: exact; 1 / 2^127 is subnormal."""
    bits = tl.where(exponent == 254, 0x00400000, (254 - exponent) << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def store_exponents(
    scale_ptr, exponent, first_row, row, first_block, block, rows, blocks, SWIZZLED: tl.constexpr
):
    """Store the scales of a tile, given as bytes in int32.

    ``first_row`` and ``first_block``, int64, are the tile's place in the matrix of scales, of shape
    (rows, blocks). ``row`` and ``block``, int32, are the place of each scale in the tile; both
    broadcast. Where SWIZZLED the tile may exceed the matrix.
    """
    codes = exponent.to(tl.uint8)
    if SWIZZLED:  # see `float8.kernels.cublas.swizzled`
        first = (first_row // 128 * tl.cdiv(blocks, 4) + first_block // 4) * 512
        row += (first_row % 128).to(tl.int32)
        block += (first_block % 4).to(tl.int32)
        tl.store(scale_ptr + first + (row % 32 * 16 + row // 32 * 4 + block), codes)
    else:
        row, block = first_row + row, first_block + block
        tl.store(scale_ptr + row * blocks + block, codes, (row < rows) & (block < blocks))


@triton.jit
def scales_before(e, rows, blocks, SWIZZLED: tl.constexpr):
    """How many scales precede those of matrix e (int64) of a stack; see `cublas.swizzled_size`."""
    if SWIZZLED:
        return e * tl.cdiv(rows, 128) * tl.cdiv(blocks, 4) * 512
    return e * rows * blocks


@triton.jit
def _quotient(x32, factor, FORMAT_MAX: tl.constexpr):
    """``x / scale``, for `convert`. Under a scale that is rounded down x may exceed the format."""
    return clamped(without_infinities(x32) * factor, FORMAT_MAX)


@triton.jit
def write_rows(
    xs,  # 4 tiles: of rows m, m + 1, m + 2, m + 3
    data_ptr,
    scale_ptr,
    m,
    M,
    k,
    K,
    first_row,  # int64, the tile's first row and column in the matrix of scales
    first_k,
    scale_rows,
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    LARGEST: tl.constexpr,
    CARRY: tl.constexpr,
    SWIZZLED: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Write a tile row-major; returns, element by element, the amax bits of its 4 tiles."""
    ACROSS: tl.constexpr = COLS // 32
    row, block = tl.arange(0, ROWS_BY_4)[:, None] * 4, tl.arange(0, ACROSS)[None, :]
    seen = tl.zeros((ROWS_BY_4, COLS), tl.int32)
    for i in tl.static_range(4):
        x32 = xs[i].to(tl.float32)
        bits = magnitude_bits(x32)
        seen = tl.maximum(seen, bits)
        if WRITE:
            amax_bits = tl.max(bits.reshape(ROWS_BY_4, ACROSS, 32), 2)
            exponent = exponent_of(amax_bits, LARGEST, CARRY)
            store_exponents(
                scale_ptr, exponent, first_row, row + i, first_k // 32, block,
                scale_rows, (K + 31) // 32, SWIZZLED,
            )  # fmt: skip
            factor = reciprocal_of(exponent)[:, :, None]
            factor = tl.broadcast_to(factor, (ROWS_BY_4, ACROSS, 32)).reshape(ROWS_BY_4, COLS)
            inside = (m + i < M)[:, None] & (k < K)[None, :]
            codes = convert(_quotient(x32, factor, FORMAT_MAX), FORMAT)
            tl.store(data_ptr + (m + i)[:, None] * K + k[None, :], codes, inside)
    return seen


@triton.jit
def quotients_t(
    xs,
    seen,  # of `write_rows`
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    LARGEST: tl.constexpr,
    CARRY: tl.constexpr,
):
    """The 4 tiles divided by the scales of their columns, and the bytes of those scales."""
    DOWN: tl.constexpr = ROWS_BY_4 // 8  # 8 sets of 4 rows are a block
    exponent = exponent_of(tl.max(seen.reshape(DOWN, 8, COLS), 1), LARGEST, CARRY)
    factor = reciprocal_of(exponent)[:, None, :]
    factor = tl.broadcast_to(factor, (DOWN, 8, COLS)).reshape(ROWS_BY_4, COLS)
    x0, x1, x2, x3 = to_float32(xs)
    return (
        _quotient(x0, factor, FORMAT_MAX),
        _quotient(x1, factor, FORMAT_MAX),
        _quotient(x2, factor, FORMAT_MAX),
        _quotient(x3, factor, FORMAT_MAX),
        exponent,
    )


@triton.jit
def _mx_kernel(
    x_ptr,
    data_ptr,  # uint8 (M, K)
    scale_ptr,  # uint8
    data_t_ptr,  # uint8 (K, M); int32 where PACK
    scale_t_ptr,  # uint8
    M,
    K,
    stride_e,
    stride_m,
    stride_k,
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    LARGEST: tl.constexpr,
    CARRY: tl.constexpr,
    SWIZZLED: tl.constexpr,
    WRITE_ROWS: tl.constexpr,
    WRITE_COLS: tl.constexpr,
    PACK: tl.constexpr,  # M is a multiple of 16
):
    pid, e = tile_of_program()
    blocks_m, blocks_k = (M + 31) // 32, (K + 31) // 32
    data_ptr, data_t_ptr = outputs_of_matrix(data_ptr, data_t_ptr, e, M, K, PACK)
    scale_ptr += scales_before(e, M, blocks_k, SWIZZLED)
    scale_t_ptr += scales_before(e, K, blocks_m, SWIZZLED)
    first_m4, m, k = place_of_tile(pid, K, ROWS_BY_4, COLS)
    first_m, first_k = first_m4 * 4, (pid % tl.cdiv(K, COLS)).to(tl.int64) * COLS
    xs = load_4_rows(x_ptr + e * stride_e, m, k, M, K, stride_m, stride_k)

    seen = write_rows(
        xs, data_ptr, scale_ptr, m, M, k, K, first_m, first_k, M, ROWS_BY_4, COLS,
        FORMAT, FORMAT_MAX, LARGEST, CARRY, SWIZZLED, WRITE_ROWS,
    )  # fmt: skip
    if WRITE_COLS:
        y0, y1, y2, y3, exponent = quotients_t(
            xs, seen, ROWS_BY_4, COLS, FORMAT_MAX, LARGEST, CARRY
        )
        row, block = tl.arange(0, COLS)[None, :], tl.arange(0, ROWS_BY_4 // 8)[:, None]
        store_exponents(
            scale_t_ptr, exponent, first_k, row, first_m // 32, block, K, blocks_m, SWIZZLED
        )
        if PACK:
            store_packed(data_t_ptr, convert_4(y0, y1, y2, y3, FORMAT), first_m4, k, M, K)
        else:
            ys = (y0, y1, y2, y3)
            for i in tl.static_range(4):
                inside = (m + i < M)[:, None] & (k < K)[None, :]
                codes = convert(ys[i], FORMAT)
                tl.store(data_t_ptr + k[None, :] * M + (m + i)[:, None], codes, inside)


def rounding_constants(dtype: torch.dtype, scale_format: str) -> dict[str, int]:
    """The compile-time arguments of `exponent_of`."""
    mantissa, exponent = math.frexp(torch.finfo(dtype).max)
    carry = 0x7FFFFF - int((2 * mantissa - 1) * 2**23)
    return {"LARGEST": exponent - 1, "CARRY": carry if scale_format == definition.E8M0 else 0}


def _launch(
    x: Tensor, dtype: torch.dtype, scale_format: str, swizzled: bool, rows: bool, cols: bool
) -> BothWays:
    outputs = _fake(x, dtype, scale_format, swizzled, rows, cols)
    if x.numel() == 0 or not (rows or cols):
        return outputs
    x, (data, scale, data_t, scale_t) = read_row_major(x, outputs)
    M, K = x.shape[-2:]
    write_rows, write_cols = data.numel() > 0, data_t.numel() > 0
    pack = M % 16 == 0
    # Swizzled scales are padded to squares of two tiles.
    tiles = 2 * ceil_div(M, 128) * ceil_div(K, 128) if swizzled else tiles_of(x, _TILE)
    launch(
        _mx_kernel, (tiles, count_of(x)), x, as_bytes(data), as_bytes(scale),
        as_bytes(data_t, pack and write_cols), as_bytes(scale_t), *sizes_of(x), **_TILE,
        FORMAT=TRITON_FORMATS[dtype], FORMAT_MAX=torch.finfo(dtype).max,
        **rounding_constants(dtype, scale_format), SWIZZLED=swizzled,
        WRITE_ROWS=write_rows, WRITE_COLS=write_cols, PACK=pack, num_warps=4, **NO_FUSION,
    )  # fmt: skip
    return outputs


def _definition(
    x: Tensor, dtype: torch.dtype, scale_format: str, swizzled: bool, rows: bool, cols: bool
) -> BothWays:
    outputs = _fake(x, dtype, scale_format, swizzled, rows, cols)
    block = (1,) * (x.dim() - 1) + (32,)
    for wanted, source, data, scale in ((rows, x, *outputs[:2]), (cols, x.mT, *outputs[2:])):
        if wanted:
            codes, exponents = definition.cast_dynamic(source, block, dtype, scale_format)
            data.copy_(codes)
            scale.copy_(cublas.swizzled(exponents) if swizzled else exponents)
    return outputs


def _fake(
    x: Tensor, dtype: torch.dtype, scale_format: str, swizzled: bool, rows: bool, cols: bool
) -> BothWays:
    if scale_format not in (definition.E8M0, definition.E8M0_FLOOR):
        raise ValueError(
            f"float8::cast_mx: scales of 1x32 blocks are E8M0, not {scale_format!r}; use "
            f"{definition.E8M0!r} or {definition.E8M0_FLOOR!r}"
        )
    M, K = x.shape[-2:]
    return (
        new_data(x, M, K, rows, dtype),
        _new_scale(x, M, K, rows, swizzled),
        new_data(x, K, M, cols, dtype),
        _new_scale(x, K, M, cols, swizzled),
    )


def _new_scale(x: Tensor, rows: int, cols: int, wanted: bool, swizzled: bool) -> Tensor:
    """The empty scale of an operand (rows, cols), or of a stack."""
    down, across = scale_shape((rows, cols), (1, 32))
    if not (swizzled and wanted):
        return new_data(x, down, across, wanted, torch.float8_e8m0fnu)
    shape = (*x.shape[:-2], cublas.swizzled_size(down, across))
    return torch.empty(shape, dtype=torch.float8_e8m0fnu, device=x.device)


cast_mx = register(
    "cast_mx(Tensor x, ScalarType dtype, str scale_format, bool swizzled, bool rows, bool cols) -> "
    "(Tensor data, Tensor scale, Tensor data_t, Tensor scale_t)",
    kernel=_launch,
    definition=_definition,
    fake=_fake,
)
