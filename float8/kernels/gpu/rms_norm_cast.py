"""`rms_norm_cast`: normalise rows by their root mean square, and cast, in one op.

``y = (x * rstd) * weight`` with ``rstd = 1 / sqrt(mean(x^2) + eps)`` per row, in float32 and
rounded once, to the compute dtype. y is never written: its codes are, row-major and transposed, as
``cast.py`` casts a matrix that exists. From bfloat16:

====== =================== ================= ==============================================
scale  bytes per element   norm, then cast
====== =================== ================= ==============================================
given  2 + 1 + 1           2 + 2 and 2+1+1   static, delayed; records the amax of y
None   2 + 2 + 1 + 1       2 + 2 and 2+2+1+1 dynamic: a first pass finds rstd and the amax
====== =================== ================= ==============================================

Two kernels. `_rows_kernel` takes 4 rows at a time, for rstd and, if wanted, the amax of y; the
second look at a row hits the cache. `_cast_kernel` writes codes: tile by tile, with an rstd that is
there already, or by whole rows (OWN): a program sums the squares of its 16 rows and walks back over
them, so that what was read last, and is in the cache, is read first. That is the one pass, and it
needs rows enough to fill the GPU; of fewer the L2 cache holds x for the second launch instead.

Given rstd the bits are the reference's; rstd itself depends on the order of a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.kernels import reference
from float8.kernels.gpu.amax import MAX_PARTIALS
from float8.kernels.gpu.cast import cast, cast_dynamic
from float8.kernels.gpu.jit import magnitude_bits, reciprocal
from float8.kernels.gpu.launch import (
    NO_FUSION,
    TRITON_DTYPES,
    TRITON_FORMATS,
    Variant,
    check_device,
    new_codes,
    on_device_of,
    register,
)
from float8.kernels.gpu.tiles import amax_bits_of, scale_of_tensor, write_codes

_ROWS = {"ROWS": 4, "COLS": 1024}
_TILE = {"ROWS_BY_4": 16, "COLS": 128}  # of cast.py
_OWN_TILE = {"ROWS_BY_4": 4, "COLS": 512}
_OPTIONS = {"num_warps": 4, **NO_FUSION}
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]  # data, data_t, scale, rstd
# Programs of whole rows that fill a GPU: about two per multiprocessor of an H100.
_ENOUGH = 256


@triton.jit
def _store_rstd(
    x_ptr, rstd_ptr, first_m, M, K, stride_m, eps, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """1 / sqrt(mean(x^2) + eps) of ROWS rows; float32, correctly rounded but for the sum."""
    m = first_m + tl.arange(0, ROWS)
    squares = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, K, COLS):
        k = first + tl.arange(0, COLS)
        inside = (m < M)[:, None] & (k < K)[None, :]
        x_ptrs = x_ptr + m[:, None] * stride_m + k[None, :]
        x = tl.load(x_ptrs, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
        squares += x * x
    mean = tl.div_rn(tl.sum(squares, 1), K * 1.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd_ptr + m, rstd, m < M)
    return rstd


@triton.jit
def _y(x_ptr, w, rstd, m, k, M, K, stride_m, DTYPE: tl.constexpr, POLICY: tl.constexpr):
    """A tile of y, rows m and columns k: rounded to DTYPE, in float32; 0 outside."""
    inside = (m < M)[:, None] & (k < K)[None, :]
    x_ptrs = x_ptr + m[:, None] * stride_m + k[None, :]
    x = tl.load(x_ptrs, inside, 0.0, eviction_policy=POLICY).to(tl.float32)
    y = (x * rstd[:, None]) * w.to(tl.float32)[None, :]
    return tl.where(inside, y, 0.0).to(DTYPE).to(tl.float32)


@triton.jit
def _known_y(x_ptr, w, rstd_ptr, m, k, M, K, stride_m, DTYPE: tl.constexpr):
    """`_y` of rows whose rstd is in memory, read for the last time."""
    rstd = tl.load(rstd_ptr + m, m < M, 0.0)
    return _y(x_ptr, w, rstd, m, k, M, K, stride_m, DTYPE, "evict_first")


@triton.jit
def _rows_kernel(
    x_ptr,
    weight_ptr,
    rstd_ptr,  # float32 (M,), written
    partials_ptr,  # int32 (PARTIALS,), written where AMAX
    M,
    K,
    stride_m,
    eps,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTIALS: tl.constexpr,
    DTYPE: tl.constexpr,
    AMAX: tl.constexpr,
):
    """rstd of all rows; partials[i] = bits of the amax of y in blocks i, i + PARTIALS, ..."""
    bits = tl.zeros((ROWS, COLS), tl.int32)
    for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(M, ROWS), PARTIALS):
        first_m = block * ROWS
        m = first_m + tl.arange(0, ROWS)
        rstd = _store_rstd(x_ptr, rstd_ptr, first_m, M, K, stride_m, eps, ROWS, COLS)
        if AMAX:
            for first in range(0, K, COLS):
                k = first + tl.arange(0, COLS)
                w = tl.load(weight_ptr + k, k < K, 0.0)
                y = _y(x_ptr, w, rstd, m, k, M, K, stride_m, DTYPE, "evict_last")
                bits = tl.maximum(bits, magnitude_bits(y))
    if AMAX:
        tl.store(partials_ptr + tl.program_id(0), tl.max(bits))


@triton.jit
def _cast_kernel(
    x_ptr,
    weight_ptr,
    rstd_ptr,  # float32 (M,); written where OWN
    given_ptr,  # the scale; unused where PARTIALS
    scale_ptr,  # written
    partials_ptr,  # amax bits (PARTIALS,); unused where PARTIALS is 0
    data_ptr,  # uint8 (M, K)
    data_t_ptr,  # uint8 (K, M); int32 where PACK
    amax_ptr,  # int32 bits of a running maximum
    M,
    K,
    stride_m,
    eps,
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    OWN: tl.constexpr,  # a program has whole rows, and computes their rstd
    PARTIALS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WRITE_COLS: tl.constexpr,
    RECORD: tl.constexpr,
    PACK: tl.constexpr,  # M is a multiple of 16
):
    pid = tl.program_id(0)
    chunks = tl.cdiv(K, COLS)
    scale = scale_of_tensor(
        given_ptr, scale_ptr, partials_ptr, amax_ptr,
        FORMAT_MAX, POWER_OF_TWO, PARTIALS, RECORD, True,
    )  # fmt: skip
    factor = reciprocal(scale, POWER_OF_TWO and PARTIALS > 0)

    if OWN:
        first_m4 = pid.to(tl.int64) * ROWS_BY_4
        _store_rstd(x_ptr, rstd_ptr, first_m4 * 4, M, K, stride_m, eps, 4 * ROWS_BY_4, COLS)
        tl.debug_barrier()  # the threads of this program read it below
        steps = chunks
        last_k = (chunks - 1) * COLS
    else:
        first_m4 = (pid // chunks).to(tl.int64) * ROWS_BY_4
        steps = 1
        last_k = (pid % chunks) * COLS
    m = (first_m4 + tl.arange(0, ROWS_BY_4)) * 4
    seen = tl.zeros((ROWS_BY_4, COLS), tl.int32)
    for step in range(steps):
        k = last_k - step * COLS + tl.arange(0, COLS)
        w = tl.load(weight_ptr + k, k < K, 0.0)
        # All loads before the first store, which none of them may overtake.
        ys = (
            _known_y(x_ptr, w, rstd_ptr, m, k, M, K, stride_m, DTYPE),
            _known_y(x_ptr, w, rstd_ptr, m + 1, k, M, K, stride_m, DTYPE),
            _known_y(x_ptr, w, rstd_ptr, m + 2, k, M, K, stride_m, DTYPE),
            _known_y(x_ptr, w, rstd_ptr, m + 3, k, M, K, stride_m, DTYPE),
        )
        if RECORD and not PARTIALS:
            seen = tl.maximum(seen, amax_bits_of(ys))
        write_codes(
            ys, factor, data_ptr, data_t_ptr, first_m4, k, M, K,
            ROWS_BY_4, FORMAT, FORMAT_MAX, PARTIALS > 0, True, WRITE_COLS, PACK,
        )  # fmt: skip
    if RECORD and not PARTIALS:
        tl.atomic_max(amax_ptr, tl.max(seen), sem="relaxed")


def _launch_rows(
    x: Tensor, weight: Tensor, rstd: Tensor, eps: float, dtype: torch.dtype, amax: bool,
    most: int = MAX_PARTIALS,
) -> Tensor:  # fmt: skip
    """Write rstd; int32 (P,), P a power of two: bits whose maximum is the amax of y, or nothing."""
    blocks = triton.cdiv(x.shape[0], _ROWS["ROWS"])
    count = min(most, triton.next_power_of_2(blocks))
    partials = torch.empty(count if amax else 0, dtype=torch.int32, device=x.device)
    _rows_kernel[(count,)](
        x, weight, rstd, partials if amax else rstd.view(torch.int32), *x.shape, x.stride(0), eps,
        **_ROWS, PARTIALS=count, DTYPE=TRITON_DTYPES[dtype], AMAX=amax, **_OPTIONS,
    )  # fmt: skip
    return partials


def _launch(
    x: Tensor, weight: Tensor | None, eps: float, scale: Tensor | None, compute_dtype: torch.dtype,
    dtype: torch.dtype, power_of_two: bool, cols: bool, amax: Tensor | None = None,
    own: bool | None = None,
) -> Outputs:  # fmt: skip
    """Launch; ``own`` is for tests, which have no patience for many rows."""
    check_device("rms_norm_cast", x, weight=weight, scale=scale, amax=amax)
    if weight is not None and weight.shape != x.shape[1:]:
        raise ValueError(
            f"float8::rms_norm_cast: weight is {tuple(weight.shape)}, expected {tuple(x.shape[1:])}"
        )
    if x.numel() == 0:
        return _reference(x, weight, eps, scale, compute_dtype, dtype, power_of_two, cols, amax)
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = x.new_ones(x.shape[1]) if weight is None else weight.contiguous()
    data, data_t, found, rstd = _empty(
        x, weight, eps, scale, compute_dtype, dtype, power_of_two, cols, amax
    )
    M, K = x.shape
    if own is None:
        own = scale is not None and triton.cdiv(M, 4 * _OWN_TILE["ROWS_BY_4"]) >= _ENOUGH
    tile = _OWN_TILE if own else _TILE
    programs = triton.cdiv(M, 4 * tile["ROWS_BY_4"])
    pack = cols and M % 16 == 0
    with on_device_of(x):
        partials = None
        if not own:
            partials = _launch_rows(x, weight, rstd, eps, compute_dtype, amax=scale is None)
        _cast_kernel[(programs if own else programs * triton.cdiv(K, tile["COLS"]),)](
            x,
            weight,
            rstd,
            found if scale is None else scale,
            found,
            found.view(torch.int32) if partials is None else partials,
            data.view(torch.uint8),
            data_t.view(torch.uint8).view(torch.int32) if pack else data_t.view(torch.uint8),
            (found if amax is None else amax).view(torch.int32),
            *(M, K, x.stride(0), eps),
            **tile,
            OWN=own,
            PARTIALS=partials.numel() if partials is not None and scale is None else 0,
            DTYPE=TRITON_DTYPES[compute_dtype],
            FORMAT=TRITON_FORMATS[dtype],
            FORMAT_MAX=torch.finfo(dtype).max,
            POWER_OF_TWO=power_of_two,
            WRITE_COLS=cols,
            RECORD=amax is not None,
            PACK=pack,
            **_OPTIONS,
        )
    return data, data_t, found, rstd


def _reference(
    x: Tensor, weight: Tensor | None, eps: float, scale: Tensor | None, compute_dtype: torch.dtype,
    dtype: torch.dtype, power_of_two: bool, cols: bool, amax: Tensor | None = None,
) -> Outputs:  # fmt: skip
    y32, rstd = reference.rms_norm(x, weight, eps)
    y = y32.to(compute_dtype)
    if scale is None:
        return *cast_dynamic(y, dtype, power_of_two, True, cols, amax), rstd
    return *cast(y, scale, dtype, True, cols, amax), scale.reshape(1, 1).clone(), rstd


def _empty(
    x: Tensor, weight: Tensor | None, eps: float, scale: Tensor | None, compute_dtype: torch.dtype,
    dtype: torch.dtype, power_of_two: bool, cols: bool, amax: Tensor | None = None,
) -> Outputs:  # fmt: skip
    M, K = x.shape
    found, rstd = (x.new_empty(shape, dtype=torch.float32) for shape in ((1, 1), (M, 1)))
    return new_codes(x, M, K, True, dtype), new_codes(x, K, M, cols, dtype), found, rstd


rms_norm_cast = register(
    "rms_norm_cast(Tensor x, Tensor? weight, float eps, Tensor? scale, ScalarType compute_dtype, "
    "ScalarType dtype, bool power_of_two, bool cols, Tensor(a!)? amax=None)"
    " -> (Tensor data, Tensor data_t, Tensor scale_out, Tensor rstd)",
    kernel=_launch,
    reference=_reference,
    fake=_empty,
)


def shipped() -> list[Variant]:
    """The forms that the recipes launch on bfloat16."""
    return [
        _rows_variant("rstd and amax", True),
        _rows_variant("rstd", False),
        _cast_variant("tiles", False, MAX_PARTIALS, True, False),
        _cast_variant("a given scale, tiles, amax", False, 0, True, True),
        _cast_variant("a given scale, whole rows, amax", True, 0, True, True),
        _cast_variant("a given scale, whole rows, not transposed", True, 0, False, False),
    ]


_SOURCES = dict.fromkeys(("x_ptr", "weight_ptr"), "*bf16")
_FLOATS = dict.fromkeys(("rstd_ptr", "given_ptr", "scale_ptr"), "*fp32")
_SIZES = {**dict.fromkeys(("M", "K", "stride_m"), "i32"), "eps": "fp32"}
_CONSTANTS = {"DTYPE": tl.bfloat16}


def _rows_variant(name: str, amax: bool) -> Variant:
    types = {**_SOURCES, "rstd_ptr": "*fp32", "partials_ptr": "*i32", **_SIZES}
    constants = {**_ROWS, **_CONSTANTS, "PARTIALS": MAX_PARTIALS, "AMAX": amax}
    return Variant(f"rms_norm_cast: {name}", _rows_kernel, types, constants, _OPTIONS)


def _cast_variant(name: str, own: bool, partials: int, cols: bool, record: bool) -> Variant:
    types = {
        **_SOURCES, **_FLOATS, "partials_ptr": "*i32", "data_ptr": "*u8",
        "data_t_ptr": "*i32" if cols else "*u8", "amax_ptr": "*i32", **_SIZES,
    }  # fmt: skip
    constants = {
        **(_OWN_TILE if own else _TILE), **_CONSTANTS, "OWN": own, "PARTIALS": partials,
        "FORMAT": tl.float8e4nv, "FORMAT_MAX": 448.0, "POWER_OF_TWO": False,
        "WRITE_COLS": cols, "RECORD": record, "PACK": cols,
    }  # fmt: skip
    return Variant(f"rms_norm_cast: {name}", _cast_kernel, types, constants, _OPTIONS)
