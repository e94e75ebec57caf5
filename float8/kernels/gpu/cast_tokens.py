"""`cast_tokens`: the tokens of grouped GEMMs, cast per group of rows, in both orientations.

`float8.kernels.groups` has the layout, and the definition `cast_groups`. The host never reads
``offs``: a grid depends on T and E alone, and each program finds its group (`jit.group_of_tile`).
Groups may have any sizes. Rows at or beyond ``offs[-1]`` change no other row and no scale.

In ``data_t`` (K, P) each group starts at a multiple of `tiles.alignment_of` bytes, and zeros fill
it up to one (NaN where the scale is NaN). So transposed rows are stored 16 bytes at a time,
whatever the sizes of the groups.

============ ================================ ========================================
block        scale_t                          launches
============ ================================ ========================================
tensor       (1, 1)                           2: amax, cast; 1 by a given scale
1 x K        (E, K)                           3: zero fill, amaxes, cast
1 x 128      (K, P // 128 + E), stride (1, K) 1
1 x 32       (128 ceil(K / 128), P / 32)      1
============ ================================ ========================================

The amaxes of a group's columns are atomic maxima over tiles of 64 tokens. So few large groups and
many small ones both keep all multiprocessors busy; a program per group would not.

Scales of 1x32 blocks are E8M0, as torch's GEMM reads them: ``torch._scaled_grouped_mm`` hands MX
operands to a CUTLASS kernel (MSLK, csrc/gemm/cutlass/mx8mx8bf16_grouped), which finds the scales of
a group by counting. Those of each group are padded to 128 rows and 4 blocks, swizzled (see
`float8.kernels.cublas.swizzled`), and follow each other:

- tokens by experts: group g begins at row ``starts[g]`` of ``scale`` (P, 4 ceil(K / 128));
- tokens by tokens: groups are padded to whole squares of scales, so group g begins at
  ``starts[g] / 32 * 128 ceil(K / 128)`` of ``scale_t``. The kernel multiplies 256 tokens at a time:
  padding costs it nothing.

Row-major data alone, where float32 scales belong to rows, is an ordinary cast of all rows. Unlike
the definition, `cast_tokens` does not write what no GEMM reads: rows of no group, columns behind
the last group, and scales that belong to no block. A group without tokens has scales of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8.granularity import ceil_div
from float8.kernels import cublas, groups
from float8.kernels.gpu.cast import _launch as cast_matrix
from float8.kernels.gpu.launch import BothOrientations, new_data, register_op
from float8.kernels.gpu.tiles import alignment_of, cast_tiles
from float8.kernels.matrix import BY_32, BY_128, ROW, TENSOR


def _launch(
    x: Tensor, offs: Tensor, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    scale: Tensor | None, align: int, row_major: bool, transposed: bool,
) -> BothOrientations:  # fmt: skip
    block = (block[0], block[1])
    if 0 in (*x.shape, *offs.shape) or not (row_major or transposed):
        offs = torch.zeros(offs.shape, dtype=torch.int32, device="cpu")  # nothing to wait for
        return _definition(x, offs, block, dtype, scale_format, scale, align, row_major, transposed)
    if not transposed and block in (ROW, BY_128):
        found: Any = cast_matrix(x, None, block, dtype, scale_format, False, True, False)
        data, its, *_ = found
        return data, its, x.new_empty((0, 0), dtype=dtype), its.new_empty((0, 0))
    outputs = _fake(x, offs, block, dtype, scale_format, scale, align, row_major, transposed)
    align = max(align, alignment_of(block))  # of rows alone, what their squares need
    written = [out if out.numel() else None for out in outputs]
    cast_tiles(x, written, block, dtype, scale_format, scale=scale, offs=offs, align=align)
    return outputs


def _definition(
    x: Tensor, offs: Tensor, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    scale: Tensor | None, align: int, row_major: bool, transposed: bool,
) -> BothOrientations:  # fmt: skip
    arguments = (offs, block, dtype, scale_format, scale, align, row_major, transposed)
    outputs = _fake(x, *arguments)
    data, scales, data_t, scales_t = groups.cast_groups_definition(x, *arguments)
    if tuple(block) == BY_32:
        scales, scales_t = _swizzled(outputs, scales, scales_t, offs, x.shape[0])
    for out, defined in zip(outputs, (data, scales, data_t, scales_t), strict=True):
        out.copy_(defined)
    return outputs


def _swizzled(
    outputs: BothOrientations, scales: Tensor, scales_t: Tensor, offs: Tensor, tokens: int
) -> tuple[Tensor, Tensor]:
    """The scales of 1x32 blocks, group after group; 0 where there are none."""
    rows, columns = (torch.zeros_like(out, dtype=torch.uint8) for out in outputs[1::2])
    for group, (begin, end, start) in enumerate(groups.spans_of(groups.ends_of(offs, tokens), 128)):
        if rows.numel():
            groups.write_squares(rows, cublas.swizzled(scales[begin:end]), start, False)
        if columns.numel():
            first = start // 32 + group
            its = scales_t[:, first : first - (begin - end) // 32]
            groups.write_squares(columns, cublas.swizzled(its), start, True)
    return rows.view(torch.float8_e8m0fnu), columns.view(torch.float8_e8m0fnu)


def _fake(
    x: Tensor, offs: Tensor, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    scale: Tensor | None, align: int, row_major: bool, transposed: bool,
) -> BothOrientations:  # fmt: skip
    block, (T, K), E = (block[0], block[1]), x.shape, offs.shape[0]
    P = groups.padded_tokens(T, E, align)
    if block == BY_32:
        P, across = groups.padded_tokens(T, E, 128), ceil_div(K, 128)
        scales = (
            new_data(x, P, 4 * across, row_major, torch.float8_e8m0fnu),
            new_data(x, 128 * across, P // 32, transposed, torch.float8_e8m0fnu),
        )
    elif block == BY_128:
        columns = groups.scale_columns(T, E, align, 128)
        scale_t = new_data(x, columns, K, transposed, torch.float32).t()
        scales = new_data(x, ceil_div(K, 128), T, row_major, torch.float32).t(), scale_t
    else:
        shapes = ((1, 1), (1, 1)) if block == TENSOR else ((T, 1), (E, K))
        scales = (
            new_data(x, *shapes[0], row_major, torch.float32),
            new_data(x, *shapes[1], transposed, torch.float32),
        )
    return (
        new_data(x, T, K, row_major, dtype),
        scales[0],
        new_data(x, K, P, transposed, dtype),
        scales[1],
    )


cast_tokens_op = register_op(
    "cast_tokens" + groups.SCHEMA, kernel=_launch, definition=_definition, fake=_fake
)
