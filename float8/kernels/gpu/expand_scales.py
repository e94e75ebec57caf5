"""`expand_scales`: float32 scales that are powers of two, as the E8M0 scales of an MX operand.

A scale of a row, a tensor or 128 columns serves whole squares of 4 blocks of 1x32, so an MX operand
with that scale repeated has the same values. The bytes are laid out as MX products read them
(`float8.kernels.cublas.swizzled`): an int32 has the 4 blocks of a row, and 4 consecutive ones have
the rows r, r + 32, r + 64 and r + 96 of a square of 128. Bytes outside of the matrix are 0.

E8M0 holds 2^-126 to 2^127 exactly, which are all scales that casts compute. Any other number
becomes 255, NaN, and so does its product: infinity, NaN, 0, and what is no power of two.

A program writes `_WIDTH` squares of 512 bytes. The op moves the scales and 1/32 byte per element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import WHOLE, ceil_div
from float8.kernels import cublas, definition
from float8.kernels.gpu.launch import check_device, launch, pointer, register

_WIDTH = 8


@triton.jit(
    do_not_specialize=[
        "rows", "blocks", "stride_e", "stride_down", "stride_row", "stride_across"
    ]
)  # fmt: skip
def _expand_kernel(
    scale_ptr,
    out_ptr,  # int32 of the 4 blocks of a row, (E, squares, 128)
    rows,
    blocks,  # of 1x32, in a row
    stride_e,
    stride_down,  # from the scales of a square to those of the square below
    stride_row,  # within a square
    stride_across,
    WIDTH: tl.constexpr,
):
    e, across = tl.program_id(1).to(tl.int64), tl.cdiv(blocks, 4)
    tiles = tl.cdiv(across, WIDTH)
    down = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * WIDTH + tl.arange(0, WIDTH)[:, None]
    place = tl.arange(0, 128)[None, :]
    row = place % 4 * 32 + place // 4
    inside = (down * 128 + row < rows) & (column < across)
    at = e * stride_e + down * stride_down + row * stride_row + column.to(tl.int64) * stride_across
    bits = tl.load(scale_ptr + at, inside, 0.0).to(tl.int32, bitcast=True)
    code = tl.where((bits & 0x7FFFFF == 0) & (bits > 0), bits >> 23, 255)
    code = tl.where(inside, code, 0)
    code |= code << 8
    code |= code << 16
    left = blocks - column * 4
    code = tl.where(left < 4, code & ((1 << left * 8) - 1), code)
    square = (e * tl.cdiv(rows, 128) + down) * across + column
    tl.store(out_ptr + square * 128 + place, code, column < across)


def _launch(scale: Tensor, block: Sequence[int], rows: int, columns: int) -> Tensor:
    check_device("expand_scales", scale)
    out = _fake(scale, block, rows, columns)
    blocks = ceil_div(columns, 32)
    stride_row, stride_across = scale.stride()[-2:]
    launch(
        _expand_kernel,
        (ceil_div(rows, 128) * ceil_div(ceil_div(blocks, 4), _WIDTH), out.numel() // out.shape[-1]),
        scale, pointer(out, packed=True), rows, blocks, scale.stride(0) if scale.dim() == 3 else 0,
        {1: 128 * stride_row, 128: stride_row, WHOLE: 0}[block[-2]],
        stride_row if block[-2] == 1 else 0, 0 if block[-1] == WHOLE else stride_across,
        WIDTH=_WIDTH, num_warps=4,
    )  # fmt: skip
    return out


def _definition(scale: Tensor, block: Sequence[int], rows: int, columns: int) -> Tensor:
    bits = scale.view(torch.int32)
    is_power = (bits & 0x7FFFFF == 0) & (bits > 0)
    codes = torch.where(is_power, bits >> 23, 255).to(torch.uint8)
    shape = torch.Size((*scale.shape[:-2], rows, ceil_div(columns, 32)))
    of_32 = (*[1] * (scale.dim() - 2), block[-2], WHOLE if block[-1] == WHOLE else block[-1] // 32)
    return cublas.swizzled(
        definition.per_element(codes, shape, of_32).expand(shape).view(torch.float8_e8m0fnu)
    )


def _fake(scale: Tensor, block: Sequence[int], rows: int, columns: int) -> Tensor:
    size = cublas.swizzled_size(rows, ceil_div(columns, 32))
    return scale.new_empty((*scale.shape[:-2], size), dtype=torch.float8_e8m0fnu)


expand_scales = register(
    "expand_scales(Tensor scale, int[] block, SymInt rows, SymInt columns) -> Tensor",
    kernel=_launch,
    definition=_definition,
    fake=_fake,
)
