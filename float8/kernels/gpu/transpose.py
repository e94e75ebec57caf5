"""`transpose`: the transpose of a float8 matrix, as a copy.

For codes that exist already and that a second GEMM contracts the other way: a gathered weight, an
activation that arrived in float8. Codes are bytes; 4 rows are packed into an int32 in registers as
in ``cast.py``, and the copy moves words. 2 bytes per element: one read, one written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.kernels.gpu.jit import pack_4
from float8.kernels.gpu.launch import NO_FUSION, Variant, new_codes, on_device_of, register
from float8.kernels.gpu.tiles import load_4_rows, store_packed

_TILE = {"ROWS_BY_4": 16, "COLS": 128}
_OPTIONS = {"num_warps": 4, **NO_FUSION}


@triton.jit
def _transpose_kernel(
    data_ptr,  # uint8 (M, K)
    data_t_ptr,  # uint8 (K, M); int32 where PACK
    M,
    K,
    stride_m,
    stride_k,
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    PACK: tl.constexpr,  # M is a multiple of 16
):
    pid = tl.program_id(0)
    tiles_k = tl.cdiv(K, COLS)
    first_m4 = (pid // tiles_k).to(tl.int64) * ROWS_BY_4
    m = (first_m4 + tl.arange(0, ROWS_BY_4)) * 4
    k = (pid % tiles_k).to(tl.int64) * COLS + tl.arange(0, COLS)
    codes = load_4_rows(data_ptr, m, k, M, K, stride_m, stride_k)
    if PACK:
        packed = pack_4(codes[0], codes[1], codes[2], codes[3])
        store_packed(data_t_ptr, packed, first_m4, k, M, K)
    else:
        for i in tl.static_range(4):
            inside = (m + i < M)[:, None] & (k < K)[None, :]
            tl.store(data_t_ptr + k[None, :] * M + (m + i)[:, None], codes[i], inside)


def _launch(data: Tensor) -> Tensor:
    M, K = data.shape
    out = new_codes(data, K, M, True, data.dtype)
    if data.numel() == 0:
        return out
    pack = M % 16 == 0
    codes = out.view(torch.uint8)
    grid = (triton.cdiv(M, 4 * _TILE["ROWS_BY_4"]) * triton.cdiv(K, _TILE["COLS"]),)
    with on_device_of(data):
        _transpose_kernel[grid](
            data.view(torch.uint8),
            codes.view(torch.int32) if pack else codes,
            M,
            K,
            *data.stride(),
            **_TILE,
            PACK=pack,
            **_OPTIONS,
        )
    return out


transpose = register(
    "transpose(Tensor data) -> Tensor",
    kernel=_launch,
    # As bytes: copies of some strides are not defined for float8. A clone, never an alias.
    reference=lambda data: (
        data.view(torch.uint8).t().clone(memory_format=torch.contiguous_format).view(data.dtype)
    ),
    fake=lambda data: new_codes(data, data.shape[1], data.shape[0], True, data.dtype),
)


def shipped() -> list[Variant]:
    """The form that the recipes launch."""
    types = {"data_ptr": "*u8", "data_t_ptr": "*i32", "M": "i32", "K": "i32", "stride_m": "i32"}
    constants = {"stride_k": 1, **_TILE, "PACK": True}
    return [Variant("transpose", _transpose_kernel, types, constants, _OPTIONS)]
