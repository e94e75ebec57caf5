"""`norm_cast`: normalise rows and cast, in one op.

``y = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(variance + eps)`` per row, in
float32 and rounded once, to the compute dtype. An RMS norm has no mean and no bias, and its
variance is mean(x^2): it is not ``is_centred``. The kernels do not write y, only its float8 data,
row-major and transposed, with the bits of ``cast.py``. From bfloat16:

====== =================== ================= ==============================================
scale  bytes per element   norm, then cast
====== =================== ================= ==============================================
given  2 + 2 + 1 + 1       2 + 2 and 2+1+1   static, delayed; records the amax of y
None   2 + 2 + 1 + 1       2 + 2 and 2+2+1+1 dynamic: the first pass finds the amax too
====== =================== ================= ==============================================

There are two kernels. `_rows_kernel` computes the statistics of 4 rows at a time and, if needed,
the amax of y; its second read of a row is a cache hit. `_cast_kernel` then reads x again and writes
float8 tile by tile. With few rows, x is still in the L2 cache in the second launch.

The variance about the mean takes one read too, without a difference of two large sums: every lane
updates the mean and the squared distances of its elements (Welford, 1962). Lanes are combined by
``sum(m2) + sum(n * (mean_of_lane - mean)^2)`` (Chan, Golub and LeVeque, 1979).

For given statistics the bits of a row are the definition's. The statistics depend on the order of
summation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import ceil_div
from float8.kernels import definition
from float8.kernels.gpu.amax import MAX_PARTIALS, new_partials
from float8.kernels.gpu.cast import fused_definition, fused_fake
from float8.kernels.gpu.jit import (
    amax_bits_of,
    magnitude_bits,
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
    new_data,
    one_scale_arguments,
    register_op,
    row_major,
)

_ROWS = {"ROWS": 4, "COLS": 1024}
_TILE = {"ROWS_BY_4": 16, "COLS": 128}  # of cast.py
_OPTIONS = {"num_warps": 4, **NO_FUSION}
_MOST = 1024  # programs that compute statistics alone


# data (M, K), data_t (K, M), scale and amax (1, 1), mean (M, 1), None in an RMS norm; rstd (M, 1).
_Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]


@triton.jit
def _load(x_ptr, m, k, M, K, stride_m, POLICY: tl.constexpr):
    """A tile of x in float32, 0 outside (M, K); and the mask of elements inside."""
    inside = (m < M)[:, None] & (k < K)[None, :]
    x_ptrs = x_ptr + m[:, None] * stride_m + k[None, :]
    return tl.load(x_ptrs, inside, 0.0, eviction_policy=POLICY).to(tl.float32), inside


@triton.jit
def _mean_square(x_ptr, m, M, K, stride_m, ROWS: tl.constexpr, COLS: tl.constexpr):
    """mean(x^2) of ROWS rows."""
    squares = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, K, COLS):
        x, _ = _load(x_ptr, m, first + tl.arange(0, COLS), M, K, stride_m, "evict_last")
        squares += x * x
    return tl.div_rn(tl.sum(squares, 1), K * 1.0)


@triton.jit
def _mean_and_variance(x_ptr, m, M, K, stride_m, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The mean and the mean squared distance from it, of ROWS rows."""
    means = tl.zeros((ROWS, COLS), tl.float32)
    m2 = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, K, COLS):
        x, inside = _load(x_ptr, m, first + tl.arange(0, COLS), M, K, stride_m, "evict_last")
        off = tl.where(inside, x - means, 0.0)
        means += off * tl.div_rn(1.0, (first // COLS + 1) * 1.0)
        m2 += off * (x - means)
    seen = ((K - tl.arange(0, COLS) + (COLS - 1)) // COLS).to(tl.float32)[None, :]  # by each lane
    mean = tl.div_rn(tl.sum(means * seen, 1), K * 1.0)
    off = means - mean[:, None]
    return mean, tl.div_rn(tl.sum(m2 + off * off * seen, 1), K * 1.0)


@triton.jit
def _store_statistics(
    x_ptr, mean_ptr, rstd_ptr, first_m, M, K, stride_m, eps, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Store the mean (0 without) and 1 / sqrt(variance + eps), which is correctly rounded."""
    m = first_m + tl.arange(0, ROWS)
    if mean_ptr is not None:
        mean, square = _mean_and_variance(x_ptr, m, M, K, stride_m, ROWS, COLS)
        tl.store(mean_ptr + m, mean, m < M)
    else:
        mean = tl.zeros((ROWS,), tl.float32)
        square = _mean_square(x_ptr, m, M, K, stride_m, ROWS, COLS)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(square + eps))
    tl.store(rstd_ptr + m, rstd, m < M)
    return mean, rstd


@triton.jit
def _y(
    x_ptr, weight_ptr, bias_ptr, mean_ptr, mean, rstd, m, k, M, K, stride_m,
    DTYPE: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """A tile of y, rows m and columns k: rounded to DTYPE, in float32; 0 outside."""
    x, inside = _load(x_ptr, m, k, M, K, stride_m, POLICY)
    if mean_ptr is not None:
        x = x - mean[:, None]
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + k, k < K, 0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + k, k < K, 0.0).to(tl.float32)[None, :]
    return tl.where(inside, y, 0.0).to(DTYPE).to(tl.float32)


@triton.jit
def _known_y(x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, m, k, M, K, stride_m, DTYPE: tl.constexpr):
    """`_y` of rows whose statistics are in memory; the last read of x."""
    rstd = tl.load(rstd_ptr + m, m < M, 0.0)
    mean = rstd
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + m, m < M, 0.0)
    return _y(x_ptr, w_ptr, b_ptr, mean_ptr, mean, rstd, m, k, M, K, stride_m, DTYPE, "evict_first")


@triton.jit
def _rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,  # float32 (M,), written; None in an RMS norm
    rstd_ptr,  # float32 (M,), written
    partials_ptr,  # int32 (PROGRAMS,), written, or None
    M,
    K,
    stride_m,
    eps,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Statistics of all rows; partials[i] = bits of y's amax in blocks i, i + PROGRAMS, ..."""
    # A thread has 8 adjacent columns. One amax of them leaves layer norm's means their registers.
    WIDE: tl.constexpr = 1 if mean_ptr is None else 8
    bits = tl.zeros((ROWS, COLS // WIDE), tl.int32)
    for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(M, ROWS), PROGRAMS):
        first_m = block * ROWS
        m = first_m + tl.arange(0, ROWS)
        mean, rstd = _store_statistics(
            x_ptr, mean_ptr, rstd_ptr, first_m, M, K, stride_m, eps, ROWS, COLS
        )
        if partials_ptr is not None:
            for first in range(0, K, COLS):
                k = first + tl.arange(0, COLS)
                y = _y(
                    x_ptr, weight_ptr, bias_ptr, mean_ptr, mean, rstd, m, k, M, K, stride_m,
                    DTYPE, "evict_last",
                )  # fmt: skip
                wide = magnitude_bits(y).reshape(ROWS, COLS // WIDE, WIDE)
                bits = tl.maximum(bits, tl.max(wide, 2))
    if partials_ptr is not None:
        tl.store(partials_ptr + tl.program_id(0), tl.max(bits))


@triton.jit
def _cast_kernel(
    x_ptr,
    w_ptr,  # or None, as b_ptr
    b_ptr,
    mean_ptr,  # float32 (M,); None in an RMS norm
    rstd_ptr,  # float32 (M,)
    given_ptr,  # the scale; None: it follows from the partial amaxes
    scale_ptr,  # written
    partials_ptr,  # amax bits (PARTIALS,)
    record_ptr,  # int32 bits of a running maximum, or None
    data_ptr,  # uint8 (M, K)
    data_t_ptr,  # uint8 (K, M); int32 of four bytes each where M is a multiple of 16; or None
    M,
    K,
    stride_m,
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    PARTIALS: tl.constexpr,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    pid, _ = tile_of_program()
    chunks = tl.cdiv(K, COLS)
    scale = scale_of_tensor(
        given_ptr, scale_ptr, partials_ptr, record_ptr, FORMAT_MAX, POWER_OF_TWO, PARTIALS
    )
    factor = reciprocal(scale, POWER_OF_TWO)

    first_m4 = (pid // chunks).to(tl.int64) * ROWS_BY_4
    m = (first_m4 + tl.arange(0, ROWS_BY_4)) * 4
    k = (pid % chunks) * COLS + tl.arange(0, COLS)
    # All loads come before the first store, because no load may be moved before a store.
    ys = (
        _known_y(x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, m, k, M, K, stride_m, DTYPE),
        _known_y(x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, m + 1, k, M, K, stride_m, DTYPE),
        _known_y(x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, m + 2, k, M, K, stride_m, DTYPE),
        _known_y(x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, m + 3, k, M, K, stride_m, DTYPE),
    )
    scaled = scaled_4(ys, factor, FORMAT_MAX, given_ptr is None)
    write_codes(scaled, data_ptr, data_t_ptr, first_m4, k, M, M, 0, K, M, FORMAT)
    if record_ptr is not None and given_ptr is not None:
        tl.atomic_max(record_ptr, tl.max(amax_bits_of(ys)), sem="relaxed")


def _statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, mean: Tensor | None,
    rstd: Tensor, dtype: torch.dtype, amax: bool, most: int | None = None,
) -> Tensor | None:  # fmt: skip
    """Write the statistics; return int32 (P,), P a power of two, whose maximum is y's amax bits."""
    most = most or (MAX_PARTIALS if amax else _MOST)
    partials = new_partials(x, ceil_div(x.shape[0], _ROWS["ROWS"]), most)
    found = partials if amax else None
    launch(
        _rows_kernel, len(partials), x, weight, bias, mean, rstd, found, *x.shape,
        x.stride(0), eps, **_ROWS, PROGRAMS=len(partials), DTYPE=TRITON_DTYPES[dtype],
        **_OPTIONS,
    )  # fmt: skip
    return found


def _launch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_centred: bool,
    scale: Tensor | None, compute_dtype: torch.dtype, dtype: torch.dtype, power_of_two: bool,
    cols: bool, finds_amax: bool = False,
) -> _Outputs:  # fmt: skip
    check_device("norm_cast", x, weight=weight, bias=bias, scale=scale)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[1:]:  # it would be read past its end
            raise ValueError(
                f"float8::norm_cast: {name} is {tuple(tensor.shape)}, expected {tuple(x.shape[1:])}"
            )
    norm, how = (weight, bias, eps, is_centred), (dtype, power_of_two, cols, finds_amax)
    if x.numel() == 0:
        return _definition(x, *norm, scale, compute_dtype, *how)
    outputs = _fake(x, *norm, scale, compute_dtype, *how)
    data, data_t, found, amax, mean, rstd = outputs
    record = amax.zero_() if finds_amax else None
    x, (M, K) = row_major(x), x.shape
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    partials = _statistics(x, weight, bias, eps, mean, rstd, compute_dtype, amax=scale is None)
    pointers, constants = one_scale_arguments(
        data, data_t, found, scale, partials, record, power_of_two
    )
    programs = ceil_div(M, 4 * _TILE["ROWS_BY_4"]) * ceil_div(K, _TILE["COLS"])
    launch(
        _cast_kernel, programs, x, weight, bias, mean, rstd, *pointers, M, K, x.stride(0), **_TILE,
        **constants, DTYPE=TRITON_DTYPES[compute_dtype], **_OPTIONS,
    )  # fmt: skip
    return outputs


def _definition(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_centred: bool,
    scale: Tensor | None, compute_dtype: torch.dtype, *how: Any,
) -> _Outputs:  # fmt: skip
    y32, mean, rstd = definition.norm(x, weight, bias, eps, is_centred)
    return *fused_definition(y32.to(compute_dtype), scale, *how), mean, rstd


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_centred: bool,
    scale: Tensor | None, compute_dtype: torch.dtype, *how: Any,
) -> _Outputs:  # fmt: skip
    mean, rstd = (new_data(x, x.shape[0], 1, True, torch.float32) for _ in range(2))
    return *fused_fake(x, *how), mean if is_centred else None, rstd


norm_cast = register_op(
    "norm_cast(Tensor x, Tensor? weight, Tensor? bias, float eps, bool is_centred, Tensor? scale, "
    "ScalarType compute_dtype, ScalarType dtype, bool power_of_two, bool cols, "
    "bool finds_amax=False) -> "
    "(Tensor data, Tensor data_t, Tensor scale_out, Tensor amax, Tensor mean, Tensor rstd)",
    kernel=_launch,
    definition=_definition,
    fake=_fake,
)
