"""`cast`: matrices and stacks of them to float8, in any granularity, in both orientations.

A float8 GEMM reads each operand with its contraction contiguous, and training contracts both
dimensions of an operand: x along K for the output, along M for the weight gradient. So a cast
writes the codes twice, row-major and transposed, from the bfloat16 source (``tiles.py``). Rows
alone have their scales from one read (``rows.py``).

=========== =========================================== =======================================
block       scale, of ``data`` (M, K)                   scale_t, of ``data_t`` (K, M)
=========== =========================================== =======================================
tensorwise  (1, 1), if it is computed                   none: it is ``scale``
rowwise     (M, 1)                                      (K, 1)
1x128       (M, ceil(K / 128)), strides (1, M)          (K, ceil(M / 128)), strides (1, K)
128x128     ceil((M, K) / 128)                          its transpose, row-major
32x32       ceil((M, K) / 32)                           its transpose, row-major
1x32        (M, ceil(K / 32))                           (K, ceil(M / 32))
   swizzled (128 ceil(M / 128) * 4 ceil(K / 128),)      (128 ceil(K / 128) * 4 ceil(M / 128),)
=========== =========================================== =======================================

The strides are those that cuBLASLt reads, so that no GEMM copies a scale first. ``data_t`` is
``x.t()`` cast in the same blocks. An orientation that is not wanted has no elements. A stack of
matrices (E, M, K) has a dimension E before these. ``x.t()`` of a row-major matrix is read as that
matrix, its rows and columns exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from float8.granularity import WHOLE, scale_shape
from float8.kernels import cublas, definition
from float8.kernels.cpu import CastOutputs
from float8.kernels.gpu.launch import check_device, new_data, register_kernel
from float8.kernels.gpu.rows import cast_rows
from float8.kernels.gpu.tiles import CAST_TILES, cast_tiles
from float8.kernels.matrix import BY_32, BY_128, ROW, SQUARE_32, TENSOR


def _launch(
    x: Tensor, scale: Tensor | None, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    swizzled: bool, rows: bool, cols: bool, finds_amax: bool = False,
) -> CastOutputs:  # fmt: skip
    check_device("cast", x, scale=scale)
    block = (block[0], block[1])
    how = block, dtype, scale_format, swizzled, rows, cols, finds_amax
    if x.numel() == 0 or not (rows or cols):
        return _definition(x, scale, *how)
    found = empty_outputs(x, scale, *how)
    outputs, record = found[:4], found[4].zero_() if finds_amax else None
    if x.stride(-2) == 1 and x.stride(-1) != 1:
        x, outputs = x.mT, (*outputs[2:], *outputs[:2])
    if block == ROW and outputs[2].numel() == 0:
        cast_rows(x, *outputs[:2], scale_format != definition.FLOAT32)
    else:
        cast_tiles(
            x, outputs, block, scale_format, scale=scale, record=record, swizzled=swizzled
        )  # fmt: skip
    return found


def _definition(
    x: Tensor, scale: Tensor | None, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    swizzled: bool, rows: bool, cols: bool, finds_amax: bool = False,
) -> CastOutputs:  # fmt: skip
    found = empty_outputs(x, scale, block, dtype, scale_format, swizzled, rows, cols, finds_amax)
    block = (1, *block)[-x.dim() :]
    if finds_amax:
        found[4].copy_(definition.amax(x, (WHOLE,) * x.dim()).reshape(1, 1))
    for wanted, source, data, its in ((rows, x, *found[:2]), (cols, x.mT, *found[2:4])):
        if not (wanted or its.numel()):
            continue
        own = scale
        if own is None:
            largest = definition.amax(source, block)
            own = definition.scale_from_amax(largest, torch.finfo(dtype).max, scale_format)
        if wanted:
            data.copy_(definition.cast_by_scale(source, own, block, dtype))
        if its.numel():
            is_swizzled = its.dim() < x.dim()
            its.copy_(cublas.mx_scales(own, block, source.shape[-2]) if is_swizzled else own)
    return found


def empty_outputs(
    x: Tensor, scale: Tensor | None, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    swizzled: bool, rows: bool, cols: bool, finds_amax: bool = False,
) -> CastOutputs:  # fmt: skip
    """Empty results of the cast of x, in the layouts that GEMMs read."""
    check_block("cast", block, scale_format)
    M, K = x.shape[-2:]
    is_tensor = tuple(block) == TENSOR  # its scale, where it is computed, is that of both
    return (
        new_data(x, M, K, rows, dtype),
        new_scale(x, (M, K), block, scale is None if is_tensor else rows, swizzled),
        new_data(x, K, M, cols, dtype),
        new_scale(x, (K, M), block, cols and not is_tensor, swizzled),
        torch.empty((1, 1) if finds_amax else (0, 0), dtype=torch.float32, device=x.device),
    )


# data, data_t, scale, amax: of an op that casts what it computes, by one scale.
Fused = tuple[Tensor, Tensor, Tensor, Tensor]


def fused_fake(x: Tensor, dtype: torch.dtype, cols: bool, finds_amax: bool) -> Fused:
    """Empty results of a fused cast of a matrix like x."""
    how = TENSOR, dtype, definition.FLOAT32, False, True, cols, finds_amax
    data, scale, data_t, _, amax = empty_outputs(x, None, *how)
    return data, data_t, scale, amax


def fused_definition(
    y: Tensor, scale: Tensor | None, dtype: torch.dtype, power_of_two: bool, cols: bool,
    finds_amax: bool,
) -> Fused:  # fmt: skip
    """The cast of what such an op computes."""
    how = TENSOR, dtype, definition.scale_format_of(power_of_two), False
    data, found, data_t, _, amax = _definition(y, scale, *how, True, cols, finds_amax)
    return data, data_t, found if scale is None else scale.clone(), amax


def check_block(op: str, block: Sequence[int], scale_format: str) -> None:
    """Refuse what the kernels would cast by other scales than those asked for."""
    is_e8m0 = scale_format in (definition.E8M0, definition.E8M0_FLOOR)
    if tuple(block) not in CAST_TILES or is_e8m0 != (tuple(block) in (BY_32, SQUARE_32)):
        raise ValueError(
            f"float8::{op}: no kernel casts blocks {tuple(block)} by {scale_format} scales; use "
            f"one of {tuple(CAST_TILES)}, with E8M0 scales for {BY_32} and {SQUARE_32} alone"
        )


def new_scale(
    x: Tensor, shape: tuple[int, int], block: Sequence[int], wanted: bool, swizzled: bool = False
) -> Tensor:
    """An empty scale of operands of ``shape``, as many as x has, as cuBLASLt reads it."""
    down, across = scale_shape(shape, (block[0], block[1]))
    if tuple(block) == BY_128:
        return new_data(x, across, down, wanted, torch.float32).mT
    if tuple(block) not in (BY_32, SQUARE_32):
        return new_data(x, down, across, wanted, torch.float32)
    if not (swizzled and wanted):
        return new_data(x, down, across, wanted, torch.float8_e8m0fnu)
    size = cublas.swizzled_size(shape[0], across)
    return torch.empty((*x.shape[:-2], size), dtype=torch.float8_e8m0fnu, device=x.device)


cast_op = register_kernel("cast", kernel=_launch, definition=_definition)
