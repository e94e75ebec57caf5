"""`swiglu_cast`: the gate of a feed-forward, and the cast of its result.

``y = gate * sigmoid(gate) * up``, computed in float32 and rounded once, to gate's dtype. y is never
written: its float8 data is, with the bits of ``cast.py``. Bytes per element of y, from bfloat16:

====== ========== ======================= ==================================
scale  bytes      silu, product and cast  what it does
====== ========== ======================= ==================================
given  4 + 1      2+2, 4+2 and 2+1        static, delayed; records the amax
None   4 + 4 + 1  2+2, 4+2 and 2+2+1      dynamic: reads twice
====== ========== ======================= ==================================

gate and up are matrices (M, F) of any row stride, such as the halves of one projection's (M, 2 F).

Exponentials differ between implementations by a few ulps, and so may a code at a tie. Of a copy's
bandwidth 0.93 to 0.97 is predicted, and of the pass that finds the amax 0.90 to 0.92 (H200).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.kernels import definition
from float8.kernels.gpu.amax import new_partials
from float8.kernels.gpu.cast import fused_definition, fused_fake
from float8.kernels.gpu.jit import (
    PTX,
    convert_to_codes,
    magnitude_bits,
    reciprocal,
    scale_of_tensor,
    scaled,
    tile_of_program,
)
from float8.kernels.gpu.launch import (
    NO_FUSION,
    launch,
    one_scale_arguments,
    register_op,
    row_major,
    tiles_of,
)

_TILE = {"ROWS": 16, "COLS": 128}
# Of the amax pass: 40 registers a thread, so eight on each multiprocessor of an H100, all at once.
_MAX_PARTIALS = 1024
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
def sigmoid(gate):
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
def _tile_of_y(
    gate_ptr, up_ptr, tile, M, K, stride_gate, stride_up, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """A tile of y, counted along the rows: rounded, in float32; 0 outside. And rows, columns."""
    tiles_k = tl.cdiv(K, COLS)
    m = ((tile // tiles_k).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    k = ((tile % tiles_k).to(tl.int64) * COLS + tl.arange(0, COLS))[None, :]
    inside = (m < M) & (k < K)
    gate = tl.load(gate_ptr + m * stride_gate + k, inside, 0.0).to(tl.float32)
    up = tl.load(up_ptr + m * stride_up + k, inside, 0.0).to(tl.float32)
    y = gate * sigmoid(gate) * up
    return y.to(gate_ptr.dtype.element_ty).to(tl.float32), m, k


@triton.jit
def _amax_kernel(
    gate_ptr,
    up_ptr,
    partials_ptr,
    M,
    K,
    stride_gate,
    stride_up,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """partials[i] = bits of the amax of y in tiles i, i + PARTIALS, ...; 0 where there is none."""
    bits = tl.zeros((ROWS, COLS), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(M, ROWS) * tl.cdiv(K, COLS), PARTIALS):
        y, _, _ = _tile_of_y(gate_ptr, up_ptr, tile, M, K, stride_gate, stride_up, ROWS, COLS)
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
    M,
    K,
    stride_gate,
    stride_up,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTIALS: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    scale = scale_of_tensor(
        given_ptr, scale_ptr, partials_ptr, record_ptr, FORMAT_MAX, POWER_OF_TWO, PARTIALS
    )
    tile, _ = tile_of_program()
    y, m, k = _tile_of_y(gate_ptr, up_ptr, tile, M, K, stride_gate, stride_up, ROWS, COLS)
    codes = scaled(y, reciprocal(scale, POWER_OF_TWO), FORMAT_MAX, given_ptr is None)
    tl.store(data_ptr + m * K + k, convert_to_codes(codes, FORMAT), (m < M) & (k < K))
    if record_ptr is not None and given_ptr is not None:
        tl.atomic_max(record_ptr, tl.max(magnitude_bits(y)), sem="relaxed")


def _partial_amaxes(gate: Tensor, up: Tensor, most: int = _MAX_PARTIALS) -> Tensor:
    """int32 (P,), P a power of two: bits of amaxes whose maximum is that of y."""
    partials = new_partials(gate, tiles_of(gate.shape, _TILE), most)
    count = partials.numel()
    launch(
        _amax_kernel, count, gate, up, partials, *gate.shape, gate.stride(0), up.stride(0),
        **_TILE, PARTIALS=count, **_OPTIONS,
    )  # fmt: skip
    return partials


_Outputs = tuple[Tensor, Tensor, Tensor]  # data (M, F), scale and amax (1, 1)


def _launch(
    gate: Tensor, up: Tensor, scale: Tensor | None, dtype: torch.dtype, power_of_two: bool,
    finds_amax: bool = False,
) -> _Outputs:  # fmt: skip
    if gate.numel() == 0:
        return _definition(gate, up, scale, dtype, power_of_two, finds_amax)
    gate, up = row_major(gate), row_major(up)
    data, data_t, found, amax = fused_fake(gate, dtype, power_of_two, False, finds_amax)
    record = amax.zero_() if finds_amax else None
    partials = _partial_amaxes(gate, up) if scale is None else None
    (*pointers, _), constants = one_scale_arguments(
        data, data_t, found, scale, partials, record, power_of_two
    )
    launch(
        _cast_kernel, tiles_of(gate.shape, _TILE), gate, up, *pointers,
        *gate.shape, gate.stride(0), up.stride(0), **_TILE, **constants, **_OPTIONS,
    )  # fmt: skip
    return data, found, amax


def _definition(
    gate: Tensor, up: Tensor, scale: Tensor | None, dtype: torch.dtype, power_of_two: bool,
    finds_amax: bool = False,
) -> _Outputs:  # fmt: skip
    y = definition.swiglu(gate, up).to(gate.dtype)
    data, _, found, amax = fused_definition(y, scale, dtype, power_of_two, False, finds_amax)
    return data, found, amax


def _fake(
    gate: Tensor, up: Tensor, scale: Tensor | None, dtype: torch.dtype, power_of_two: bool,
    finds_amax: bool = False,
) -> _Outputs:  # fmt: skip
    data, _, found, amax = fused_fake(gate, dtype, power_of_two, False, finds_amax)
    return data, found, amax


swiglu_cast = register_op(
    "swiglu_cast(Tensor gate, Tensor up, Tensor? scale, ScalarType dtype, bool power_of_two, "
    "bool finds_amax=False) -> (Tensor data, Tensor scale_out, Tensor amax)",
    kernel=_launch,
    definition=_definition,
    fake=_fake,
)
