"""`cast`, `cast_dynamic`: one scale per tensor, and both orientations from one read.

A float8 GEMM reads each operand with its contraction contiguous, and training contracts both
dimensions of an operand: x along K for the output, along M for the weight gradient. So a cast
writes the codes twice, row-major and transposed, and reads the bfloat16 source once:

=============== ==================== ===============================================
op              bytes per element    what it does
=============== ==================== ===============================================
`cast`          2 + 1 + 1            a given scale (static, delayed); records the amax
`cast_dynamic`  2 + 2 + 1 + 1        reads twice: the amax, then the cast
=============== ==================== ===============================================

`cast_dynamic` is two launches. The first leaves one partial amax per program; every program of the
second reduces those again, two kilobytes from cache, and computes the scale itself, so that nothing
is zeroed, waited for or copied between. How both orientations are written: ``tiles.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import WHOLE
from float8.kernels import reference
from float8.kernels.gpu.amax import MAX_PARTIALS, is_transposed, partial_amaxes
from float8.kernels.gpu.jit import reciprocal
from float8.kernels.gpu.launch import (
    NO_FUSION,
    TRITON_FORMATS,
    Variant,
    check_device,
    new_codes,
    on_device_of,
    register,
)
from float8.kernels.gpu.tiles import amax_bits_of, load_4_rows, scale_of_tensor, write_codes

_WHOLE = (WHOLE, WHOLE)
_TILE = {"ROWS_BY_4": 16, "COLS": 128}
_OPTIONS = {"num_warps": 4, **NO_FUSION}


@triton.jit
def _cast_kernel(
    x_ptr,
    given_ptr,  # the scale; unused where PARTIALS
    scale_ptr,  # written where PARTIALS
    partials_ptr,  # amax bits (PARTIALS,); unused where PARTIALS is 0
    data_ptr,  # uint8 (M, K)
    data_t_ptr,  # uint8 (K, M); int32 where PACK
    amax_ptr,  # int32 bits of a running maximum
    M,
    K,
    stride_m,
    stride_k,
    ROWS_BY_4: tl.constexpr,
    COLS: tl.constexpr,
    PARTIALS: tl.constexpr,
    FORMAT: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WRITE_ROWS: tl.constexpr,
    WRITE_COLS: tl.constexpr,
    RECORD: tl.constexpr,
    PACK: tl.constexpr,  # M is a multiple of 16
):
    pid = tl.program_id(0)
    tiles_k = tl.cdiv(K, COLS)
    first_m4 = (pid // tiles_k).to(tl.int64) * ROWS_BY_4
    m = (first_m4 + tl.arange(0, ROWS_BY_4)) * 4
    k = (pid % tiles_k).to(tl.int64) * COLS + tl.arange(0, COLS)

    xs = load_4_rows(x_ptr, m, k, M, K, stride_m, stride_k)
    ys = (xs[0].to(tl.float32), xs[1].to(tl.float32), xs[2].to(tl.float32), xs[3].to(tl.float32))
    scale = scale_of_tensor(
        given_ptr, scale_ptr, partials_ptr, amax_ptr,
        FORMAT_MAX, POWER_OF_TWO, PARTIALS, RECORD, PARTIALS > 0,
    )  # fmt: skip
    factor = reciprocal(scale, POWER_OF_TWO and PARTIALS > 0)
    write_codes(
        ys, factor, data_ptr, data_t_ptr, first_m4, k, M, K,
        ROWS_BY_4, FORMAT, FORMAT_MAX, PARTIALS > 0, WRITE_ROWS, WRITE_COLS, PACK,
    )  # fmt: skip
    if RECORD and not PARTIALS:
        tl.atomic_max(amax_ptr, tl.max(amax_bits_of(ys)), sem="relaxed")


def _launch(
    x: Tensor,
    scale: Tensor,
    partials: Tensor | None,
    dtype: torch.dtype,
    power_of_two: bool,
    rows: bool,
    cols: bool,
    amax: Tensor | None,
) -> tuple[Tensor, Tensor]:
    M, K = x.shape
    data, data_t = new_codes(x, M, K, rows, dtype), new_codes(x, K, M, cols, dtype)
    if is_transposed(x):
        flags, outputs, (M, K) = (cols, rows), (data_t, data), (K, M)
        x = x.t()
    else:
        flags, outputs = (rows, cols), (data, data_t)
    pack = M % 16 == 0
    first, second = (out.view(torch.uint8) for out in outputs)
    # A byte view of nothing has no int32 view, and is not written.
    second = second.view(torch.int32) if pack and flags[1] else second
    grid = (triton.cdiv(M, 4 * _TILE["ROWS_BY_4"]) * triton.cdiv(K, _TILE["COLS"]),)
    _cast_kernel[grid](
        x,
        scale,
        scale,
        scale.view(torch.int32) if partials is None else partials,
        first,
        second,
        (scale if amax is None else amax).view(torch.int32),
        M,
        K,
        *x.stride(),
        **_TILE,
        PARTIALS=0 if partials is None else partials.numel(),
        FORMAT=TRITON_FORMATS[dtype],
        FORMAT_MAX=torch.finfo(dtype).max,
        POWER_OF_TWO=power_of_two,
        WRITE_ROWS=flags[0],
        WRITE_COLS=flags[1],
        RECORD=amax is not None,
        PACK=pack,
        **_OPTIONS,
    )
    return data, data_t


def _given_scale(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, cols: bool, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    check_device("cast", x, scale=scale, amax=amax)
    if x.numel() == 0:
        return _fake_given_scale(x, scale, dtype, rows, cols, amax)
    with on_device_of(x):
        return _launch(x, scale, None, dtype, False, rows, cols, amax)


def _dynamic_scale(
    x: Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    rows: bool,
    cols: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_device("cast_dynamic", x, amax=amax)
    if x.numel() == 0:
        return _reference_dynamic_scale(x, dtype, power_of_two, rows, cols, amax)
    scale = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        partials = partial_amaxes(x)
        return *_launch(x, scale, partials, dtype, power_of_two, rows, cols, amax), scale


def _reference_given_scale(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, cols: bool, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if amax is not None:
        reference.record_amax(amax, reference.amax(x, _WHOLE))
    data = reference.cast(x, scale.reshape(1, 1), _WHOLE, dtype)
    return _orientations(data, rows, cols)


def _reference_dynamic_scale(
    x: Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    rows: bool,
    cols: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    found = reference.amax(x, _WHOLE)
    if amax is not None:
        reference.record_amax(amax, found)
    scale = reference.scale_from_amax(found, torch.finfo(dtype).max, power_of_two)
    data = reference.cast(x, scale, _WHOLE, dtype, fits=True)
    return *_orientations(data, rows, cols), scale


def _orientations(data: Tensor, rows: bool, cols: bool) -> tuple[Tensor, Tensor]:
    nothing = data.new_empty((0, 0))
    return (
        data.contiguous() if rows else nothing,
        # A clone: of one row or column, contiguous() would be an alias.
        data.t().clone(memory_format=torch.contiguous_format) if cols else nothing,
    )


def _fake_given_scale(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, cols: bool, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    M, K = x.shape
    return new_codes(x, M, K, rows, dtype), new_codes(x, K, M, cols, dtype)


def _fake_dynamic_scale(
    x: Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    rows: bool,
    cols: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    return *_fake_given_scale(x, scale, dtype, rows, cols, amax), scale


cast = register(
    "cast(Tensor x, Tensor scale, ScalarType dtype, bool rows, bool cols, Tensor(a!)? amax=None)"
    " -> (Tensor data, Tensor data_t)",
    kernel=_given_scale,
    reference=_reference_given_scale,
    fake=_fake_given_scale,
)
cast_dynamic = register(
    "cast_dynamic(Tensor x, ScalarType dtype, bool power_of_two, bool rows, bool cols, "
    "Tensor(a!)? amax=None) -> (Tensor data, Tensor data_t, Tensor scale)",
    kernel=_dynamic_scale,
    reference=_reference_dynamic_scale,
    fake=_fake_dynamic_scale,
)


def shipped() -> list[Variant]:
    """The forms that the recipes launch on bfloat16, and enough others to see each flag."""
    forms = (
        # format, partials, rows, cols, record
        ("e4m3", MAX_PARTIALS, True, True, False),
        ("e5m2", MAX_PARTIALS, True, True, False),
        ("e4m3", MAX_PARTIALS, True, False, False),
        ("e4m3", 0, True, True, False),
        ("e5m2", 0, True, True, True),
        ("e4m3", 0, False, True, False),
    )
    return [_variant(*form) for form in forms]


def _variant(name: str, partials: int, rows: bool, cols: bool, record: bool) -> Variant:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    written = " and ".join(w for w, wanted in (("rows", rows), ("columns", cols)) if wanted)
    return Variant(
        f"cast{'' if partials else ' by a given scale'}, {name}, {written}"
        + (", amax" if record else ""),
        _cast_kernel,
        {
            "x_ptr": "*bf16",
            "given_ptr": "*fp32",
            "scale_ptr": "*fp32",
            "partials_ptr": "*i32",
            "data_ptr": "*u8",
            "data_t_ptr": "*i32" if cols else "*u8",
            "amax_ptr": "*i32",
            **dict.fromkeys(("M", "K", "stride_m"), "i32"),
        },
        {
            "stride_k": 1,
            **_TILE,
            "PARTIALS": partials,
            "FORMAT": TRITON_FORMATS[dtype],
            "FORMAT_MAX": torch.finfo(dtype).max,
            "POWER_OF_TWO": False,
            "WRITE_ROWS": rows,
            "WRITE_COLS": cols,
            "RECORD": record,
            "PACK": True,
        },
        _OPTIONS,
    )
