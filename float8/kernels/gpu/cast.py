"""`cast`: matrices and stacks of them to float8, in any granularity, in both orientations.

A float8 GEMM reads each operand with its contraction contiguous, and training contracts both
dimensions of an operand: x along K for the output, along M for the weight gradient. So a cast
writes the codes twice, row-major and transposed, from the bfloat16 source (``tiles.py``).

Rows alone, by a scale for each, take one launch of 2 + 1 bytes per element: a program holds whole
rows in registers, finds their amaxes and writes float8. Rows that do not fit are read again, from
cache.

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
``x.t()`` cast in the same blocks. What is not wanted is None. A stack of
matrices (E, M, K) has a dimension E before these. ``x.t()`` of a row-major matrix is read as that
matrix, its rows and columns exchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import WHOLE, ceil_div, scale_shape
from float8.kernels import cublas, definition
from float8.kernels.cpu import CastOutputs
from float8.kernels.gpu.jit import convert_to_codes, magnitude_bits, reciprocal, scale_from_amax
from float8.kernels.gpu.launch import (
    MOST_FORMS,
    NO_FUSION,
    Form,
    check_device,
    count_of,
    format_constants,
    new_data,
    register_kernel,
    strides_of,
)
from float8.kernels.gpu.tiles import cast_tiles
from float8.kernels.matrix import BY_32, BY_128, ROW, SQUARE_32, TENSOR

LONGEST_ROW = 16384  # what 8 warps hold in 90 registers a thread
_CHUNK = 8192  # of longer rows


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
        codes = convert_to_codes(x.to(tl.float32) * factor, FORMAT)
        tl.store(out + k[None, :], codes, (m < M)[:, None] & (k < K)[None, :])
    else:
        for start in range(0, K, COLS):
            n = start + k
            inside = (m < M)[:, None] & (n < K)[None, :]
            again = tl.load(row + n[None, :] * stride_k, inside, 0.0).to(tl.float32)
            tl.store(out + n[None, :], convert_to_codes(again * factor, FORMAT), inside)


@functools.lru_cache(MOST_FORMS)
def _rows_form(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, power_of_two: bool
) -> tuple[tuple[int, int], Form]:
    """A thread has 32 elements, or 64 of long rows."""
    M, K = shape[-2:]
    whole = K <= LONGEST_ROW
    cols = max(16, triton.next_power_of_2(K)) if whole else _CHUNK
    rows = max(1, 4096 // cols)
    form = Form(
        _rows_kernel, {1: torch.uint8}, M, K, *strides_of(strides),
        ROWS=rows, COLS=cols, WHOLE_ROWS=whole, **format_constants(dtype, power_of_two),
        num_warps=4 if cols <= 4096 else 8, **NO_FUSION,
    )  # fmt: skip
    return (ceil_div(M, rows), count_of(shape)), form


def _launch(
    x: Tensor, scale: Tensor | None, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    swizzled: bool, rows: bool, cols: bool, finds_amax: bool = False,
) -> CastOutputs:  # fmt: skip
    check_device("cast", x, scale=scale)
    how = (block[0], block[1]), dtype, scale_format, swizzled, rows, cols, finds_amax
    if x.numel() == 0 or not (rows or cols):
        return _definition(x, scale, *how)
    device = x.device
    found = [
        None if layout is None
        else torch.empty_strided(layout[0], layout[1], dtype=layout[2], device=device)
        for layout in _layouts(x.shape, scale is not None, *how)
    ]  # fmt: skip
    data, its, data_t, its_t, record = found
    if record is not None:
        record.zero_()
    if x.stride(-2) == 1 and x.stride(-1) != 1:
        x, data, its, data_t, its_t = x.mT, data_t, its_t, data, its
    if how[0] == ROW and data_t is None:
        programs, form = _rows_form(x.shape, x.stride(), dtype, scale_format != definition.FLOAT32)
        form.launch(programs, x, data, its)
    else:
        cast_tiles(
            x, (data, its, data_t, its_t), how[0], dtype, scale_format, scale=scale, record=record,
            swizzled=swizzled,
        )  # fmt: skip
    return tuple(found)  # type: ignore[return-value]


def _definition(
    x: Tensor, scale: Tensor | None, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    swizzled: bool, rows: bool, cols: bool, finds_amax: bool = False,
) -> CastOutputs:  # fmt: skip
    found = empty_outputs(x, scale, block, dtype, scale_format, swizzled, rows, cols, finds_amax)
    block = (1, *block)[-x.dim() :]
    if found[4] is not None:
        found[4].copy_(definition.amax(x, (WHOLE,) * x.dim()).reshape(1, 1))
    for source, data, its in ((x, *found[:2]), (x.mT, *found[2:4])):
        if data is None and its is None:
            continue
        own = scale
        if own is None:
            largest = definition.amax(source, block)
            own = definition.scale_from_amax(largest, torch.finfo(dtype).max, scale_format)
        if data is not None:
            data.copy_(definition.cast_by_scale(source, own, block, dtype))
        if its is not None:
            is_swizzled = its.dim() < x.dim()
            its.copy_(cublas.mx_scales(own, block, source.shape[-2]) if is_swizzled else own)
    return found


def empty_outputs(
    x: Tensor, scale: Tensor | None, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    swizzled: bool, rows: bool, cols: bool, finds_amax: bool = False,
) -> CastOutputs:  # fmt: skip
    """Empty results of the cast of x, in the layouts that GEMMs read."""
    M, K = x.shape[-2:]
    is_tensor = tuple(block) == TENSOR  # its scale, where it is computed, is that of both
    has_scale, has_scale_t = scale is None if is_tensor else rows, cols and not is_tensor
    return (
        new_data(x, M, K, True, dtype) if rows else None,
        new_scale(x, (M, K), block, swizzled) if has_scale else None,
        new_data(x, K, M, True, dtype) if cols else None,
        new_scale(x, (K, M), block, swizzled) if has_scale_t else None,
        torch.empty((1, 1), dtype=torch.float32, device=x.device) if finds_amax else None,
    )


@functools.lru_cache(MOST_FORMS)
def _layouts(shape: Sequence[int], is_given: bool, *how: Any) -> list[Any]:
    """Shape, strides and dtype of each of `empty_outputs`, or None."""
    x = torch.empty(shape, device="meta")
    outputs = empty_outputs(x, x if is_given else None, *how)
    return [None if out is None else (out.shape, out.stride(), out.dtype) for out in outputs]


# data, data_t, scale, amax: of an op that casts what it computes, by one scale. Those that are not
# wanted have no elements.
Fused = tuple[Tensor, Tensor, Tensor, Tensor]


def fused_fake(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, cols: bool, finds_amax: bool = False
) -> Fused:
    """Empty results of a fused cast of a matrix like x."""
    (M, K), float32 = x.shape, torch.float32
    return (
        new_data(x, M, K, True, dtype),
        new_data(x, K, M, cols, dtype),
        new_data(x, 1, 1, True, float32),
        new_data(x, 1, 1, finds_amax, float32),
    )


def fused_definition(
    y: Tensor, scale: Tensor | None, dtype: torch.dtype, power_of_two: bool, cols: bool,
    finds_amax: bool = False,
) -> Fused:  # fmt: skip
    """The cast of what such an op computes."""
    how = TENSOR, dtype, definition.scale_format_of(power_of_two), False, True, cols, finds_amax
    data, found, data_t, _, amax = _definition(y, scale, *how)
    outputs = data, data_t, found if scale is None else scale.clone(), amax
    empty = fused_fake(y, dtype, False, False)  # neither transposed nor an amax
    return tuple([e if x is None else x for x, e in zip(outputs, empty, strict=True)])  # type: ignore


def new_scale(
    x: Tensor, shape: tuple[int, int], block: Sequence[int], swizzled: bool = False
) -> Tensor:
    """An empty scale of operands of ``shape``, as many as x has, as cuBLASLt reads it."""
    down, across = scale_shape(shape, (block[0], block[1]))
    if tuple(block) == BY_128:
        return new_data(x, across, down, True, torch.float32).mT
    if tuple(block) not in (BY_32, SQUARE_32):
        return new_data(x, down, across, True, torch.float32)
    if not swizzled:
        return new_data(x, down, across, True, torch.float8_e8m0fnu)
    size = cublas.swizzled_size(shape[0], across)
    return torch.empty((*x.shape[:-2], size), dtype=torch.float8_e8m0fnu, device=x.device)


register_kernel("cast", _launch)
