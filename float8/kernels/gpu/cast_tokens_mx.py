"""`cast_tokens_mx`: the tokens of grouped MX products, cast per group as torch's GEMM reads them.

As `cast_tokens`, with E8M0 scales of 1x32 blocks: one launch whose grid depends on T and E alone,
2 + 1 + 1 bytes per element. ``torch._scaled_grouped_mm`` hands MX operands to a CUTLASS kernel
(MSLK, csrc/gemm/cutlass/mx8mx8bf16_grouped), which finds the scales of a group by counting:

- tokens by experts: the scales of each group are padded to 128 rows and 4 blocks, swizzled (see
  `float8.kernels.cublas.swizzled`), and follow each other. So group g begins at row ``starts[g]``
  of ``scale`` (P, 4 ceil(K / 128)), with groups padded to multiples of 128.
- tokens by tokens: the scales of each group, (K, size / 32), are padded and swizzled likewise, and
  follow each other. Groups are padded to `ALIGNMENT` = 128 tokens, whole squares of scales, so
  group g begins at ``starts[g] / 32 * 128 ceil(K / 128)`` of ``scale_t`` (128 ceil(K / 128),
  P / 32). The kernel multiplies 256 tokens at a time: padding costs it nothing.

Expert operands are cast by `cast_mx`. What no GEMM reads is not written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import ceil_div
from float8.kernels import cublas, definition, groups
from float8.kernels.gpu.cast_mx import quotients_t, rounding_constants, store_exponents, write_rows
from float8.kernels.gpu.jit import (
    convert_4,
    group_of_tile,
    load_4_rows,
    store_packed_group,
    tile_of_program,
)
from float8.kernels.gpu.launch import (
    NO_FUSION,
    TRITON_FORMATS,
    BothWays,
    as_bytes,
    check_device,
    launch,
    new_data,
    register,
)

ALIGNMENT = 128
_BLOCK = (1, 32)


@triton.jit
def _tokens_kernel(
    x_ptr,
    offs_ptr,  # int32 (E,)
    data_ptr,  # uint8 (T, K)
    scale_ptr,  # uint8
    data_t_ptr,  # int32 (K, P / 4)
    scale_t_ptr,  # uint8
    T,
    K,
    P,
    E,
    stride_m,
    stride_k,
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    LARGEST: tl.constexpr,
    CARRY: tl.constexpr,
    WRITE_ROWS: tl.constexpr,
    WRITE_COLS: tl.constexpr,
):
    tiles_k = tl.cdiv(K, COLS)
    tile, _ = tile_of_program()
    first_k = (tile % tiles_k).to(tl.int64) * COLS
    _, begin, size, start, first = group_of_tile(
        tile // tiles_k, offs_ptr, E, T, P, 128, 128, GROUPS
    )
    if first >= size:
        return
    k = first_k + tl.arange(0, COLS)
    data_ptr += begin * K
    scale_t_ptr += start // 32 * (tiles_k * COLS)  # COLS is 128
    padded = tl.cdiv(size, 128) * 128
    for _ in range(128 // (4 * ROWS_BY_4)):  # a tile of scales has 128 rows
        m = first + tl.arange(0, ROWS_BY_4) * 4
        xs = load_4_rows(x_ptr + begin * stride_m, m, k, size, K, stride_m, stride_k)
        seen = write_rows(
            xs, data_ptr, scale_ptr, m, size, k, K, start + first, first_k, P, ROWS_BY_4, COLS,
            FORMAT, FORMAT_MAX, LARGEST, CARRY, True, WRITE_ROWS,
        )  # fmt: skip
        if WRITE_COLS:
            y0, y1, y2, y3, exponent = quotients_t(
                xs, seen, ROWS_BY_4, COLS, FORMAT_MAX, LARGEST, CARRY
            )
            row, block = tl.arange(0, COLS)[None, :], tl.arange(0, ROWS_BY_4 // 8)[:, None]
            store_exponents(
                scale_t_ptr, exponent, first_k, row, first // 32, block, K, padded // 32, True
            )
            packed = convert_4(y0, y1, y2, y3, FORMAT)
            store_packed_group(data_t_ptr, packed, first // 4, k, padded, start, K, P)
        first += 4 * ROWS_BY_4


def _launch(
    x: Tensor, offs: Tensor, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    scale: Tensor | None, align: int, row_major: bool, transposed: bool,
) -> BothWays:  # fmt: skip
    check_device("cast_tokens_mx", x, offs=offs)
    outputs = _fake(x, offs, block, dtype, scale_format, scale, align, row_major, transposed)
    (T, K), E = x.shape, offs.numel()
    if 0 in (T, K, E) or not (row_major or transposed):
        return outputs
    data, row_scale, data_t, scale_t = outputs
    launch(
        _tokens_kernel, (T // 128 + E) * ceil_div(K, 128), x, offs, as_bytes(data),
        as_bytes(row_scale), as_bytes(data_t, transposed), as_bytes(scale_t), T, K,
        groups.padded_tokens(T, E, ALIGNMENT), E, *x.stride(), ROWS_BY_4=16, COLS=128,
        GROUPS=max(16, triton.next_power_of_2(E)), FORMAT=TRITON_FORMATS[dtype],
        FORMAT_MAX=torch.finfo(dtype).max, **rounding_constants(dtype, scale_format),
        WRITE_ROWS=row_major, WRITE_COLS=transposed, num_warps=4, **NO_FUSION,
    )  # fmt: skip
    return outputs


def _definition(
    x: Tensor, offs: Tensor, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    scale: Tensor | None, align: int, row_major: bool, transposed: bool,
) -> BothWays:  # fmt: skip
    outputs = _fake(x, offs, block, dtype, scale_format, scale, align, row_major, transposed)
    data, row_scale, data_t, scale_t = (as_bytes(out).zero_() for out in outputs)
    for begin, end, start in groups.spans_of(groups.ends_of(offs, x.shape[0]), ALIGNMENT):
        for wanted, rows, out, scales in (
            (row_major, x[begin:end], data[begin:end], row_scale.view(-1)),
            (transposed, x[begin:end].t(), data_t[:, start : start + end - begin], scale_t),
        ):
            if wanted and end > begin:
                codes, exponents = definition.cast_dynamic(rows, _BLOCK, dtype, scale_format)
                out.copy_(codes.view(torch.uint8))
                places = cublas.swizzled(exponents).view(torch.uint8)
                first = (
                    start * row_scale.shape[1] if scales.dim() == 1 else start // 32 * len(scale_t)
                )
                scales.view(-1)[first : first + places.numel()] = places
    return outputs


def _fake(
    x: Tensor, offs: Tensor, block: Sequence[int], dtype: torch.dtype, scale_format: str,
    scale: Tensor | None, align: int, row_major: bool, transposed: bool,
) -> BothWays:  # fmt: skip
    is_e8m0 = scale_format in (definition.E8M0, definition.E8M0_FLOOR)
    is_aligned = align == ALIGNMENT or not transposed
    if tuple(block) != _BLOCK or not is_aligned or scale is not None or not is_e8m0:
        raise ValueError(
            f"float8::cast_tokens_mx: no kernel casts blocks {tuple(block)} with {scale_format} "
            f"scales of groups at multiples of {align}; use {_BLOCK}, computed E8M0 scales and "
            f"{ALIGNMENT}"
        )
    (T, K), P = x.shape, groups.padded_tokens(x.shape[0], offs.shape[0], ALIGNMENT)
    across, e8m0 = ceil_div(K, 128), torch.float8_e8m0fnu
    return (
        new_data(x, T, K, row_major, dtype),
        new_data(x, P, 4 * across, row_major, e8m0),
        new_data(x, K, P, transposed, dtype),
        new_data(x, 128 * across, P // 32, transposed, e8m0),
    )


cast_tokens_mx = register(
    "cast_tokens_mx" + groups.SCHEMA, kernel=_launch, definition=_definition, fake=_fake
)
