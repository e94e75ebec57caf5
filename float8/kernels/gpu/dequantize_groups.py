"""`dequantize_groups`: float8 data in groups of a row, back in high precision, in one launch.

The data (R, C) is row-major. The scale, uint8 (R, ceil(C / group)) of any strides, is the exponent
field of a float32 that is a power of two, as `float8.activations` saves it. The product is computed
in float32 and rounded once. With bfloat16, 1 + 2 bytes per element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import ceil_div
from float8.kernels import definition
from float8.kernels.gpu.launch import NO_FUSION, launch, register_op

_ROWS = 32  # by 128 columns: a thread has 32 elements


@triton.jit
def _dequantize_kernel(
    data_ptr,
    scale_ptr,
    out_ptr,
    R,
    C,
    stride_r,
    stride_g,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    groups = tl.cdiv(C, GROUP)
    tile = tl.program_id(0).to(tl.int64)
    row = tile // groups * ROWS + tl.arange(0, ROWS)
    group = tile % groups
    col = group * GROUP + tl.arange(0, GROUP)
    at = row[:, None] * C + col[None, :]
    inside = (row < R)[:, None] & (col < C)[None, :]
    exponent = tl.load(scale_ptr + row * stride_r + group * stride_g, row < R, 0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    x = tl.load(data_ptr + at, inside, 0.0).to(tl.float32) * scale[:, None]
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), inside)


def _launch(data: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    out = _fake(data, scale, group, dtype)
    R, C = data.shape
    if data.numel():
        tiles = ceil_div(R, _ROWS) * ceil_div(C, group)
        launch(
            _dequantize_kernel, tiles, data, scale, out, R, C, *scale.stride(),
            ROWS=_ROWS, GROUP=group, num_warps=4, **NO_FUSION,
        )  # fmt: skip
    return out


def _definition(data: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    scale = (scale.to(torch.int32) << 23).view(torch.float32)
    return definition.dequantize(data, scale, (1, group), dtype)


def _fake(data: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(data.shape, dtype=dtype, device=data.device)


dequantize_groups = register_op(
    "dequantize_groups(Tensor data, Tensor scale, int group, ScalarType dtype) -> Tensor",
    kernel=_launch,
    definition=_definition,
    fake=_fake,
)
