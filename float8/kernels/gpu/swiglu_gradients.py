"""`swiglu_gradients`: the backward of a SwiGLU between float8 layers, and its three casts.

It follows a GEMM and precedes four. grad_y (M, F) is the result of grad_input of the down
projection. The gradients of gate and up are operands of two GEMMs each, and so are written in both
orientations. The transpose of y itself, which the weight gradient of the down projection reads, is
cast again here, by the scale of forward: gate and up are read anyway, and nothing of y is kept
between forward and backward. Bytes per element of y, from bfloat16:

========== ==================== ============================ ===================================
scales     bytes                gradients, then casts        what it does
========== ==================== ============================ ===================================
given      6 + 4 + 1            6 + 4, 4 + 4                 static, delayed; finds the amaxes
None       6 + 6 + 4 + 1        6 + 4, 4, 4 + 4              dynamic: reads twice
========== ==================== ============================ ===================================

Gate and up are two layers with scales of their own, or the two halves of one layer's output,
``joined``, with one scale:

======== ================== ============== ======================
result   two layers         one            what it is
======== ================== ============== ======================
y_t      (F, M)             (F, M)         y, transposed
data     (2, M, F)          (M, 2 F)       the gradients
data_t   (2, F, M)          (2 F, M)       their transposes
scale    (2, 1, 1)          (1, 1)         theirs
amax     (2, 1, 1)          (1, 1)         theirs, if asked for
======== ================== ============== ======================

gate and up may be float8 copies, E4M3 in groups of 128 of a row, which have ``gate_groups`` and
``up_groups`` as scales: two bytes less per element, for each time that they are read.

All values are computed in float32 and rounded once to the dtype of grad_y, as in `swiglu_cast`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.kernels import definition
from float8.kernels.gpu.amax import partials_of
from float8.kernels.gpu.cast import fused_definition
from float8.kernels.gpu.jit import (
    amax_bits_of,
    magnitude_bits,
    place_of_tile,
    reciprocal,
    scale_of_tensor,
    scaled_4,
    tile_of_program,
    transposed_stride,
    write_codes,
)
from float8.kernels.gpu.launch import (
    NO_FUSION,
    TRITON_FORMATS,
    format_constants,
    launch,
    new_data,
    pointer,
    register_op,
    row_major,
    tiles_of,
)
from float8.kernels.gpu.swiglu_cast import sigmoid
from float8.kernels.matrix import BY_128, TENSOR

_AMAX_TILE, _MAX_PARTIALS = {"ROWS": 8, "COLS": 128}, 1024
_TILE = {"ROWS_BY_4": 8, "COLS": 64}
_WARPS = 2  # a thread has 8 adjacent elements of a row


@triton.jit
def _in_float32(ptr, scale_ptr, m, k, M, K, stride):
    """A tile of gate or up, 0 outside: of a matrix, or of float8 copies in groups of 128 of a row.

    A tile of copies is inside one column of groups. ``scale_ptr`` is float32 (M, groups), strides
    (1, M), or None.
    """
    inside = (m < M)[:, None] & (k < K)[None, :]
    x = tl.load(ptr + m[:, None] * stride + k[None, :], inside, 0)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + (tl.min(k, 0) // 128) * M.to(tl.int64) + m, m < M, 0.0)
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    return x.to(tl.float32)


@triton.jit
def _gradients_of_tile(pointers, strides, m, k, M, K):
    """Tiles of y and of the gradients of gate and up, rounded, in float32; 0 outside.

    ``pointers`` are those of grad, gate and up, and of the scales of gate and up.
    """
    grad = _in_float32(pointers[0], None, m, k, M, K, strides[0])
    gate = _in_float32(pointers[1], pointers[3], m, k, M, K, strides[1])
    up = _in_float32(pointers[2], pointers[4], m, k, M, K, strides[2])
    s = sigmoid(gate)
    y = gate * s * up
    grad_gate = grad * up * (s * (1.0 + gate * (1.0 - s)))
    grad_up = grad * (gate * s)
    DTYPE: tl.constexpr = pointers[0].dtype.element_ty
    return (
        y.to(DTYPE).to(tl.float32),
        grad_gate.to(DTYPE).to(tl.float32),
        grad_up.to(DTYPE).to(tl.float32),
    )


@triton.jit
def _amax_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    gate_groups_ptr,  # the scales of copies, see `_in_float32`; or None
    up_groups_ptr,
    partials_ptr,  # those of gate, then those of up
    M,
    K,
    stride_grad,
    stride_gate,
    stride_up,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """partials[i] = bits of the amax of tiles i, i + PARTIALS, ...; 0 where there is none."""
    pointers = grad_ptr, gate_ptr, up_ptr, gate_groups_ptr, up_groups_ptr
    strides = stride_grad, stride_gate, stride_up
    tiles_k = tl.cdiv(K, COLS)
    tiles = tl.cdiv(M, ROWS) * tiles_k
    gate_bits = tl.zeros((ROWS, COLS), tl.int32)
    up_bits = tl.zeros((ROWS, COLS), tl.int32)
    for tile in range(tl.program_id(0), tiles, PARTIALS):
        m = (tile // tiles_k).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        k = (tile % tiles_k).to(tl.int64) * COLS + tl.arange(0, COLS)
        _, gate, up = _gradients_of_tile(pointers, strides, m, k, M, K)
        gate_bits = tl.maximum(gate_bits, magnitude_bits(gate))
        up_bits = tl.maximum(up_bits, magnitude_bits(up))
    tl.store(partials_ptr + tl.program_id(0), tl.max(gate_bits))
    tl.store(partials_ptr + PARTIALS + tl.program_id(0), tl.max(up_bits))


@triton.jit
def _cast_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    gate_groups_ptr,  # as above
    up_groups_ptr,
    y_scale_ptr,
    gate_given_ptr,  # the scale; None: it follows from the partial amaxes
    up_given_ptr,
    scale_ptr,  # written
    partials_ptr,  # amax bits: those of gate, then those of up
    record_ptr,  # int32 bits of running maxima, or None
    y_t_ptr,  # uint8 (K, M); int32 of four bytes each where M is a multiple of 16; or None
    data_ptr,  # uint8
    data_t_ptr,  # as y_t
    M,
    K,
    stride_grad,
    stride_gate,
    stride_up,
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    JOINED: tl.constexpr,
    PARTIALS: tl.constexpr,  # of each of the two, or of both if joined
    Y_FORMAT: tl.constexpr,
    Y_FORMAT_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    tile, _ = tile_of_program()
    first_m4, m, k = place_of_tile(tile, K, ROWS_BY_4, COLS)
    gate_scale = scale_of_tensor(
        gate_given_ptr, scale_ptr, partials_ptr, record_ptr, FORMAT_MAX, POWER_OF_TWO, PARTIALS
    )
    up_scale, up_record_ptr, M64 = gate_scale, record_ptr, tl.cast(M, tl.int64)
    up_offset = K if JOINED else M64 * K
    if not JOINED:
        if record_ptr is not None:
            up_record_ptr += 1
        if partials_ptr is not None:
            partials_ptr += PARTIALS
        up_scale = scale_of_tensor(
            up_given_ptr, scale_ptr + 1, partials_ptr, up_record_ptr,
            FORMAT_MAX, POWER_OF_TWO, PARTIALS,
        )  # fmt: skip
    pointers = grad_ptr, gate_ptr, up_ptr, gate_groups_ptr, up_groups_ptr
    strides = stride_grad, stride_gate, stride_up
    # All loads before the first store, which none of them may overtake.
    y0, gate0, up0 = _gradients_of_tile(pointers, strides, m, k, M, K)
    y1, gate1, up1 = _gradients_of_tile(pointers, strides, m + 1, k, M, K)
    y2, gate2, up2 = _gradients_of_tile(pointers, strides, m + 2, k, M, K)
    y3, gate3, up3 = _gradients_of_tile(pointers, strides, m + 3, k, M, K)
    if y_t_ptr is not None:
        factor = reciprocal(tl.load(y_scale_ptr))
        ys = scaled_4((y0, y1, y2, y3), factor, Y_FORMAT_MAX, False)
        write_codes(ys, None, y_t_ptr, first_m4, k, M, M, 0, K, M, Y_FORMAT)
    gates, ups = (gate0, gate1, gate2, gate3), (up0, up1, up2, up3)
    FITS: tl.constexpr = gate_given_ptr is None
    factor = reciprocal(gate_scale, POWER_OF_TWO)
    codes = scaled_4(gates, factor, FORMAT_MAX, FITS)
    write_codes(codes, data_ptr, data_t_ptr, first_m4, k, M, M, 0, K, M, FORMAT, JOINED)
    if data_t_ptr is not None:
        data_t_ptr += K * transposed_stride(data_t_ptr, M64)
    factor = reciprocal(up_scale, POWER_OF_TWO)
    codes = scaled_4(ups, factor, FORMAT_MAX, FITS)
    data_ptr += up_offset
    write_codes(codes, data_ptr, data_t_ptr, first_m4, k, M, M, 0, K, M, FORMAT, JOINED)
    if record_ptr is not None and gate_given_ptr is not None:
        tl.atomic_max(record_ptr, tl.max(amax_bits_of(gates)), sem="relaxed")
        tl.atomic_max(up_record_ptr, tl.max(amax_bits_of(ups)), sem="relaxed")


def _partial_amaxes(
    grad: Tensor, gate: Tensor, up: Tensor, gate_groups: Tensor | None = None,
    up_groups: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """int32 (2, P), P a power of two: bits of amaxes, whose maxima are those of the gradients."""
    count = partials_of(tiles_of(gate.shape, _AMAX_TILE), _MAX_PARTIALS)
    partials = torch.empty((2, count), dtype=torch.int32, device=gate.device)
    launch(
        _amax_kernel, count, grad, pointer(gate), pointer(up), gate_groups, up_groups, partials,
        *gate.shape, grad.stride(0), gate.stride(0), up.stride(0),
        **_AMAX_TILE, PARTIALS=count, num_warps=4, **NO_FUSION,
    )  # fmt: skip
    return partials


class Gradients(NamedTuple):
    """The results; those that are not wanted have no elements."""

    y_t: Tensor
    data: Tensor
    data_t: Tensor
    scale: Tensor
    amax: Tensor


def _launch(
    grad: Tensor, gate: Tensor, up: Tensor, y_scale: Tensor, gate_scale: Tensor | None,
    up_scale: Tensor | None, y_dtype: torch.dtype, dtype: torch.dtype, power_of_two: bool,
    joined: bool, y_cols: bool, cols: bool, finds_amax: bool, gate_groups: Tensor | None = None,
    up_groups: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    how = y_dtype, dtype, power_of_two, joined, y_cols, cols, finds_amax, gate_groups, up_groups
    if gate.numel() == 0:
        return _definition(grad, gate, up, y_scale, gate_scale, up_scale, *how)
    out = _empty(gate, y_dtype, dtype, joined, y_cols, cols, finds_amax)
    grad, gate, up = row_major(grad), row_major(gate), row_major(up)
    strides = grad.stride(0), gate.stride(0), up.stride(0)
    if gate_groups is not None and up_groups is not None:
        gate_groups, up_groups = gate_groups.t().contiguous(), up_groups.t().contiguous()
    partials, count = None, 0
    if gate_scale is None:
        partials = _partial_amaxes(grad, gate, up, gate_groups, up_groups)
        count = partials.numel() if joined else partials.shape[1]
    record = out.amax.zero_().view(torch.int32) if finds_amax else None
    words = gate.shape[0] % 16 == 0
    launch(
        _cast_kernel, tiles_of(gate.shape, _TILE), grad, pointer(gate), pointer(up), gate_groups,
        up_groups, y_scale, gate_scale, up_scale, out.scale, partials, record,
        pointer(out.y_t, words), pointer(out.data), pointer(out.data_t, words),
        *gate.shape, *strides,
        **_TILE, JOINED=joined, PARTIALS=count,
        Y_FORMAT=TRITON_FORMATS[y_dtype], Y_FORMAT_MAX=torch.finfo(y_dtype).max,
        **format_constants(dtype, power_of_two and gate_scale is None),
        num_warps=_WARPS, **NO_FUSION,
    )  # fmt: skip
    return tuple(out)


def _definition(
    grad: Tensor, gate: Tensor, up: Tensor, y_scale: Tensor, gate_scale: Tensor | None,
    up_scale: Tensor | None, y_dtype: torch.dtype, dtype: torch.dtype, power_of_two: bool,
    joined: bool, y_cols: bool, cols: bool, finds_amax: bool, gate_groups: Tensor | None = None,
    up_groups: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = _empty(gate, y_dtype, dtype, joined, y_cols, cols, finds_amax)
    if gate_groups is not None and up_groups is not None:
        gate = definition.dequantize(gate, gate_groups, BY_128, grad.dtype)
        up = definition.dequantize(up, up_groups, BY_128, grad.dtype)
    if y_cols:
        y = definition.swiglu(gate, up).to(gate.dtype)
        out.y_t.copy_(definition.cast_by_scale(y.t(), y_scale, TENSOR, y_dtype))
    both = definition.swiglu_gradients(grad, gate, up)
    parts = [both] if joined else both.chunk(2, 1)
    for i, (g, given) in enumerate(zip(parts, (gate_scale, up_scale), strict=False)):
        found = fused_definition(g, given, dtype, power_of_two, cols, finds_amax)
        for t, value in zip(out[1:], found, strict=True):
            if t.numel():
                (t if joined else t[i]).copy_(value)
    return tuple(out)


def _empty(
    gate: Tensor, y_dtype: torch.dtype, dtype: torch.dtype, joined: bool, y_cols: bool, cols: bool,
    finds_amax: bool,
) -> Gradients:  # fmt: skip
    M, F = gate.shape
    stack = gate.new_empty(()) if joined else gate.new_empty(2, 0, 0)
    width = 2 * F if joined else F
    scale = new_data(stack, 1, 1, True, torch.float32)
    return Gradients(
        new_data(gate, F, M, y_cols, y_dtype),
        new_data(stack, M, width, True, dtype),
        new_data(stack, width, M, cols, dtype),
        scale,
        torch.empty_like(scale) if finds_amax else scale.new_empty(0, 0),
    )


def _fake(
    grad: Tensor, gate: Tensor, up: Tensor, y_scale: Tensor, gate_scale: Tensor | None,
    up_scale: Tensor | None, y_dtype: torch.dtype, dtype: torch.dtype, power_of_two: bool,
    *wanted_and_groups: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(_empty(gate, y_dtype, dtype, *wanted_and_groups[:4]))


swiglu_gradients = register_op(
    "swiglu_gradients(Tensor grad, Tensor gate, Tensor up, Tensor y_scale, Tensor? gate_scale, "
    "Tensor? up_scale, ScalarType y_dtype, ScalarType dtype, bool power_of_two, bool joined, "
    "bool y_cols, bool cols, bool finds_amax, Tensor? gate_groups=None, Tensor? up_groups=None) "
    "-> (Tensor y_t, Tensor data, Tensor data_t, Tensor scale, Tensor amax)",
    kernel=_launch,
    definition=_definition,
    fake=_fake,
)
