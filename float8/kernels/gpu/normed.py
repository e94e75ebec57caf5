"""Normalise rows and cast in one read: what `rms_norm_cast` and `layer_norm_cast` share.

``y = (x - mean) * rstd * weight + bias``, in float32 and rounded once, to the compute dtype, where
an RMS norm has no mean and no bias (CENTRED is off). y is never written: its codes are, row-major
and transposed, as ``cast.py`` casts a matrix that exists.

Two kernels. `_rows_kernel` takes 4 rows at a time, for their statistics and, if wanted, the amax of
y; the second look at a row hits the cache. `_cast_kernel` writes codes: tile by tile, with
statistics that are there already, or by whole rows (OWN): a program looks at its 16 rows and walks
back over them, so that what was read last, and is in the cache, is read first. That is one pass,
and needs rows enough to fill the GPU; of fewer the L2 cache holds x for the second launch.

The variance takes one look as well, and no difference of two large sums: every lane follows the
mean and the squared distances of the elements that it sees (Welford, 1962), lanes are joined by
``sum(m2) + sum(n * (mean_of_lane - mean)^2)`` (Chan, Golub and LeVeque, 1979).

Given its statistics a row's bits are the reference's; they themselves depend on the order of a sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.kernels.gpu.amax import MAX_PARTIALS
from float8.kernels.gpu.jit import magnitude_bits, reciprocal
from float8.kernels.gpu.launch import (
    NO_FUSION,
    TRITON_DTYPES,
    TRITON_FORMATS,
    Variant,
    check_device,
    on_device_of,
)
from float8.kernels.gpu.tiles import amax_bits_of, scale_of_tensor, write_codes

_ROWS = {"ROWS": 4, "COLS": 1024}
_TILE = {"ROWS_BY_4": 16, "COLS": 128}  # of cast.py
_OWN_TILE = {"ROWS_BY_4": 4, "COLS": 512}
_OPTIONS = {"num_warps": 4, **NO_FUSION}
# Programs of whole rows that fill a GPU: about two per multiprocessor of an H100.
_ENOUGH = 256


class Norm(NamedTuple):
    """What a norm has beside its rows: a ``mean`` to be written where it is centred."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool


class Codes(NamedTuple):
    """What is written; ``mean`` and ``rstd`` are float32 (M, 1), mean None where there is none."""

    data: Tensor
    data_t: Tensor
    scale: Tensor
    mean: Tensor | None
    rstd: Tensor


@triton.jit
def _load(x_ptr, m, k, M, K, stride_m, POLICY: tl.constexpr):
    """A tile of x in float32, and where it is inside (M, K); 0 outside."""
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
    x_ptr, mean_ptr, rstd_ptr, first_m, M, K, stride_m, eps,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """mean (0 unless CENTRED) and 1 / sqrt(variance + eps): correctly rounded but for the sums."""
    m = first_m + tl.arange(0, ROWS)
    if CENTRED:
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
    x_ptr, weight_ptr, bias_ptr, mean, rstd, m, k, M, K, stride_m,
    CENTRED: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """A tile of y, rows m and columns k: rounded to DTYPE, in float32; 0 outside."""
    x, inside = _load(x_ptr, m, k, M, K, stride_m, POLICY)
    if CENTRED:
        x = x - mean[:, None]
    y = (x * rstd[:, None]) * tl.load(weight_ptr + k, k < K, 0.0).to(tl.float32)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + k, k < K, 0.0).to(tl.float32)[None, :]
    return tl.where(inside, y, 0.0).to(DTYPE).to(tl.float32)


@triton.jit
def _known_y(
    x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, m, k, M, K, stride_m,
    CENTRED: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`_y` of rows whose statistics are in memory, read for the last time."""
    rstd = tl.load(rstd_ptr + m, m < M, 0.0)
    mean = rstd
    if CENTRED:
        mean = tl.load(mean_ptr + m, m < M, 0.0)
    return _y(
        x_ptr, w_ptr, b_ptr, mean, rstd, m, k, M, K, stride_m, CENTRED, BIAS, DTYPE, "evict_first"
    )


@triton.jit
def _known_4_rows(
    x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, m, k, M, K, stride_m,
    CENTRED: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`_known_y` of rows m, m + 1, m + 2, m + 3, each as a tile."""
    return (
        _known_y(x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, m, k, M, K, stride_m,
                 CENTRED, BIAS, DTYPE),
        _known_y(x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, m + 1, k, M, K, stride_m,
                 CENTRED, BIAS, DTYPE),
        _known_y(x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, m + 2, k, M, K, stride_m,
                 CENTRED, BIAS, DTYPE),
        _known_y(x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, m + 3, k, M, K, stride_m,
                 CENTRED, BIAS, DTYPE),
    )  # fmt: skip


@triton.jit
def _rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,  # unused unless BIAS
    mean_ptr,  # float32 (M,), written where CENTRED
    rstd_ptr,  # float32 (M,), written
    partials_ptr,  # int32 (PARTIALS,), written where AMAX
    M,
    K,
    stride_m,
    eps,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTIALS: tl.constexpr,
    DTYPE: tl.constexpr,
    AMAX: tl.constexpr,
):
    """Statistics of all rows; partials[i] = bits of y's amax in blocks i, i + PARTIALS, ..."""
    bits = tl.zeros((ROWS, COLS), tl.int32)
    for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(M, ROWS), PARTIALS):
        first_m = block * ROWS
        m = first_m + tl.arange(0, ROWS)
        mean, rstd = _store_statistics(
            x_ptr, mean_ptr, rstd_ptr, first_m, M, K, stride_m, eps, CENTRED, ROWS, COLS
        )
        if AMAX:
            for first in range(0, K, COLS):
                k = first + tl.arange(0, COLS)
                y = _y(
                    x_ptr, weight_ptr, bias_ptr, mean, rstd, m, k, M, K, stride_m,
                    CENTRED, BIAS, DTYPE, "evict_last",
                )  # fmt: skip
                bits = tl.maximum(bits, magnitude_bits(y))
    if AMAX:
        tl.store(partials_ptr + tl.program_id(0), tl.max(bits))


@triton.jit
def _cast_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,  # unused unless BIAS
    mean_ptr,  # float32 (M,); written where OWN and CENTRED
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
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    OWN: tl.constexpr,  # a program has whole rows, and computes their statistics
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
        _store_statistics(
            x_ptr, mean_ptr, rstd_ptr, first_m4 * 4, M, K, stride_m, eps,
            CENTRED, 4 * ROWS_BY_4, COLS // 2 if CENTRED else COLS,  # two accumulators, or one
        )  # fmt: skip
        tl.debug_barrier()  # the threads of this program read them below
        steps = chunks
        last_k = (chunks - 1) * COLS
    else:
        first_m4 = (pid // chunks).to(tl.int64) * ROWS_BY_4
        steps = 1
        last_k = (pid % chunks) * COLS
    m = (first_m4 + tl.arange(0, ROWS_BY_4)) * 4
    seen = tl.zeros((ROWS_BY_4, COLS // 16), tl.int32)  # 16 neighbours are one thread's
    for step in range(steps):
        k = last_k - step * COLS + tl.arange(0, COLS)
        # All loads before the first store, which none of them may overtake.
        ys = _known_4_rows(
            x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, m, k, M, K, stride_m,
            CENTRED, BIAS, DTYPE,
        )  # fmt: skip
        if RECORD and not PARTIALS:
            bits = tl.reshape(amax_bits_of(ys), (ROWS_BY_4, COLS // 16, 16))
            seen = tl.maximum(seen, tl.max(bits, 2))
        write_codes(
            ys, factor, data_ptr, data_t_ptr, first_m4, k, M, K,
            ROWS_BY_4, FORMAT, FORMAT_MAX, PARTIALS > 0, True, WRITE_COLS, PACK,
        )  # fmt: skip
    if RECORD and not PARTIALS:
        tl.atomic_max(amax_ptr, tl.max(seen), sem="relaxed")


def launch_rows(
    x: Tensor, norm: Norm, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype, amax: bool,
    most: int = MAX_PARTIALS,
) -> Tensor:  # fmt: skip
    """Write the statistics; int32 (P,), P a power of two: bits whose maximum is the amax of y."""
    blocks = triton.cdiv(x.shape[0], _ROWS["ROWS"])
    count = min(most, triton.next_power_of_2(blocks))
    partials = torch.empty(count if amax else 0, dtype=torch.int32, device=x.device)
    _rows_kernel[(count,)](
        x, *_pointers(norm, mean, rstd), partials if amax else rstd.view(torch.int32),
        *x.shape, x.stride(0), norm.eps, **_flags(norm),
        **_ROWS, PARTIALS=count, DTYPE=TRITON_DTYPES[dtype], AMAX=amax, **_OPTIONS,
    )  # fmt: skip
    return partials


def check(op: str, x: Tensor, **others: Tensor | None) -> None:
    """Raise if a kernel would read past a weight or a bias, or follow pointers elsewhere."""
    check_device(op, x, **others)
    for name in ("weight", "bias"):
        tensor = others.get(name)
        if tensor is not None and tensor.shape != x.shape[1:]:
            raise ValueError(
                f"float8::{op}: {name} is {tuple(tensor.shape)}, expected {tuple(x.shape[1:])}"
            )


def launch(
    x: Tensor, norm: Norm, out: Codes, scale: Tensor | None, compute_dtype: torch.dtype,
    power_of_two: bool, amax: Tensor | None, own: bool | None = None,
) -> None:  # fmt: skip
    """Write ``out``, of x (M, K) with elements; ``own`` is for tests, with little patience."""
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = x.new_ones(x.shape[1]) if norm.weight is None else norm.weight.contiguous()
    norm = norm._replace(
        weight=weight, bias=norm.bias if norm.bias is None else norm.bias.contiguous()
    )
    (M, K), cols = x.shape, out.data_t.numel() > 0
    if own is None:
        own = scale is not None and triton.cdiv(M, 4 * _OWN_TILE["ROWS_BY_4"]) >= _ENOUGH
    tile = _OWN_TILE if own else _TILE
    programs = triton.cdiv(M, 4 * tile["ROWS_BY_4"])
    pack, data_t = cols and M % 16 == 0, out.data_t.view(torch.uint8)
    with on_device_of(x):
        partials = None
        if not own:
            partials = launch_rows(x, norm, out.mean, out.rstd, compute_dtype, amax=scale is None)
        _cast_kernel[(programs if own else programs * triton.cdiv(K, tile["COLS"]),)](
            x,
            *_pointers(norm, out.mean, out.rstd),
            out.scale if scale is None else scale,
            out.scale,
            out.scale.view(torch.int32) if partials is None else partials,
            out.data.view(torch.uint8),
            data_t.view(torch.int32) if pack else data_t,
            (out.scale if amax is None else amax).view(torch.int32),
            *(M, K, x.stride(0), norm.eps),
            **_flags(norm),
            **tile,
            OWN=own,
            PARTIALS=partials.numel() if partials is not None and scale is None else 0,
            DTYPE=TRITON_DTYPES[compute_dtype],
            FORMAT=TRITON_FORMATS[out.data.dtype],
            FORMAT_MAX=torch.finfo(out.data.dtype).max,
            POWER_OF_TWO=power_of_two,
            WRITE_COLS=cols,
            RECORD=amax is not None,
            PACK=pack,
            **_OPTIONS,
        )


def _pointers(norm: Norm, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor | None, ...]:
    """weight, bias, mean, rstd; what the kernel does not look at is any pointer."""
    bias = norm.weight if norm.bias is None else norm.bias
    return norm.weight, bias, rstd if mean is None else mean, rstd


def _flags(norm: Norm) -> dict[str, bool]:
    return {"CENTRED": norm.centred, "BIAS": norm.bias is not None}


def shipped(op: str, centred: bool) -> list[Variant]:
    """The forms that the recipes launch on bfloat16."""
    flags = {"CENTRED": centred, "BIAS": centred, "DTYPE": tl.bfloat16}
    given = f"{op}: a given scale"
    return [
        _rows_variant(f"{op}: statistics and amax", flags, True),
        _rows_variant(f"{op}: statistics", flags, False),
        _cast_variant(f"{op}: tiles", flags, False, MAX_PARTIALS, True, False),
        _cast_variant(f"{given}, tiles, amax", flags, False, 0, True, True),
        _cast_variant(f"{given}, whole rows, amax", flags, True, 0, True, True),
        _cast_variant(f"{given}, whole rows, not transposed", flags, True, 0, False, False),
    ]


_SOURCES = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr"), "*bf16")
_STATISTICS = dict.fromkeys(("mean_ptr", "rstd_ptr"), "*fp32")
_SIZES = {**dict.fromkeys(("M", "K", "stride_m"), "i32"), "eps": "fp32"}


def _rows_variant(name: str, flags: dict[str, Any], amax: bool) -> Variant:
    types = {**_SOURCES, **_STATISTICS, "partials_ptr": "*i32", **_SIZES}
    constants = {**_ROWS, **flags, "PARTIALS": MAX_PARTIALS, "AMAX": amax}
    return Variant(name, _rows_kernel, types, constants, _OPTIONS)


def _cast_variant(
    name: str, flags: dict[str, Any], own: bool, partials: int, cols: bool, record: bool
) -> Variant:
    types = {
        **_SOURCES, **_STATISTICS, **dict.fromkeys(("given_ptr", "scale_ptr"), "*fp32"),
        "partials_ptr": "*i32", "data_ptr": "*u8", "data_t_ptr": "*i32" if cols else "*u8",
        "amax_ptr": "*i32", **_SIZES,
    }  # fmt: skip
    constants = {
        **(_OWN_TILE if own else _TILE), **flags, "OWN": own, "PARTIALS": partials,
        "FORMAT": tl.float8e4nv, "FORMAT_MAX": 448.0, "POWER_OF_TWO": False,
        "WRITE_COLS": cols, "RECORD": record, "PACK": cols,
    }  # fmt: skip
    return Variant(name, _cast_kernel, types, constants, _OPTIONS)
