"""The amaxes of a matrix, from one read: the first launch of a cast whose second computes scales.

============== ========================================== ===================
amaxes of      how                                        launches
============== ========================================== ===================
the matrix     partial amaxes, which the cast reduces     1
rows, columns  each tile's, by atomic maxima into zeros   2 (one a zero fill)
============== ========================================== ===================

Amaxes travel as the bits of a float32 (see `float8.kernels.gpu.jit`): a maximum does not depend on
the order, so the result is deterministic, and a NaN wins. Nothing waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import ceil_div
from float8.kernels.gpu.jit import magnitude_bits, rows_of_tile
from float8.kernels.gpu.launch import (
    MOST_FORMS,
    NO_FUSION,
    Form,
    count_of,
    groups_constant,
    strides_of,
    tiles_of,
)

MAX_PARTIALS = 512  # programs of the pass: about four per multiprocessor of an H100
_TILE = {"ROWS": 64, "COLS": 128}
_OPTIONS = {"num_warps": 4, **NO_FUSION}


@triton.jit
def _amax_kernel(
    x_ptr,
    partials_ptr,  # of each matrix
    offs_ptr,  # int32 (E,), or None: rows at or beyond the last offset are not read
    M,
    K,
    stride_e,
    stride_m,
    stride_k,
    E,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """partials[i] = bits of the amax of tiles i, i + PARTIALS, ...; 0 where there is none."""
    x_ptr += tl.program_id(1).to(tl.int64) * stride_e
    if offs_ptr is not None:
        M = tl.minimum(tl.load(offs_ptr + E - 1), M)
    tiles_k = tl.cdiv(K, COLS)
    # Fewer than 2^31, so int32: a division of int64 takes a hundred instructions.
    tiles = tl.cdiv(M, ROWS) * tiles_k
    bits = tl.zeros((ROWS, COLS), tl.int32)
    for tile in range(tl.program_id(0), tiles, PARTIALS):
        m = (tile // tiles_k).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        k = (tile % tiles_k).to(tl.int64) * COLS + tl.arange(0, COLS)
        offsets = m[:, None] * stride_m + k[None, :] * stride_k
        x = tl.load(x_ptr + offsets, (m < M)[:, None] & (k < K)[None, :], 0.0)
        bits = tl.maximum(bits, magnitude_bits(x.to(tl.float32)))
    tl.store(partials_ptr + tl.program_id(1) * PARTIALS + tl.program_id(0), tl.max(bits))


@triton.jit
def _lines_kernel(
    x_ptr,
    offs_ptr,  # int32 (E,), the ends of groups of rows; None: x is a matrix, or a stack of them
    rows_ptr,  # int32 bits (M,) of each matrix, zeros before the first program; or None
    cols_ptr,  # int32 bits (K,) of each matrix or group, likewise
    M,
    K,
    E,
    stride_e,
    stride_m,
    stride_k,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    tiles_k = tl.cdiv(K, COLS)
    matrix = tl.program_id(1).to(tl.int64)
    group, group_row, size, _, tile_row = rows_of_tile(
        tl.program_id(0) // tiles_k, matrix, offs_ptr, E, M, M, ROWS, 1, GROUPS
    )
    if GROUPS:
        is_idle = tile_row >= size
        if is_idle:
            return
    m = tile_row + tl.arange(0, ROWS)
    k = (tl.program_id(0) % tiles_k).to(tl.int64) * COLS + tl.arange(0, COLS)
    x_ptr += matrix * stride_e + group_row * stride_m
    offsets = m[:, None] * stride_m + k[None, :] * stride_k
    x = tl.load(x_ptr + offsets, (m < size)[:, None] & (k < K)[None, :], 0.0)
    bits = magnitude_bits(x.to(tl.float32))
    if rows_ptr is not None:
        row = matrix * M + group_row + m
        tl.atomic_max(rows_ptr + row, tl.max(bits, 1), m < size, sem="relaxed")
    if cols_ptr is not None:
        tl.atomic_max(cols_ptr + group * K + k, tl.max(bits, 0), k < K, sem="relaxed")


def partials_of(tiles: int, most: int) -> int:
    """A power of two: how many programs, at most ``most``, find the amaxes of tiles."""
    return min(most, triton.next_power_of_2(max(tiles, 1)))


def new_partials(x: Tensor, tiles: int, most: int) -> Tensor:
    """int32 (P,), P a power of two: for the amaxes of at most ``most`` programs."""
    return torch.empty(partials_of(tiles, most), dtype=torch.int32, device=x.device)


def partial_amaxes(x: Tensor, most: int = MAX_PARTIALS, offs: Tensor | None = None) -> Tensor:
    """int32 (P,), P a power of two: bits of amaxes whose maximum is that of the matrix x.

    Of a stack (E, M, K), int32 (E, P). With ``offs`` (E,), int32, the amax is that of the rows
    ``x[:offs[-1]]``, and the others are not read.
    """
    groups = 0 if offs is None else offs.numel()
    (count, E), form = _partials_form(x.shape, x.stride(), most, groups)
    size = (count,) if x.dim() == 2 else (E, count)
    partials = torch.empty(size, dtype=torch.int32, device=x.device)
    form.launch((count, E), x, partials, offs)
    return partials


@functools.lru_cache(MOST_FORMS)
def _partials_form(
    shape: Sequence[int], strides: Sequence[int], most: int, groups: int
) -> tuple[tuple[int, int], Form]:
    E = count_of(shape)
    count = partials_of(tiles_of(shape, _TILE), max(1, most // triton.next_power_of_2(E)))
    sizes = *shape[-2:], *strides_of(strides), groups
    return (count, E), Form(_amax_kernel, {}, *sizes, **_TILE, PARTIALS=count, **_OPTIONS)


def line_amaxes(
    x: Tensor, rows: bool, cols: bool, offs: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """int32 (M,) and (K,): bits of the amaxes of the rows and of the columns of the matrix x.

    They take one read. A result that is not requested is None. Of a stack (E, M, K), they are
    (E M,) and (E K,). With ``offs`` (E,), int32, the columns are those of each group of rows.
    """
    E, (M, K) = count_of(x.shape), x.shape[-2:]
    groups = 0 if offs is None else offs.numel()
    down, across = E * M * rows, (groups or E) * K * cols
    zeros = torch.zeros(down + across, dtype=torch.int32, device=x.device)
    found = zeros[:down] if rows else None, zeros[down:] if cols else None
    programs, form = _lines_form(x.shape, x.stride(), groups)
    form.launch(programs, x, offs, *found)
    return found


@functools.lru_cache(MOST_FORMS)
def _lines_form(
    shape: Sequence[int], strides: Sequence[int], groups: int
) -> tuple[tuple[int, int], Form]:
    E, (M, K) = count_of(shape), shape[-2:]
    tiles = M // 64 + groups if groups else ceil_div(M, 64)
    sizes, constants = (M, K, groups or E, *strides_of(strides)), groups_constant(groups)
    form = Form(_lines_kernel, {}, *sizes, **_TILE, GROUPS=constants, **_OPTIONS)
    return (tiles * ceil_div(K, 128), E), form
