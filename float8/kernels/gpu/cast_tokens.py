"""`cast_tokens`: the tokens of grouped GEMMs, cast per group of rows, in both orientations.

`float8.kernels.groups` has the layout, and the definition `cast_groups`. The host never reads
``offs``: a grid depends on T and E alone, and each program finds its group (`jit.group_of_tile`).
Groups may have any sizes. Rows at or beyond ``offs[-1]`` change no other row and no scale.

In ``data_t`` (K, P) each group starts at a multiple of `ALIGNMENT` bytes, and zeros fill it up to
one (NaN where the scale is NaN). So transposed rows are stored 16 bytes at a time, whatever the
sizes of the groups.

============ ================================ ===================== =========================
block        scale_t                          bytes per element     launches
============ ================================ ===================== =========================
tensor       (1, 1)                           2 + 2 + 1 + 1         2: amax, cast
given scale  (1, 1)                           2 + 1 + 1             1
1 x K        (E, K)                           2 + 2 + 1 + 1         3: zero fill, amaxes, cast
1 x 128      (K, P // 128 + E), stride (1, K) 2 + 1 + 1             1
============ ================================ ===================== =========================

(Both orientations, of a bfloat16 source.) The amaxes of a group's columns are atomic maxima over
tiles of 64 tokens. So few large groups and many small ones both keep all multiprocessors busy; a
program per group would not.

Row-major data alone, where its scales belong to rows, is an ordinary cast of all rows. Unlike the
definition, `cast_tokens` does not write what no GEMM reads: rows of no group, columns behind the
last group, and columns of ``scale_t`` that belong to no block. A group without tokens has scales
of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import WHOLE, Block, ceil_div
from float8.kernels import definition, groups
from float8.kernels.gpu.amax import partial_amaxes
from float8.kernels.gpu.cast_blockwise import cast_blockwise, new_scale
from float8.kernels.gpu.cast_rowwise import cast_rowwise
from float8.kernels.gpu.jit import (
    convert_4,
    encode_fitting,
    group_of_tile,
    load_4_rows,
    magnitude_bits,
    reciprocal,
    scale_from_amax,
    scale_of_tensor,
    scaled,
    store_packed_group,
    tile_of_program,
    to_float32,
    unpack_4,
)
from float8.kernels.gpu.launch import (
    NO_FUSION,
    BothWays,
    as_bytes,
    check_device,
    format_constants,
    launch,
    new_data,
    register,
)

ALIGNMENT = 16
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_TENSOR, _ROW, _BY_128 = (WHOLE, WHOLE), (1, WHOLE), (1, 128)
# block -> the tile of a program, and its options
_TILES: dict[Block, tuple[dict[str, int], dict[str, Any]]] = {
    _TENSOR: ({"ROWS": 64, "COLS": 128}, {"num_warps": 4, **NO_FUSION}),
    _ROW: ({"ROWS": 64, "COLS": 128}, {"num_warps": 4, **NO_FUSION}),
    _BY_128: ({"ROWS": 128, "COLS": 128}, {"num_warps": 8, **NO_FUSION}),
}


@triton.jit
def _cast_kernel(
    x_ptr,
    offs_ptr,  # int32 (E,)
    given_ptr,  # a scale, where WHOLE_TENSOR; unused where PARTIALS
    partials_ptr,  # amax bits (PARTIALS,); unused where PARTIALS is 0
    amax_ptr,  # amax bits (T,), of whole rows
    amax_t_ptr,  # amax bits (E, K), of whole columns of groups
    data_ptr,  # uint8 (T, K)
    scale_ptr,
    data_t_ptr,  # int32 (K, P / 4)
    scale_t_ptr,
    T,
    K,
    P,
    E,
    stride_m,
    stride_k,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE_TENSOR: tl.constexpr,  # one scale
    BLOCKS: tl.constexpr,  # rows and columns of a tile are blocks; else scales belong to whole ones
    PARTIALS: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WRITE_ROWS: tl.constexpr,
    WRITE_COLS: tl.constexpr,
):
    tiles_k = tl.cdiv(K, COLS)
    tile, _ = tile_of_program()
    tile_k = (tile % tiles_k).to(tl.int64)
    group, begin, size, start, first = group_of_tile(
        tile // tiles_k, offs_ptr, E, T, P, ROWS, _ALIGNMENT, GROUPS
    )
    if (first > 0) & (first >= size):
        return
    m = first + tl.arange(0, ROWS // 4) * 4  # rows of the group
    k = tile_k * COLS + tl.arange(0, COLS)
    xs = load_4_rows(x_ptr + begin * stride_m, m, k, size, K, stride_m, stride_k, PARTIALS > 0)

    seen = tl.zeros((ROWS // 4, COLS), tl.int32)
    for i in tl.static_range(4):
        x32, inside = xs[i].to(tl.float32), m + i < size
        bits = magnitude_bits(x32)
        seen = tl.maximum(seen, bits)
        if WRITE_ROWS and not WHOLE_TENSOR:
            row = begin + m + i
            if BLOCKS:
                amax, writes = tl.max(bits, 1), size
            else:
                amax, writes = tl.load(amax_ptr + row, inside, 0), tl.where(tile_k == 0, size, 0)
            scale = scale_from_amax(amax.to(tl.float32, bitcast=True), FORMAT_MAX, POWER_OF_TWO)
            tl.store(scale_ptr + tile_k * T + row, scale, m + i < writes)
            codes = encode_fitting(x32, reciprocal(scale, POWER_OF_TWO)[:, None], FORMAT)
            inside = inside[:, None] & (k < K)[None, :]
            tl.store(data_ptr + row[:, None] * K + k[None, :], codes, inside)

    if WHOLE_TENSOR:
        scale = scale_of_tensor(
            given_ptr, scale_ptr, partials_ptr, partials_ptr,
            FORMAT_MAX, POWER_OF_TWO, PARTIALS, False, WRITE_ROWS,
        )  # fmt: skip
        if WRITE_COLS:
            tl.store(scale_t_ptr, scale, tile == 0)
        factor_t = reciprocal(scale, POWER_OF_TWO and PARTIALS > 0)
    else:
        if BLOCKS:
            amax_t, writes = tl.max(seen, 0), K
            scale_t_ptr += (start // ROWS + group + first // ROWS) * K
        else:
            amax_t = tl.load(amax_t_ptr + group * K + k, k < K, 0)
            writes = tl.where(first == 0, K, 0)
            scale_t_ptr += group * K
        scale_t = scale_from_amax(amax_t.to(tl.float32, bitcast=True), FORMAT_MAX, POWER_OF_TWO)
        scale_t = tl.where(size > 0, scale_t, 1.0)
        tl.store(scale_t_ptr + k, scale_t, k < writes)
        factor_t = reciprocal(scale_t, POWER_OF_TWO)[None, :]
    ys = to_float32(xs)

    FITS: tl.constexpr = PARTIALS > 0 or not WHOLE_TENSOR
    packed = convert_4(
        scaled(ys[0], factor_t, FORMAT_MAX, FITS),
        scaled(ys[1], factor_t, FORMAT_MAX, FITS),
        scaled(ys[2], factor_t, FORMAT_MAX, FITS),
        scaled(ys[3], factor_t, FORMAT_MAX, FITS),
        FORMAT,
    )
    if WRITE_COLS:
        store_packed_group(data_t_ptr, packed, first // 4, k, size, start, K, P)
    if WRITE_ROWS and WHOLE_TENSOR:
        rows = unpack_4(packed)
        for i in tl.static_range(4):
            inside = (m + i < size)[:, None] & (k < K)[None, :]
            tl.store(data_ptr + (begin + m + i)[:, None] * K + k[None, :], rows[i], inside)


@triton.jit
def _lines_kernel(
    x_ptr,
    offs_ptr,  # int32 (E,)
    amax_ptr,  # int32 bits (T,), zeros before the first program
    amax_t_ptr,  # int32 bits (E, K), likewise
    T,
    K,
    P,
    E,
    stride_m,
    stride_k,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUPS: tl.constexpr,
    OF_ROWS: tl.constexpr,
):
    tiles_k = tl.cdiv(K, COLS)
    group, begin, size, _, first = group_of_tile(
        tl.program_id(0) // tiles_k, offs_ptr, E, T, P, ROWS, _ALIGNMENT, GROUPS
    )
    if first >= size:
        return
    m = first + tl.arange(0, ROWS)
    k = (tl.program_id(0) % tiles_k).to(tl.int64) * COLS + tl.arange(0, COLS)
    offsets = (begin + m)[:, None] * stride_m + k[None, :] * stride_k
    x = tl.load(x_ptr + offsets, (m < size)[:, None] & (k < K)[None, :], 0.0)
    bits = magnitude_bits(x.to(tl.float32))
    tl.atomic_max(amax_t_ptr + group * K + k, tl.max(bits, 0), k < K, sem="relaxed")
    if OF_ROWS:
        tl.atomic_max(amax_ptr + begin + m, tl.max(bits, 1), m < size, sem="relaxed")


def _arguments(
    x: Tensor, offs: Tensor, block: Block
) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """What both kernels launch with: programs, sizes and strides, compile-time arguments."""
    (T, K), E = x.shape, offs.numel()
    tile, options = _TILES[block]
    programs = (T // tile["ROWS"] + E) * ceil_div(K, tile["COLS"])
    sizes = (T, K, groups.padded_tokens(T, E, ALIGNMENT), E, *x.stride())
    # At least 16, so that few forms are compiled.
    return programs, sizes, {**tile, "GROUPS": max(16, triton.next_power_of_2(E)), **options}


def _line_amaxes(x: Tensor, offs: Tensor, rows: bool) -> tuple[Tensor, Tensor]:
    """int32 (T,) and (E K,): bits of the amaxes of the rows, and of each group's columns."""
    T, K = x.shape
    zeros = torch.zeros(T * rows + offs.numel() * K, dtype=torch.int32, device=x.device)
    of_rows, of_groups = zeros[: T * rows], zeros[T * rows :]
    programs, sizes, constants = _arguments(x, offs, _ROW)
    launch(_lines_kernel, programs, x, offs, of_rows, of_groups, *sizes, OF_ROWS=rows, **constants)
    return of_rows, of_groups


def _launch(
    x: Tensor, offs: Tensor, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    scale: Tensor | None, align: int, row_major: bool, transposed: bool,
) -> BothWays:  # fmt: skip
    check_device("cast_tokens", x, offs=offs, scale=scale)
    if 0 in (x.shape[1], offs.numel()) or not (row_major or transposed):
        return _definition(x, offs, block, dtype, scale_format, scale, align, row_major, transposed)
    block, power_of_two = (block[0], block[1]), scale_format != definition.FLOAT32
    outputs = _fake(x, offs, block, dtype, scale_format, scale, align, row_major, transposed)
    if not transposed and block != _TENSOR:
        if block == _ROW:
            rows: BothWays = cast_rowwise(x, dtype, power_of_two, True, False)
        else:
            rows = cast_blockwise(x, dtype, power_of_two, *block, True, False)
        return rows

    data, row_scale, data_t, scale_t = outputs
    partials, of_rows, of_groups = scale_t, scale_t, scale_t  # where they are not read
    if block == _ROW:
        of_rows, of_groups = _line_amaxes(x, offs, row_major)
    is_computed = block == _TENSOR and scale is None
    if is_computed:
        partials = partial_amaxes(x, offs=offs)
    programs, sizes, constants = _arguments(x, offs, block)
    if block == _BY_128 and power_of_two and row_major and torch.version.hip is None:
        constants["maxnreg"] = 128  # as in `cast_blockwise`, and nothing spills
    launch(
        _cast_kernel, programs, x, offs, scale_t if scale is None else scale, partials, of_rows,
        of_groups, as_bytes(data), row_scale, as_bytes(data_t, transposed), scale_t, *sizes,
        WHOLE_TENSOR=block == _TENSOR, BLOCKS=block == _BY_128,
        PARTIALS=partials.numel() if is_computed else 0, WRITE_ROWS=row_major,
        WRITE_COLS=transposed, **format_constants(dtype, power_of_two), **constants,
    )  # fmt: skip
    return outputs


def _definition(
    x: Tensor, offs: Tensor, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    scale: Tensor | None, align: int, row_major: bool, transposed: bool,
) -> BothWays:  # fmt: skip
    arguments = (offs, block, dtype, scale_format, scale, align, row_major, transposed)
    outputs = _fake(x, *arguments)
    for out, defined in zip(outputs, groups.cast_groups(x, *arguments), strict=True):
        out.copy_(defined)
    return outputs


def _fake(
    x: Tensor, offs: Tensor, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    scale: Tensor | None, align: int, row_major: bool, transposed: bool,
) -> BothWays:  # fmt: skip
    block, (T, K), E = (block[0], block[1]), x.shape, offs.shape[0]
    if block not in _TILES or (transposed and align != ALIGNMENT):
        raise ValueError(
            f"float8::cast_tokens: no kernel casts blocks {block} of groups at multiples of "
            f"{align}; use one of {tuple(_TILES)} and {ALIGNMENT}"
        )
    P = groups.padded_tokens(T, E, align)
    data, data_t = new_data(x, T, K, row_major, dtype), new_data(x, K, P, transposed, dtype)
    if block == _BY_128:
        columns = groups.scale_columns(T, E, align, 128)
        scale_t = new_data(x, columns, K, transposed, torch.float32).t()
        return data, new_scale(x, T, K, row_major, block), data_t, scale_t
    rows, of_groups = ((1, 1), (1, 1)) if block == _TENSOR else ((T, 1), (E, K))
    return (
        data,
        new_data(x, *rows, row_major, torch.float32),
        data_t,
        new_data(x, *of_groups, transposed, torch.float32),
    )


cast_tokens = register(
    "cast_tokens" + groups.SCHEMA, kernel=_launch, definition=_definition, fake=_fake
)
