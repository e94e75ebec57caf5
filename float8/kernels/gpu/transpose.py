"""`transpose`: the transpose of a float8 matrix, as a copy.

For float8 data that a second GEMM contracts the other way: a gathered weight, an activation that
arrived in float8. 4 rows of bytes are packed into an int32 in registers (see ``jit.py``), and the
copy moves words. 2 bytes per element: one read, one written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.kernels.gpu.jit import load_4_rows, pack_4, place_of_tile, store_packed, tile_of_program
from float8.kernels.gpu.launch import (
    NO_FUSION,
    launch,
    new_data,
    pointer,
    register_op,
    tiles_of,
)

_TILE = {"ROWS_BY_4": 16, "COLS": 128}
_OPTIONS = {"num_warps": 4, **NO_FUSION}


@triton.jit
def _transpose_kernel(
    data_ptr,  # uint8 (M, K)
    data_t_ptr,  # uint8 (K, M); int32 of four bytes each where M is a multiple of 16
    M,
    K,
    stride_m,
    stride_k,
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
):
    tile, _ = tile_of_program()
    first_m4, m, k = place_of_tile(tile, K, ROWS_BY_4, COLS)
    codes = load_4_rows(data_ptr, m, k, M, K, stride_m, stride_k)
    if data_t_ptr.dtype.element_ty == tl.int32:
        packed = pack_4(codes)
        store_packed(data_t_ptr, packed, first_m4, k, M, 0, K, M)
    else:
        for i in tl.static_range(4):
            inside = (m + i < M)[:, None] & (k < K)[None, :]
            tl.store(data_t_ptr + k[None, :] * M + (m + i)[:, None], codes[i], inside)


def _launch(data: Tensor) -> Tensor:
    M, K = data.shape
    out = _fake(data)
    if data.numel() == 0:
        return out
    launch(
        _transpose_kernel, tiles_of(data.shape, _TILE), data.view(torch.uint8),
        pointer(out, M % 16 == 0), M, K, *data.stride(), **_TILE, **_OPTIONS,
    )  # fmt: skip
    return out


def _definition(data: Tensor) -> Tensor:
    # As bytes: copies of some strides are not defined for float8. A clone, never an alias.
    codes = data.view(torch.uint8).t()
    return codes.clone(memory_format=torch.contiguous_format).view(data.dtype)


def _fake(data: Tensor) -> Tensor:
    return new_data(data, data.shape[1], data.shape[0], True, data.dtype)


transpose = register_op(
    "transpose(Tensor data) -> Tensor", kernel=_launch, definition=_definition, fake=_fake
)
