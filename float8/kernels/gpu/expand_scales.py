"""`expand_scales`: float32 scales that are powers of two, as the E8M0 scales of an MX operand.

A scale of a row, a tensor or 128 columns serves whole squares of 4 blocks of 1x32, so an MX operand
with that scale repeated has the same values. The bytes are laid out as MX products read them
(`float8.kernels.cublas.swizzled`): an int32 has the 4 blocks of a row, and 4 consecutive ones have
the rows r, r + 32, r + 64 and r + 96 of a square of 128. Bytes outside of the matrix are 0.

E8M0 holds 2^-126 to 2^127 exactly, which are all scales that casts compute. Any other number
becomes 255, NaN, and so does its product: infinity, NaN, 0, and what is no power of two.

Of tokens in groups (`float8.kernels.groups`) the squares of each group follow those of the group
before, as torch's grouped MX product reads them (`float8.kernels.gpu.cast_tokens`)::

    scale                              rows     columns  result
    (T, ...) of tokens                 T        K        (padded_tokens(T, E, 128), 4 ceil(K / 128))
    (E, M) or (M, ...) of transposed   M        P        (128 ceil(M / 128), P / 32)
    tokens, by_columns

A program writes `_WIDTH` squares of 512 bytes. The op moves the scales and 1/32 byte per element.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import WHOLE, ceil_div
from float8.kernels import cublas, definition, groups
from float8.kernels.gpu.jit import group_of_tile
from float8.kernels.gpu.launch import (
    NO_FUSION,
    Form,
    count_of,
    groups_constant,
    register_op,
    strides_of,
)

_WIDTH = 8


@triton.jit(
    do_not_specialize=[
        "rows", "blocks", "P", "E", "stride_e", "stride_down", "stride_row", "stride_across"
    ]
)  # fmt: skip
def _expand_kernel(
    scale_ptr,
    offs_ptr,  # int32 (E,), the ends of groups, or None
    out_ptr,  # int32 of the 4 blocks of a row, (squares, 128)
    rows,
    blocks,  # of 1x32, in a row
    P,  # tokens of all groups that are padded to multiples of 128
    E,
    stride_e,
    stride_down,  # from the scales of a square to those of the square below
    stride_row,  # within a square
    stride_across,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
):
    across, downs = tl.cdiv(blocks, 4), tl.cdiv(rows, 128)
    tiles = tl.cdiv(downs if BY_COLUMNS else across, WIDTH)
    line = tl.program_id(0) // tiles
    lane = tl.program_id(0) % tiles * WIDTH + tl.arange(0, WIDTH)[:, None].to(tl.int64)
    place = tl.arange(0, 128)[None, :]
    row = place % 4 * 32 + place // 4
    if GROUPS:
        T = P if BY_COLUMNS else rows
        group, begin, size, start, first = group_of_tile(line, offs_ptr, E, T, P, 128, 128, GROUPS)
        if first >= size:
            return
    if BY_COLUMNS:  # squares below each other
        exists, inside = lane < downs, lane * 128 + row < rows
        origin = group * stride_e + (start + first) // 128 * stride_across
        at = origin + (lane * 128 + row) * stride_row
        square = start // 128 * downs + lane * tl.cdiv(size, 128) + first // 128
    else:  # squares side by side
        if GROUPS:
            origin, height = (begin + first) * stride_row, size - first
            down = (start + first) // 128
        else:
            e = tl.program_id(1).to(tl.int64)
            origin, height = e * stride_e + line.to(tl.int64) * stride_down, rows - line * 128
            down = e * downs + line
        exists, inside = lane < across, (lane < across) & (row < height)
        at = origin + row * stride_row + lane * stride_across
        square = down * across + lane
    bits = tl.load(scale_ptr + at, inside, 0.0).to(tl.int32, bitcast=True)
    code = tl.where((bits & 0x7FFFFF == 0) & (bits > 0), bits >> 23, 255)
    code = tl.where(inside, code, 0) * 0x01010101
    if not BY_COLUMNS:
        left = (blocks - lane * 4).to(tl.int32)
        code = tl.where(left < 4, code & ((1 << left * 8) - 1), code)
    tl.store(out_ptr + square * 128 + place, code, exists)


def _launch(
    scale: Tensor, block: Sequence[int], rows: int, columns: int, offs: Tensor | None = None,
    by_columns: bool = False,
) -> Tensor:  # fmt: skip
    out = _fake(scale, block, rows, columns, offs, by_columns)
    blocks, down, P, E = ceil_div(columns, 32), ceil_div(rows, 128), 0, 0
    lines, (stride_e, stride_row, stride_across) = down, strides_of(scale.stride())
    if offs is not None:
        P, E = columns if by_columns else len(out), offs.numel()
        lines = (P if by_columns else rows) // 128 + E
    if by_columns and block[-2] == 1:  # (E, rows); or a column of each group's first scale
        stride_e, stride_row = scale.stride() if block[-1] == WHOLE else scale.stride()[::-1]
    tiles = ceil_div(down if by_columns else ceil_div(blocks, 4), _WIDTH)
    _form(groups_constant(E), by_columns).launch(
        (lines * tiles, count_of(scale.shape)), scale, offs, out, rows, blocks, P, E, stride_e,
        {1: 128 * stride_row, 128: stride_row, WHOLE: 0}[block[-2]],
        stride_row if block[-2] == 1 else 0, 0 if block[-1] == WHOLE else stride_across,
    )  # fmt: skip
    return out


@functools.cache
def _form(groups: int, by_columns: bool) -> Form:
    constants = {"WIDTH": _WIDTH, "GROUPS": groups, "BY_COLUMNS": by_columns, "num_warps": 4}
    return Form(_expand_kernel, {2: torch.int32}, **constants, **NO_FUSION)


def _definition(
    scale: Tensor, block: Sequence[int], rows: int, columns: int, offs: Tensor | None = None,
    by_columns: bool = False,
) -> Tensor:  # fmt: skip
    if offs is None:
        bits = scale.view(torch.int32)
        is_power = (bits & 0x7FFFFF == 0) & (bits > 0)
        codes = torch.where(is_power, bits >> 23, 255).to(torch.uint8)
        shape = torch.Size((*scale.shape[:-2], rows, ceil_div(columns, 32)))
        across = WHOLE if block[-1] == WHOLE else block[-1] // 32
        of_32 = (1, block[-2], across)[-scale.dim() :]
        codes = definition.per_element(codes, shape, of_32).expand(shape)
        return cublas.swizzled(codes.view(torch.float8_e8m0fnu))
    out = _fake(scale, block, rows, columns, offs, by_columns).view(torch.uint8).zero_()
    ends = groups.ends_of(offs, columns if by_columns else rows)
    for group, (begin, end, start) in enumerate(groups.spans_of(ends, 128)):
        across, part = ceil_div(end - begin, 128), scale
        if block[0] == 1 and not by_columns:
            part = scale[begin:end]
        elif block[0] == 1:
            first = start // 128 + group
            part = scale[group][:, None] if block[1] == WHOLE else scale[:, first : first + across]
        sizes = (rows, across * 128) if by_columns else (end - begin, columns)
        groups.write_squares(out, _definition(part, block, *sizes), start, by_columns)
    return out.view(torch.float8_e8m0fnu)


def _fake(
    scale: Tensor, block: Sequence[int], rows: int, columns: int, offs: Tensor | None = None,
    by_columns: bool = False,
) -> Tensor:  # fmt: skip
    shape: tuple[int, ...] = (*scale.shape[:-2], cublas.swizzled_size(rows, ceil_div(columns, 32)))
    if offs is not None and by_columns:
        shape = 128 * ceil_div(rows, 128), columns // 32
    elif offs is not None:
        shape = groups.padded_tokens(rows, offs.shape[0], 128), 4 * ceil_div(columns, 128)
    return scale.new_empty(shape, dtype=torch.float8_e8m0fnu)


expand_scales = register_op(
    "expand_scales(Tensor scale, int[] block, SymInt rows, SymInt columns, Tensor? offs=None, "
    "bool by_columns=False) -> Tensor",
    kernel=_launch,
    definition=_definition,
    fake=_fake,
)
