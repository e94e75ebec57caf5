"""`cast_blockwise`: one scale per 1x128 or 128x128 block, and both orientations from one read.

A tile of 128 x 128 holds whole blocks of the matrix and of its transpose. So one program reads a
tile, finds the amaxes in registers, and writes the codes both ways: 2 + 1 + 1 bytes per element of
a bfloat16 source, one launch, nothing zeroed and nothing read twice.

======== ======================= ===================== ============================
block    scale                   scale_t               strides
======== ======================= ===================== ============================
1x128    (M, ceil(K / 128))      (K, ceil(M / 128))    (1, M) and (1, K)
128x128  ceil((M, K) / 128)      its transpose         row-major
======== ======================= ===================== ============================

``data_t`` is ``x.t()`` cast in the same blocks, so for 128x128 the transpose of ``data``.
The strides are those that cuBLASLt reads, so that no GEMM copies a scale first.

The tile is held as four sets of every fourth row: a thread then owns 4 adjacent rows of 16 columns
and packs the codes of a column into one int32, as ``cast.py`` explains.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import Block, scale_shape
from float8.kernels.gpu.amax import is_transposed
from float8.kernels.gpu.cast_rowwise import reference_rows
from float8.kernels.gpu.jit import (
    encode_fitting,
    magnitude_bits,
    reciprocal,
    scale_from_amax,
)
from float8.kernels.gpu.launch import (
    NO_FUSION,
    TRITON_FORMATS,
    Variant,
    new_codes,
    on_device_of,
    register,
)
from float8.kernels.gpu.tiles import load_4_rows, write_codes

_BLOCKS: tuple[Block, ...] = ((1, 128), (128, 128))
_TILE = {"BLOCK": 128, "BLOCK_BY_4": 32}


@triton.jit
def _blocks_kernel(
    x_ptr,
    data_ptr,  # uint8 (M, K)
    scale_ptr,  # (ceil(K / BLOCK), M); where SQUARE (ceil(M / BLOCK), ceil(K / BLOCK))
    data_t_ptr,  # uint8 (K, M); int32 where PACK
    scale_t_ptr,  # (ceil(M / BLOCK), K); where SQUARE (ceil(K / BLOCK), ceil(M / BLOCK))
    M,
    K,
    stride_m,
    stride_k,
    BLOCK: tl.constexpr,
    BLOCK_BY_4: tl.constexpr,
    SQUARE: tl.constexpr,  # blocks of 128x128, not 1x128
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WRITE_ROWS: tl.constexpr,
    WRITE_COLS: tl.constexpr,
    PACK: tl.constexpr,  # M is a multiple of 16
):
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(M, BLOCK)
    blocks_k = tl.cdiv(K, BLOCK)
    block_m = (pid // blocks_k).to(tl.int64)
    block_k = (pid % blocks_k).to(tl.int64)
    first_m4 = block_m * BLOCK_BY_4
    m = (first_m4 + tl.arange(0, BLOCK_BY_4)) * 4
    k = block_k * BLOCK + tl.arange(0, BLOCK)
    xs = load_4_rows(x_ptr, m, k, M, K, stride_m, stride_k)

    seen = tl.zeros((BLOCK_BY_4, BLOCK), tl.int32)
    for i in tl.static_range(4):
        bits = magnitude_bits(xs[i].to(tl.float32))
        seen = tl.maximum(seen, bits)
        if WRITE_ROWS and not SQUARE:
            amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
            scale = scale_from_amax(amax, FORMAT_MAX, POWER_OF_TWO)
            tl.store(scale_ptr + block_k * M + m + i, scale, m + i < M)
            factor = reciprocal(scale, POWER_OF_TWO)[:, None]
            codes = encode_fitting(xs[i].to(tl.float32), factor, FORMAT)
            inside = (m + i < M)[:, None] & (k < K)[None, :]
            tl.store(data_ptr + (m + i)[:, None] * K + k[None, :], codes, inside)

    if WRITE_COLS or SQUARE:
        amax_t = (tl.max(seen) if SQUARE else tl.max(seen, 0)).to(tl.float32, bitcast=True)
        scale_t = scale_from_amax(amax_t, FORMAT_MAX, POWER_OF_TWO)
        factor_t = reciprocal(scale_t, POWER_OF_TWO)
        if not SQUARE:
            tl.store(scale_t_ptr + block_m * K + k, scale_t, k < K)
            factor_t = factor_t[None, :]
        if SQUARE and WRITE_ROWS:
            tl.store(scale_ptr + block_m * blocks_k + block_k, scale_t)
        if SQUARE and WRITE_COLS:
            tl.store(scale_t_ptr + block_k * blocks_m + block_m, scale_t)
        x0, x1, x2, x3 = xs
        ys = (x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32))
        write_codes(
            ys, factor_t, data_ptr, data_t_ptr, first_m4, k, M, K,
            BLOCK_BY_4, FORMAT, FORMAT_MAX, True, SQUARE and WRITE_ROWS, WRITE_COLS, PACK,
        )  # fmt: skip


def _constants(
    square: bool, dtype: torch.dtype, power_of_two: bool, pack: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile-time arguments, and options."""
    constants = {
        **_TILE,
        "SQUARE": square,
        "FORMAT": TRITON_FORMATS[dtype],
        "FORMAT_MAX": torch.finfo(dtype).max,
        "POWER_OF_TWO": power_of_two,
        "PACK": pack,
    }
    options = {"num_warps": 8, **NO_FUSION}
    if pack and power_of_two and not square and torch.version.hip is None:
        # Two programs on a multiprocessor, of 65536 registers. The compiler would take 145 each,
        # and lose nothing by the limit; divisions and single bytes need 180, and would spill.
        options["maxnreg"] = 128
    return constants, options


def _launch(
    x: Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    block_rows: int,
    block_cols: int,
    rows: bool,
    cols: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = _fake(x, dtype, power_of_two, block_rows, block_cols, rows, cols)
    if x.numel() == 0 or not (rows or cols):
        return outputs
    wanted = [(rows, *outputs[:2]), (cols, *outputs[2:])]
    if is_transposed(x):
        x, wanted = x.t(), wanted[::-1]
    (of_rows, data, scale), (of_cols, data_t, scale_t) = wanted
    M, K = x.shape
    pack = M % 16 == 0
    constants, options = _constants(block_rows != 1, dtype, power_of_two, pack)
    with on_device_of(x):
        _blocks_kernel[(triton.cdiv(M, _TILE["BLOCK"]) * triton.cdiv(K, _TILE["BLOCK"]),)](
            x,
            data.view(torch.uint8),
            scale,
            data_t.view(torch.int32 if pack and of_cols else torch.uint8),
            scale_t,
            M,
            K,
            *x.stride(),
            **constants,
            WRITE_ROWS=of_rows,
            WRITE_COLS=of_cols,
            **options,
        )
    return outputs


def _checked(rows: int, cols: int) -> Block:
    if (rows, cols) not in _BLOCKS:
        raise ValueError(
            f"float8::cast_blockwise: no kernel casts blocks ({rows}, {cols}); use one of {_BLOCKS}"
        )
    return rows, cols


def _reference(
    x: Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    block_rows: int,
    block_cols: int,
    rows: bool,
    cols: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = _fake(x, dtype, power_of_two, block_rows, block_cols, rows, cols)
    for wanted, source, data, scale in ((rows, x, *outputs[:2]), (cols, x.t(), *outputs[2:])):
        if wanted:
            found = reference_rows(source, (block_rows, block_cols), dtype, power_of_two)
            data.copy_(found[0])
            scale.copy_(found[1])
    return outputs


def _fake(
    x: Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    block_rows: int,
    block_cols: int,
    rows: bool,
    cols: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    block = _checked(block_rows, block_cols)
    M, K = x.shape
    return (
        new_codes(x, M, K, rows, dtype),
        _new_scale(x, M, K, rows, block),
        new_codes(x, K, M, cols, dtype),
        _new_scale(x, K, M, cols, block),
    )


def _new_scale(x: Tensor, rows: int, cols: int, wanted: bool, block: Block) -> Tensor:
    """An empty scale of an operand (rows, cols), as cuBLASLt reads it."""
    down, across = scale_shape((rows, cols), block)
    if block[0] == 1:
        return new_codes(x, across, down, wanted, torch.float32).t()
    return new_codes(x, down, across, wanted, torch.float32)


cast_blockwise = register(
    "cast_blockwise(Tensor x, ScalarType dtype, bool power_of_two, int block_rows, int block_cols, "
    "bool rows, bool cols) -> (Tensor data, Tensor scale, Tensor data_t, Tensor scale_t)",
    kernel=_launch,
    reference=_reference,
    fake=_fake,
)


def shipped() -> list[Variant]:
    """The forms that the blockwise recipe launches on bfloat16."""
    return [
        _variant("1x128, rows and columns", False, True, True),
        _variant("1x128, rows", False, True, False),
        _variant("128x128, rows and columns", True, True, True),
        _variant("128x128, columns", True, False, True),
    ]


def _variant(what: str, square: bool, rows: bool, cols: bool) -> Variant:
    types = {
        "x_ptr": "*bf16",
        "data_ptr": "*u8",
        "scale_ptr": "*fp32",
        "data_t_ptr": "*i32" if cols else "*u8",
        "scale_t_ptr": "*fp32",
        **dict.fromkeys(("M", "K", "stride_m"), "i32"),
    }
    constants, options = _constants(square, torch.float8_e4m3fn, True, True)
    constants |= {"stride_k": 1, "WRITE_ROWS": rows, "WRITE_COLS": cols}
    return Variant(f"cast_blockwise, e4m3, {what}", _blocks_kernel, types, constants, options)
