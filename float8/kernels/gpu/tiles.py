"""The kernel that casts tile by tile: any granularity, both orientations, from one read.

A program reads a tile, finds the scales of its rows and of its columns, and writes the codes
row-major and transposed. Granularities differ in where an amax comes from, and in the tile:

=========== ============================================= ============= ==================
block       amax                                          tile          bytes per element
=========== ============================================= ============= ==================
tensorwise  partial amaxes, from a pass before            64 x 128      2 + 2 + 1 + 1
tensorwise  none: the scale is given                      64 x 128      2 + 1 + 1
rowwise     of whole rows and columns, from a pass before 64 x 128      2 + 2 + 1 + 1
1x128       of the tile's rows and columns                128 x 128     2 + 1 + 1
128x128     of the tile                                   128 x 128     2 + 1 + 1
1x32        of 32 columns of a row, and the reverse       64 x 128      2 + 1 + 1
32x32       of squares of the tile                        64 x 128      2 + 1 + 1
=========== ============================================= ============= ==================

(Both orientations, of a bfloat16 source.) What a tile holds is never read twice, and nothing is
zeroed or waited for between launches. A pass before ends where the cast begins, in what the L2
cache still holds (`jit.tile_of_program`): so a large x is read less than twice from memory, and a
small one once.

The matrices of a stack (E, M, K), such as the weights of experts, are cast one by one, in the same
launches. Groups of tokens are cast likewise, each program finding its own (`jit.group_of_tile`).

E8M0 scales follow from integer operations on the bits of an amax (``e8m0.py``). Where they are
swizzled (`float8.kernels.cublas.swizzled`), tiles cover squares of 128 rows and 4 blocks whole and
read zeros outside the matrix. So they write the padding too: bytes 0.

With 1x128 blocks both ways, a multiprocessor holds two programs: 8 warps of 128 registers, because
a thread holds 64 elements until both its rows' and its columns' scales are known. Two programs do
not always have loads under way, so about 0.7 of a copy's bandwidth is predicted. Three programs
(80 registers) would spill, and smaller tiles do not hold whole blocks of both matrices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import Block, block_name, ceil_div
from float8.kernels import definition, groups
from float8.kernels.gpu.amax import line_amaxes, partial_amaxes
from float8.kernels.gpu.jit import (
    amax_bits_of,
    convert_to_codes,
    load_4_rows,
    magnitude_bits,
    reciprocal,
    rows_of_tile,
    scale_from_amax,
    scale_of_tensor,
    scaled,
    scaled_4,
    tile_of_program,
    to_float32,
    transposed_stride,
    write_codes,
)
from float8.kernels.gpu.launch import (
    MOST_FORMS,
    NO_FUSION,
    Form,
    count_of,
    format_constants,
    groups_constant,
    strides_of,
)
from float8.kernels.matrix import BY_32, BY_128, ROW, SQUARE_32, SQUARE_128, TENSOR

# block -> a quarter of the rows of a tile, and the warps of a program
CAST_TILES: dict[Block, tuple[int, int]] = {
    TENSOR: (16, 4), ROW: (16, 4), BY_128: (32, 8), SQUARE_128: (32, 8), BY_32: (16, 4),
    SQUARE_32: (16, 4),
}  # fmt: skip


@triton.jit
def _exponents(amax_bits, LARGEST: tl.constexpr, CARRY: tl.constexpr):
    """`e8m0.e8m0_scale_from_amax`."""
    exponent = tl.maximum(((amax_bits + CARRY) >> 23) - LARGEST, 0)
    if CARRY:
        exponent = tl.where(amax_bits == 0x7F800000, 254, exponent)
    return tl.where(amax_bits > 0x7F800000, 255, exponent)


@triton.jit
def _one_over(exponent):
    """`e8m0.e8m0_reciprocal`."""
    bits = tl.where(exponent == 254, 0x00400000, (254 - exponent) << 23)  # 2^-127 is subnormal
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _store_exponents(
    amax_bits, scale_ptr, first_row, row, first_block, block, rows, blocks,
    LARGEST: tl.constexpr, CARRY: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """Store the E8M0 scales of a tile, and return their reciprocals, which are exact.

    ``first_row`` and ``first_block``, int64, are the tile's place in the matrix of scales, of shape
    (rows, blocks). ``row`` and ``block``, int32, are the place of each scale in the tile; both
    broadcast. Where SWIZZLED the tile may exceed the matrix.
    """
    exponent = _exponents(amax_bits, LARGEST, CARRY)
    if SWIZZLED:  # see `float8.kernels.cublas.swizzled`
        first = (first_row // 128 * tl.cdiv(blocks, 4) + first_block // 4) * 512
        row += (first_row % 128).to(tl.int32)
        block += (first_block % 4).to(tl.int32)
        at = first + (row % 32 * 16 + row // 32 * 4 + block)
        tl.store(scale_ptr + at, exponent.to(tl.uint8))
    else:
        row, block = first_row + row, first_block + block
        inside = (row < rows) & (block < blocks)
        tl.store(scale_ptr + row * blocks + block, exponent.to(tl.uint8), inside)
    return _one_over(exponent)


# --- the factors of a tile: one function per granularity, which also stores the scales


@triton.jit
def _factor_of_tensor(
    given_ptr, scale_ptr, scale_t_ptr, amax_ptr, record_ptr, matrix, stride_given,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """One factor for the matrix, by a given scale or by partial amaxes."""
    tile, _ = tile_of_program()
    given = given_ptr if given_ptr is None else given_ptr + matrix * stride_given
    partials = amax_ptr if amax_ptr is None else amax_ptr + matrix * PARTIALS
    scale = scale_of_tensor(
        given, scale_ptr, partials, record_ptr, FORMAT_MAX, POWER_OF_TWO, PARTIALS
    )
    if scale_t_ptr is not None:
        tl.store(scale_t_ptr, scale, tile == 0)
    return reciprocal(scale, POWER_OF_TWO)


@triton.jit
def _factor_of_128x128(
    amax_bits, scale_ptr, scale_t_ptr, tile_m, tile_k, tiles_m, tiles_k,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """One factor: the tile is a block."""
    amax = tl.max(amax_bits).to(tl.float32, bitcast=True)
    scale = scale_from_amax(amax, FORMAT_MAX, POWER_OF_TWO)
    if scale_ptr is not None:
        tl.store(scale_ptr + tile_m * tiles_k + tile_k, scale)
    if scale_t_ptr is not None:
        tl.store(scale_t_ptr + tile_k * tiles_m + tile_m, scale)
    return reciprocal(scale, POWER_OF_TWO)


@triton.jit
def _factors_of_32x32(
    amax_bits, scale_ptr, scale_t_ptr, tile_row, tile_k, M, K,
    LARGEST: tl.constexpr, CARRY: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """The factors of 4 tiles, alike in each square."""
    DOWN: tl.constexpr = amax_bits.shape[0] // 8
    ACROSS: tl.constexpr = amax_bits.shape[1] // 32
    amax = tl.max(tl.max(amax_bits.reshape(DOWN, 8, ACROSS, 32), 3), 1)
    # The scale of each row of a square where they are swizzled, else of each square.
    LINES: tl.constexpr = 32 if SWIZZLED else 1
    down, across = (M + 31) // 32, (K + 31) // 32
    if scale_ptr is not None:
        line = tl.arange(0, DOWN * LINES)[:, None]
        of_rows = tl.broadcast_to(amax[:, None, :], (DOWN, LINES, ACROSS))
        of_rows = of_rows.reshape(DOWN * LINES, ACROSS)
        if SWIZZLED:  # the padding is 0
            of_rows = tl.where(tile_row + line < M, of_rows, 0)
        _store_exponents(
            of_rows, scale_ptr, tile_row * LINES // 32, line, tile_k * ACROSS,
            tl.arange(0, ACROSS)[None, :], down, across, LARGEST, CARRY, SWIZZLED,
        )  # fmt: skip
    if scale_t_ptr is not None:
        line = tl.arange(0, ACROSS * LINES)[None, :]
        of_columns = tl.broadcast_to(amax[:, :, None], (DOWN, ACROSS, LINES))
        of_columns = of_columns.reshape(DOWN, ACROSS * LINES)
        if SWIZZLED:
            of_columns = tl.where(tile_k * amax_bits.shape[1] + line < K, of_columns, 0)
        _store_exponents(
            of_columns, scale_t_ptr, tile_k * amax_bits.shape[1] * LINES // 32, line,
            tile_row // 32, tl.arange(0, DOWN)[:, None], across, down, LARGEST, CARRY, SWIZZLED,
        )  # fmt: skip
    factor = _one_over(_exponents(amax, LARGEST, CARRY))[:, None, :, None]
    return tl.broadcast_to(factor, (DOWN, 8, ACROSS, 32)).reshape(amax_bits.shape)


@triton.jit
def _factors_of_lines(
    amax_bits, scale_ptr, at, inside, size, FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr
):
    """The factors of rows or columns, or of 128 elements of each; scales of no tokens are 1."""
    scale = scale_from_amax(amax_bits.to(tl.float32, bitcast=True), FORMAT_MAX, POWER_OF_TWO)
    tl.store(scale_ptr + at, tl.where(size > 0, scale, 1.0), inside)
    return reciprocal(scale, POWER_OF_TWO)


@triton.jit
def _factors_of_1x32(
    bits, scale_ptr, i, first_row, tile_k, rows, K,
    LARGEST: tl.constexpr, CARRY: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """The factors of every fourth row of a tile, from row i on, each of 32 columns."""
    ACROSS: tl.constexpr = bits.shape[1] // 32
    factor = _store_exponents(
        tl.max(bits.reshape(bits.shape[0], ACROSS, 32), 2), scale_ptr,
        first_row, tl.arange(0, bits.shape[0])[:, None] * 4 + i,
        tile_k * ACROSS, tl.arange(0, ACROSS)[None, :],
        rows, (K + 31) // 32, LARGEST, CARRY, SWIZZLED,
    )[:, :, None]  # fmt: skip
    return tl.broadcast_to(factor, (bits.shape[0], ACROSS, 32)).reshape(bits.shape)


@triton.jit
def _factors_of_32x1(
    amax_bits, scale_t_ptr, tile_row, tile_k, K, padded,
    LARGEST: tl.constexpr, CARRY: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """The factors of 4 tiles, each of 32 rows of a column: 8 rows of ``amax_bits``."""
    COLS: tl.constexpr = amax_bits.shape[1]
    DOWN: tl.constexpr = amax_bits.shape[0] // 8
    factor = _store_exponents(
        tl.max(amax_bits.reshape(DOWN, 8, COLS), 1), scale_t_ptr,
        tile_k * COLS, tl.arange(0, COLS)[None, :], tile_row // 32, tl.arange(0, DOWN)[:, None],
        K, (padded + 31) // 32, LARGEST, CARRY, SWIZZLED,
    )[:, None, :]  # fmt: skip
    return tl.broadcast_to(factor, (DOWN, 8, COLS)).reshape(amax_bits.shape)


@triton.jit
def _tiles_kernel(
    x_ptr,
    offs_ptr,  # int32 (E,), the ends of groups of rows; None: x is a matrix, or a stack of them
    given_ptr,  # a scale; None: scales follow from amaxes
    amax_ptr,  # int32 bits: partial amaxes (PARTIALS,) where tensorwise, of rows (M,) where rowwise
    amax_t_ptr,  # of columns (K,), where rowwise
    record_ptr,  # int32 bits of a running maximum, or None
    data_ptr,  # uint8 (M, K), or None
    scale_ptr,
    data_t_ptr,  # uint8 (K, P), or int32 of four bytes each where P is a multiple of 16, or None
    scale_t_ptr,
    M,
    K,
    P,  # M, or all columns of groups that are padded
    E,
    stride_e,
    stride_m,
    stride_k,
    stride_given,  # 0: all matrices have one given scale
    stride_scale,  # from matrix to matrix of a stack
    stride_scale_t,
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGN: tl.constexpr,
    PARTIALS: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr,  # and CARRY: see `_rounding_constants`
    CARRY: tl.constexpr,
    SWIZZLED: tl.constexpr,
):
    ROWS: tl.constexpr = 4 * ROWS_BY_4
    # The scale of an element is the same in both orientations.
    IS_SHARED: tl.constexpr = BLOCK == "tensorwise" or BLOCK == "128x128" or BLOCK == "32x32"  # noqa: PLR1714
    # E8M0 scales may be rounded down.
    FITS: tl.constexpr = given_ptr is None and BLOCK != "1x32" and BLOCK != "32x32"  # noqa: PLR1714

    # Which rows and columns the tile has.
    tile, matrix = tile_of_program()
    tiles_k = tl.cdiv(K, COLS)
    group, group_row, size, group_col, tile_row = rows_of_tile(
        tile // tiles_k, matrix, offs_ptr, E, M, P, ROWS, ALIGN, GROUPS
    )
    padded = (size + (ALIGN - 1)) // ALIGN * ALIGN
    if GROUPS:
        # The first tile of a group without tokens writes scales of 1; swizzled ones have no room.
        is_idle = tile_row >= (padded if BLOCK == "1x32" else tl.maximum(padded, 1))
        if is_idle:
            return
    tile_k = (tile % tiles_k).to(tl.int64)
    m = tile_row + tl.arange(0, ROWS_BY_4) * 4
    k = tile_k * COLS + tl.arange(0, COLS)
    x_ptr += matrix * stride_e + group_row * stride_m
    xs = load_4_rows(
        x_ptr, m, k, size, K, stride_m, stride_k, PARTIALS > 0 or BLOCK == "rowwise"
    )  # fmt: skip

    if data_ptr is not None:
        data_ptr += (matrix * M + group_row) * K
    if data_t_ptr is not None:
        data_t_ptr += matrix * K * transposed_stride(data_t_ptr, P)
    if scale_ptr is not None:
        scale_ptr += matrix * stride_scale
    if scale_t_ptr is not None:
        scale_t_ptr += matrix * stride_scale_t

    # Row-major by scales of rows; and the largest magnitude of every 4 rows.
    amax_bits = tl.zeros((ROWS_BY_4, COLS), tl.int32)
    for i in tl.static_range(4):
        x32 = xs[i].to(tl.float32)
        bits = magnitude_bits(x32)
        amax_bits = tl.maximum(amax_bits, bits)
        if data_ptr is not None and not IS_SHARED:
            if BLOCK == "1x32":
                factor = _factors_of_1x32(
                    bits, scale_ptr, i, group_col + tile_row, tile_k, M, K,
                    LARGEST, CARRY, SWIZZLED,
                )  # fmt: skip
            else:
                if BLOCK == "1x128":
                    amax = tl.max(bits, 1)
                else:  # the first tile of a row writes its scale
                    amax = tl.load(amax_ptr + matrix * M + group_row + m + i, m + i < size, 0)
                factor = _factors_of_lines(
                    amax, scale_ptr, tile_k * M + group_row + m + i,
                    m + i < (size if BLOCK == "1x128" else tl.where(tile_k == 0, size, 0)), 1,
                    FORMAT_MAX, POWER_OF_TWO,
                )[:, None]  # fmt: skip
            codes = convert_to_codes(scaled(x32, factor, FORMAT_MAX, FITS), FORMAT)
            inside = (m + i < size)[:, None] & (k < K)[None, :]
            tl.store(data_ptr + (m + i)[:, None] * K + k[None, :], codes, inside)

    # Transposed by scales of columns, or in both orientations by scales that they share.
    if IS_SHARED or data_t_ptr is not None:
        if BLOCK == "tensorwise":
            factor = _factor_of_tensor(
                given_ptr, scale_ptr, scale_t_ptr, amax_ptr, record_ptr, matrix, stride_given,
                FORMAT_MAX, POWER_OF_TWO, PARTIALS,
            )  # fmt: skip
        elif BLOCK == "128x128":
            factor = _factor_of_128x128(
                amax_bits, scale_ptr, scale_t_ptr, tile_row // ROWS, tile_k, tl.cdiv(M, ROWS),
                tiles_k, FORMAT_MAX, POWER_OF_TWO,
            )  # fmt: skip
        elif BLOCK == "32x32":
            factor = _factors_of_32x32(
                amax_bits, scale_ptr, scale_t_ptr, tile_row, tile_k, M, K,
                LARGEST, CARRY, SWIZZLED,
            )  # fmt: skip
        elif BLOCK == "1x32":
            factor = _factors_of_32x1(
                amax_bits, scale_t_ptr + group_col // 32 * (tiles_k * COLS), tile_row, tile_k,
                K, padded, LARGEST, CARRY, SWIZZLED,
            )  # fmt: skip
        else:
            if BLOCK == "1x128":
                column = tile_row // ROWS + (group_col // ROWS + group if GROUPS else 0)
                amax = tl.max(amax_bits, 0)
            else:  # the first tile of a column writes its scale
                column = group if GROUPS else 0
                amax = tl.load(amax_t_ptr + group * K + k, k < K, 0)
            factor = _factors_of_lines(
                amax, scale_t_ptr, column * K + k,
                k < (K if BLOCK == "1x128" else tl.where(tile_row == 0, K, 0)),
                size if GROUPS else 1, FORMAT_MAX, POWER_OF_TWO,
            )[None, :]  # fmt: skip
        write_codes(
            scaled_4(to_float32(xs), factor, FORMAT_MAX, FITS), data_ptr if IS_SHARED else None,
            data_t_ptr, tile_row // 4, k, size, padded, group_col, K, P, FORMAT,
        )  # fmt: skip
    if record_ptr is not None and given_ptr is not None:
        tl.atomic_max(record_ptr, tl.max(amax_bits_of(to_float32(xs))), sem="relaxed")


def alignment_of(block: Block) -> int:
    """The multiple at which groups start in the transposed operand: of whole words, or squares."""
    return 128 if block == BY_32 else 16


def cast_tiles(
    x: Tensor,
    outputs: Sequence[Tensor | None],
    block: Block,
    dtype: torch.dtype,
    scale_format: str,
    *,
    scale: Tensor | None = None,
    offs: Tensor | None = None,
    align: int = 1,
    record: Tensor | None = None,
    swizzled: bool = True,
) -> None:
    """Write ``outputs``, those of them that are not None.

    Args:
        x: (M, K), or a stack (E, M, K); tokens (T, K) in groups, which end at ``offs``.
        outputs: data, scale, data_t, scale_t.
        block: of `CAST_TILES`.
        dtype: of the data.
        scale_format: of scales that are computed.
        align: of groups in the transposed operand, a multiple of `alignment_of` the block.
        scale: float32, one or one for each matrix, in place of a computed one; tensorwise alone.
        record: a running maximum to record the amax in, float32; tensorwise alone.
        swizzled: how E8M0 scales are written, of 32x32 blocks once for each row.
    """
    data, row_scale, data_t, scale_t = outputs
    E = 0 if offs is None else offs.numel()
    amax = amax_t = None
    partials = 0
    if block == TENSOR and scale is None:
        amax = partial_amaxes(x, offs=offs)
        partials = amax.shape[-1]
    elif block == ROW:
        amax, amax_t = line_amaxes(x, data is not None, data_t is not None, offs)
    scales = (row_scale, scale_t) if x.dim() == 3 else (None, None)
    programs, form = _form(
        x.shape, x.stride(), dtype, block, scale_format,
        0 if scale is None else scale.numel(), partials, E, align, swizzled,
        *[0 if s is None else s.stride(0) for s in scales],
    )  # fmt: skip
    form.launch(programs, x, offs, scale, amax, amax_t, record, data, row_scale, data_t, scale_t)


@functools.lru_cache(MOST_FORMS)
def _form(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, block: Block,
    scale_format: str, given: int, partials: int, E: int, align: int, swizzled: bool, *between: int,
) -> tuple[tuple[int, int], Form]:  # fmt: skip
    """``given`` scales; ``partials``: how many amaxes; ``between`` matrices, strides of scales."""
    (M, K), (rows_by_4, warps) = shape[-2:], CAST_TILES[block]
    P = groups.padded_tokens(M, E, align) if E else M
    rows = 4 * rows_by_4
    # Tiles cover multiples of it.
    covered = max(rows, align, 128 if block in (BY_32, SQUARE_32) and swizzled else 0)
    tiles = (M // covered + E if E else ceil_div(M, covered)) * (covered // rows)
    is_e8m0, codes = block in (BY_32, SQUARE_32), torch.uint8
    read_as = {5: torch.int32, 6: codes, 8: torch.int32 if P % 16 == 0 else codes}
    read_as |= {7: codes, 9: codes} if is_e8m0 else {}
    form = Form(
        _tiles_kernel, read_as, M, K, P, E, *strides_of(strides), int(given > 1), *between,
        ROWS_BY_4=rows_by_4, COLS=128, BLOCK=block_name(block), GROUPS=groups_constant(E),
        ALIGN=align, PARTIALS=partials, SWIZZLED=swizzled,
        **format_constants(dtype, given == 0 and scale_format != definition.FLOAT32),
        **_rounding_constants(dtype, scale_format), num_warps=warps, **NO_FUSION,
    )  # fmt: skip
    return (tiles * ceil_div(K, 128), count_of(shape)), form


def _rounding_constants(dtype: torch.dtype, scale_format: str) -> dict[str, int]:
    """The compile-time arguments of `_store_exponents`."""
    mantissa, exponent = math.frexp(torch.finfo(dtype).max)
    carry = 0x7FFFFF - int((2 * mantissa - 1) * 2**23)
    return {"LARGEST": exponent - 1, "CARRY": carry if scale_format == definition.E8M0 else 0}
