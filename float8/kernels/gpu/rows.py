"""The kernel that casts whole rows by a scale for each, row-major alone: 2 + 1 bytes per element.

A program holds whole rows in registers, finds their amaxes and writes float8, from one read. Rows
that do not fit are read again, from cache. A stack of matrices takes one launch too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import ceil_div
from float8.kernels.gpu.jit import convert_to_codes, magnitude_bits, reciprocal, scale_from_amax
from float8.kernels.gpu.launch import (
    MOST_FORMS,
    NO_FUSION,
    Form,
    count_of,
    format_constants,
    strides_of,
)

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


def cast_rows(x: Tensor, data: Tensor, scale: Tensor, power_of_two: bool) -> None:
    """Write ``data`` and ``scale``: a thread has 32 elements, or 64 of long rows."""
    programs, form = _form(x.shape, x.stride(), data.dtype, power_of_two)
    form.launch(programs, x, data, scale)


@functools.lru_cache(MOST_FORMS)
def _form(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, power_of_two: bool
) -> tuple[tuple[int, int], Form]:
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
