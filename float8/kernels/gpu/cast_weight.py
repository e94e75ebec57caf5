"""`cast_weight`: the tensorwise float8 weight that follows from its scaled float16 master.

The optimizer step writes the amax of the new master (``optimizer_step.py``), so one pass is enough:
2 bytes read and 1 written per element, and no float32 copy of the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import WHOLE, ceil_div
from float8.kernels import definition, moments
from float8.kernels.gpu.jit import convert_to_codes, reciprocal, scale_from_amax
from float8.kernels.gpu.launch import (
    NO_FUSION,
    TRITON_FORMATS,
    check_device,
    launch,
    pointer,
    register_op,
)
from float8.kernels.gpu.moments import load_state, positions

_ELEMENTS = 2048  # of a program
_OPTIONS = {"num_warps": 4, **NO_FUSION}


@triton.jit
def _cast_weight_kernel(
    master_ptr,
    master_scale_ptr,
    amax_ptr,  # int32 bits
    data_ptr,  # uint8
    scale_ptr,
    found_inf_ptr,
    R,
    C,
    stride_r,
    stride_c,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FLAT: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    N = tl.full((), 1, tl.int64) * R * tl.cdiv(C, GROUP)  # R may be a constant, without .to()
    if found_inf_ptr is not None:
        N = tl.where(tl.load(found_inf_ptr) == 0, N, 0)
    at, inside, _, row, col = positions(n, N, C, GROUP, FLAT)
    data_at = at if FLAT else row * stride_r + col * stride_c
    x = load_state(master_ptr, master_scale_ptr, None, at, inside, n, N)
    amax = tl.load(amax_ptr).to(tl.float32, bitcast=True)
    scale = scale_from_amax(amax, FORMAT_MAX, False)
    tl.store(data_ptr + data_at, convert_to_codes(x * reciprocal(scale), FORMAT), inside)
    tl.store(scale_ptr, scale, (tl.program_id(0) == 0) & (N > 0))


def _launch(
    master: Tensor, master_scale: Tensor, data: Tensor, scale: Tensor, group: int, amax: Tensor,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    if master.numel() == 0:
        return
    check_device("cast_weight", master, data=data, scale=scale, amax=amax, found_inf=found_inf)
    R, C = master.shape
    groups = max(1, _ELEMENTS // group)
    launch(
        _cast_weight_kernel, ceil_div(R * ceil_div(C, group), groups),
        master, master_scale, amax.view(torch.int32), pointer(data), scale,
        found_inf, R, C, *data.stride(),
        GROUPS=groups, GROUP=group, FLAT=C % group == 0 and data.is_contiguous(),
        FORMAT=TRITON_FORMATS[data.dtype], FORMAT_MAX=torch.finfo(data.dtype).max,
        **_OPTIONS,
    )  # fmt: skip


def _definition(
    master: Tensor, master_scale: Tensor, data: Tensor, scale: Tensor, group: int, amax: Tensor,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    x = moments.decode_groups(master, master_scale, group)
    new_scale = definition.scale_from_amax(amax.reshape(1, 1), torch.finfo(data.dtype).max)
    new_data = definition.cast_by_scale(x, new_scale, (WHOLE, WHOLE), data.dtype)
    if found_inf is None or found_inf.item() == 0:
        data.copy_(new_data)
        scale.copy_(new_scale.view(scale.shape))


cast_weight_op = register_op(
    "cast_weight(Tensor master, Tensor master_scale, Tensor(a!) data, Tensor(b!) scale, int group, "
    "Tensor amax, Tensor? found_inf=None) -> ()",
    kernel=_launch,
    definition=_definition,
    fake=lambda *_: None,
)
