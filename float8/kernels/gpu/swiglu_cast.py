"""`swiglu_cast`: the gate of a feed-forward layer, and the cast of its result; and its gradients.

``y = gate * sigmoid(gate) * up``, computed in float32 and rounded once, to the compute dtype. y is
never written: its float8 data is, row-major and transposed, as ``cast.py`` casts a matrix that
exists. Bytes per element of y, from bfloat16:

==================== =================== =========================== ============================
op, scale            bytes               silu, product, then cast    what it does
==================== =================== =========================== ============================
cast, given          4 + 1 + 1           2+2, 4+2 and 2+1+1          static, delayed; records amax
cast, None           4 + 4 + 1 + 1       2+2, 4+2 and 2+2+1+1        dynamic: reads twice
backward             6 + 4               at least 6 + 4              recomputes the sigmoid
==================== =================== =========================== ============================

With a ``limit`` the gate is clamped from above and up on both sides, before all else. A gradient is
0 where its operand is beyond the limit.

gate and up are matrices (M, F) of any row stride, such as the halves of one projection's (M, 2 F);
backward writes both gradients into one (M, 2 F), which is then the gradient of that projection.

Exponentials differ between implementations by a few ulps, and so may a code at a tie.

Of a copy's bandwidth 0.9 is predicted, but 0.84 for a given scale whose amax is recorded: gate, up
and y take 127 registers a thread, so that four programs are resident.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.kernels import definition
from float8.kernels.gpu.amax import new_partials
from float8.kernels.gpu.cast import Fused, fused_definition, fused_fake
from float8.kernels.gpu.jit import (
    PTX,
    amax_bits_of,
    magnitude_bits,
    place_of_tile,
    reciprocal,
    scale_of_tensor,
    scaled_4,
    tile_of_program,
    write_codes,
)
from float8.kernels.gpu.launch import (
    NO_FUSION,
    TRITON_DTYPES,
    check_device,
    launch,
    one_scale_arguments,
    register_op,
    row_major,
    tiles_of,
)

# 1024 programs of 40 registers a thread: eight on each multiprocessor of an H100, all at once.
_AMAX_TILE, _MAX_PARTIALS = {"ROWS": 16, "COLS": 128}, 1024
_TILE = {"ROWS_BY_4": 8, "COLS": 256}
_BACKWARD_TILE = {"ROWS": 16, "COLS": 128}
_OPTIONS = {"num_warps": 4, **NO_FUSION}


# 1 / (1 + 2^(gate * -log2 e)): an instruction each. Triton's own exponential and division also take
# subnormals, which makes three times as many: the amax pass would compute for longer than it reads.
_SIGMOID = tl.constexpr("""{
.reg .f32 t;
mul.rn.f32 t, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 t, t;
add.rn.f32 t, t, 0f3F800000;
rcp.approx.ftz.f32 $0, t;
}""")


@triton.jit
def _sigmoid(gate):
    """The sigmoid in float32.

    On an NVIDIA GPU it is 0 below 2^-126 (gate < -87.3), and its relative error is at most
    2^-21 + max(-gate, 0) * 2^-23. In units of the last place, of at most 2^-23, these are 2.5 of
    the exponential (2 from the rounded result: PTX ISA, ``ex2.approx``), 0.5 of the sum and 1 of
    the reciprocal (``rcp.approx``); and the rounding of the exponent, which an exponential
    multiplies.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            asm=_SIGMOID, constraints="=r,r", args=[gate], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / (1.0 + tl.exp(-gate))


@triton.jit
def _clamped(gate, up, limit):
    if limit is not None:  # tl.where and not tl.minimum, which takes the limit where x is NaN
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up


@triton.jit
def _y(gate_ptr, up_ptr, m, k, M, K, stride_gate, stride_up, limit, DTYPE: tl.constexpr):
    """A tile of y: rounded to DTYPE, in float32; 0 outside."""
    inside = (m < M)[:, None] & (k < K)[None, :]
    gate = tl.load(gate_ptr + m[:, None] * stride_gate + k[None, :], inside, 0.0).to(tl.float32)
    up = tl.load(up_ptr + m[:, None] * stride_up + k[None, :], inside, 0.0).to(tl.float32)
    gate, up = _clamped(gate, up, limit)
    return (gate * _sigmoid(gate) * up).to(DTYPE).to(tl.float32)


@triton.jit
def _amax_kernel(
    gate_ptr,
    up_ptr,
    partials_ptr,
    M,
    K,
    stride_gate,
    stride_up,
    limit,  # float32, or None
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTIALS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """partials[i] = bits of the amax of y in tiles i, i + PARTIALS, ...; 0 where there is none."""
    tiles_k = tl.cdiv(K, COLS)
    tiles = tl.cdiv(M, ROWS) * tiles_k
    bits = tl.zeros((ROWS, COLS), tl.int32)
    for tile in range(tl.program_id(0), tiles, PARTIALS):
        m = (tile // tiles_k).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        k = (tile % tiles_k).to(tl.int64) * COLS + tl.arange(0, COLS)
        y = _y(gate_ptr, up_ptr, m, k, M, K, stride_gate, stride_up, limit, DTYPE)
        bits = tl.maximum(bits, magnitude_bits(y))
    tl.store(partials_ptr + tl.program_id(0), tl.max(bits))


@triton.jit
def _cast_kernel(
    gate_ptr,
    up_ptr,
    given_ptr,  # the scale; None: it follows from the partial amaxes
    scale_ptr,  # written
    partials_ptr,  # amax bits (PARTIALS,)
    record_ptr,  # int32 bits of a running maximum, or None
    data_ptr,  # uint8 (M, K)
    data_t_ptr,  # uint8 (K, M); int32 of four bytes each where M is a multiple of 16; or None
    M,
    K,
    stride_gate,
    stride_up,
    limit,  # float32, or None
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    PARTIALS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    tile, _ = tile_of_program()
    first_m4, m, k = place_of_tile(tile, K, ROWS_BY_4, COLS)
    scale = scale_of_tensor(
        given_ptr, scale_ptr, partials_ptr, record_ptr, FORMAT_MAX, POWER_OF_TWO, PARTIALS
    )
    factor = reciprocal(scale, POWER_OF_TWO)
    # All loads before the first store, which none of them may overtake.
    ys = (
        _y(gate_ptr, up_ptr, m, k, M, K, stride_gate, stride_up, limit, DTYPE),
        _y(gate_ptr, up_ptr, m + 1, k, M, K, stride_gate, stride_up, limit, DTYPE),
        _y(gate_ptr, up_ptr, m + 2, k, M, K, stride_gate, stride_up, limit, DTYPE),
        _y(gate_ptr, up_ptr, m + 3, k, M, K, stride_gate, stride_up, limit, DTYPE),
    )
    scaled = scaled_4(ys, factor, FORMAT_MAX, given_ptr is None)
    write_codes(scaled, data_ptr, data_t_ptr, first_m4, k, M, M, 0, K, M, FORMAT)
    if record_ptr is not None and given_ptr is not None:
        tl.atomic_max(record_ptr, tl.max(amax_bits_of(ys)), sem="relaxed")


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
def gradients_of_tile(
    grad_ptr, gate_ptr, up_ptr, gate_scale_ptr, up_scale_ptr, m, k, M, K,
    stride_grad, stride_gate, stride_up, limit, DTYPE: tl.constexpr,
):  # fmt: skip
    """Tiles of y and of the gradients of gate and up: rounded to DTYPE, in float32; 0 outside."""
    grad = _in_float32(grad_ptr, None, m, k, M, K, stride_grad)
    gate = _in_float32(gate_ptr, gate_scale_ptr, m, k, M, K, stride_gate)
    up = _in_float32(up_ptr, up_scale_ptr, m, k, M, K, stride_up)
    most_gate, most_up = _clamped(gate, up, limit)
    sigmoid = _sigmoid(most_gate)
    y = most_gate * sigmoid * most_up
    grad_gate = grad * most_up * (sigmoid * (1.0 + most_gate * (1.0 - sigmoid)))
    grad_up = grad * (most_gate * sigmoid)
    if limit is not None:
        grad_gate = tl.where(gate > limit, 0.0, grad_gate)
        grad_up = tl.where(tl.abs(up) > limit, 0.0, grad_up)
    return (
        y.to(DTYPE).to(tl.float32),
        grad_gate.to(DTYPE).to(tl.float32),
        grad_up.to(DTYPE).to(tl.float32),
    )


@triton.jit
def _backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    out_ptr,  # (M, 2 K): the gradients of gate and of up
    M,
    K,
    stride_grad,
    stride_gate,
    stride_up,
    limit,  # float32, or None
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    pid = tl.program_id(0)
    tiles_k = tl.cdiv(K, COLS)
    m = (pid // tiles_k).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = (pid % tiles_k).to(tl.int64) * COLS + tl.arange(0, COLS)
    inside = (m < M)[:, None] & (k < K)[None, :]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    _, grad_gate, grad_up = gradients_of_tile(
        grad_ptr, gate_ptr, up_ptr, None, None, m, k, M, K,
        stride_grad, stride_gate, stride_up, limit, DTYPE,
    )  # fmt: skip
    out_ptrs = out_ptr + m[:, None] * (2 * K) + k[None, :]
    tl.store(out_ptrs, grad_gate.to(DTYPE), inside)
    tl.store(out_ptrs + K, grad_up.to(DTYPE), inside)


def _partial_amaxes(
    gate: Tensor, up: Tensor, dtype: torch.dtype, most: int = _MAX_PARTIALS,
    limit: float | None = None,
) -> Tensor:  # fmt: skip
    """int32 (P,), P a power of two: bits of amaxes whose maximum is that of y."""
    partials = new_partials(gate, tiles_of(gate.shape, _AMAX_TILE), most)
    count = partials.numel()
    launch(
        _amax_kernel, count, gate, up, partials, *gate.shape, gate.stride(0), up.stride(0),
        limit, **_AMAX_TILE, PARTIALS=count, DTYPE=TRITON_DTYPES[dtype], **_OPTIONS,
    )  # fmt: skip
    return partials


def _launch(
    gate: Tensor, up: Tensor, limit: float | None, scale: Tensor | None,
    compute_dtype: torch.dtype, dtype: torch.dtype, power_of_two: bool, cols: bool,
    finds_amax: bool = False,
) -> Fused:  # fmt: skip
    check_shapes("swiglu_cast", gate, up=up)
    check_device("swiglu_cast", gate, scale=scale)
    how = dtype, power_of_two, cols, finds_amax
    if gate.numel() == 0:
        return _definition(gate, up, limit, scale, compute_dtype, *how)
    gate, up = row_major(gate), row_major(up)
    outputs = fused_fake(gate, *how)
    record = outputs[3].zero_() if finds_amax else None
    partials = _partial_amaxes(gate, up, compute_dtype, limit=limit) if scale is None else None
    pointers, constants = one_scale_arguments(*outputs[:3], scale, partials, record, power_of_two)
    launch(
        _cast_kernel, tiles_of(gate.shape, _TILE), gate, up, *pointers,
        *gate.shape, gate.stride(0), up.stride(0), limit,
        **_TILE, **constants, DTYPE=TRITON_DTYPES[compute_dtype], **_OPTIONS,
    )  # fmt: skip
    return outputs


def _definition(
    gate: Tensor, up: Tensor, limit: float | None, scale: Tensor | None,
    compute_dtype: torch.dtype, *how: Any,
) -> Fused:  # fmt: skip
    y = definition.swiglu(gate, up, limit).to(compute_dtype)
    return fused_definition(y, scale, *how)


def _fake(
    gate: Tensor, up: Tensor, limit: float | None, scale: Tensor | None,
    compute_dtype: torch.dtype, *how: Any,
) -> Fused:  # fmt: skip
    return fused_fake(gate, *how)


def _launch_backward(grad: Tensor, gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    check_shapes("swiglu_backward", gate, up=up, grad=grad)
    out = _backward_fake(grad, gate, up)
    if gate.numel() == 0:
        return out
    grad, gate, up = row_major(grad), row_major(gate), row_major(up)
    launch(
        _backward_kernel, tiles_of(gate.shape, _BACKWARD_TILE), grad, gate, up, out,
        *gate.shape, grad.stride(0), gate.stride(0), up.stride(0), limit,
        **_BACKWARD_TILE, **_OPTIONS,
    )  # fmt: skip
    return out


def check_shapes(op: str, gate: Tensor, **others: Tensor) -> None:
    """Refuse tensors of other shapes than gate's, by which a kernel addresses all of them."""
    check_device(op, gate, **others)
    for name, other in others.items():
        if other.shape != gate.shape:
            raise ValueError(
                f"float8::{op}: {name} has shape {tuple(other.shape)} and gate {tuple(gate.shape)}"
            )


def _backward_fake(grad: Tensor, gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    return gate.new_empty((gate.shape[0], 2 * gate.shape[1]))


swiglu_cast = register_op(
    "swiglu_cast(Tensor gate, Tensor up, float? limit, Tensor? scale, ScalarType compute_dtype, "
    "ScalarType dtype, bool power_of_two, bool cols, bool finds_amax=False) "
    "-> (Tensor data, Tensor data_t, Tensor scale_out, Tensor amax)",
    kernel=_launch,
    definition=_definition,
    fake=_fake,
)
swiglu_backward = register_op(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up, float? limit=None) -> Tensor",
    kernel=_launch_backward,
    definition=definition.swiglu_backward,
    fake=_backward_fake,
)
