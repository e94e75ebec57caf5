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

`cast_dynamic` is two launches. The first writes one partial amax per program. Every program of the
second reduces those again, two kilobytes from cache, and computes the scale itself: nothing is
zeroed, copied or waited for between the launches. The second begins at the end of x, which is still
in the L2 cache (`jit.tile_of_program`): so a large x is read less than twice from memory, and a
small one once. ``jit.py`` writes both orientations.

The matrices of a stack (E, M, K), such as the weights of experts, have a scale each, (E, 1, 1).
They take the same launches as one; so do those of `cast_rowwise` and `cast_blockwise`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import WHOLE
from float8.kernels import definition
from float8.kernels.gpu.amax import partial_amaxes
from float8.kernels.gpu.jit import (
    amax_bits_of,
    load_4_rows,
    outputs_of_matrix,
    place_of_tile,
    reciprocal,
    scale_of_tensor,
    tile_of_program,
    to_float32,
    write_codes,
)
from float8.kernels.gpu.launch import (
    NO_FUSION,
    check_device,
    count_of,
    is_transposed,
    launch,
    new_data,
    one_scale_arguments,
    register,
    sizes_of,
    tiles_of,
)

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
    stride_e,
    stride_m,
    stride_k,
    stride_given,  # 0: all matrices have one given scale
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
    tile, e = tile_of_program()
    first_m4, m, k = place_of_tile(tile, K, ROWS_BY_4, COLS)
    xs = load_4_rows(x_ptr + e * stride_e, m, k, M, K, stride_m, stride_k, PARTIALS > 0)
    ys = to_float32(xs)
    scale = scale_of_tensor(
        given_ptr + e * stride_given, scale_ptr + e, partials_ptr + e * PARTIALS, amax_ptr,
        FORMAT_MAX, POWER_OF_TWO, PARTIALS, RECORD, PARTIALS > 0,
    )  # fmt: skip
    factor = reciprocal(scale, POWER_OF_TWO and PARTIALS > 0)
    data_ptr, data_t_ptr = outputs_of_matrix(data_ptr, data_t_ptr, e, M, K, PACK)
    write_codes(
        ys, factor, data_ptr, data_t_ptr, first_m4, k, M, K,
        ROWS_BY_4, FORMAT, FORMAT_MAX, PARTIALS > 0, WRITE_ROWS, WRITE_COLS, PACK,
    )  # fmt: skip
    if RECORD and not PARTIALS:
        tl.atomic_max(amax_ptr, tl.max(amax_bits_of(ys)), sem="relaxed")


Outputs = tuple[Tensor, Tensor, Tensor]  # data, data_t, scale


def new_outputs(x: Tensor, dtype: torch.dtype, rows: bool, cols: bool) -> Outputs:
    """Empty results of a cast by one scale."""
    M, K = x.shape[-2:]
    scale = new_data(x, 1, 1, True, torch.float32)
    return new_data(x, M, K, rows, dtype), new_data(x, K, M, cols, dtype), scale


def define(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, power_of_two: bool, rows: bool,
    cols: bool, amax: Tensor | None,
) -> Outputs:  # fmt: skip
    """A cast by one scale in plain PyTorch; ``scale`` None computes it from x."""
    block = _WHOLE if x.dim() == 2 else (1, *_WHOLE)
    found = definition.amax(x, block)
    if amax is not None:
        definition.record_amax(amax, found)
    if scale is None:
        scale_format = definition.scale_format_of(power_of_two)
        scale = definition.scale_from_amax(found, torch.finfo(dtype).max, scale_format)
    scale = scale.reshape(-1, *[1] * (x.dim() - 1)).clone()
    data = definition.cast(x, scale, block, dtype)
    nothing = data.new_empty((0, 0))
    return (
        data.contiguous() if rows else nothing,
        # A clone: of one row or column, contiguous() would be an alias.
        data.mT.clone(memory_format=torch.contiguous_format) if cols else nothing,
        scale,
    )


def _launch(
    x: Tensor, outputs: Outputs, given: Tensor | None, partials: Tensor | None,
    power_of_two: bool, amax: Tensor | None,
) -> None:  # fmt: skip
    data, data_t, scale = outputs
    if is_transposed(x):
        x, data, data_t = x.mT, data_t, data
    pointers, constants = one_scale_arguments(
        data, data_t, scale, given, partials, amax, power_of_two
    )
    launch(
        _cast_kernel, (tiles_of(x, _TILE), count_of(x)), x, *pointers, *sizes_of(x),
        int(given is not None and given.numel() > 1), **_TILE, **constants,
        WRITE_ROWS=data.numel() > 0, **_OPTIONS,
    )  # fmt: skip


def _cast(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, cols: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_device("cast", x, scale=scale, amax=amax)
    data, data_t = _cast_fake(x, scale, dtype, rows, cols)
    if x.numel() > 0:
        _launch(x, (data, data_t, scale), scale, None, False, amax)
    return data, data_t


def _cast_definition(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, cols: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return define(x, scale, dtype, False, rows, cols, amax)[:2]


def _cast_fake(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, cols: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return new_outputs(x, dtype, rows, cols)[:2]


def _cast_dynamic(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, rows: bool, cols: bool,
    amax: Tensor | None = None,
) -> Outputs:  # fmt: skip
    check_device("cast_dynamic", x, amax=amax)
    if x.numel() == 0:
        return _cast_dynamic_definition(x, dtype, power_of_two, rows, cols, amax)
    outputs = new_outputs(x, dtype, rows, cols)
    _launch(x, outputs, None, partial_amaxes(x), power_of_two, amax)
    return outputs


def _cast_dynamic_definition(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, rows: bool, cols: bool,
    amax: Tensor | None = None,
) -> Outputs:  # fmt: skip
    return define(x, None, dtype, power_of_two, rows, cols, amax)


def _cast_dynamic_fake(
    x: Tensor, dtype: torch.dtype, power_of_two: bool, rows: bool, cols: bool,
    amax: Tensor | None = None,
) -> Outputs:  # fmt: skip
    return new_outputs(x, dtype, rows, cols)


cast = register(
    "cast(Tensor x, Tensor scale, ScalarType dtype, bool rows, bool cols, "
    "Tensor(a!)? amax=None) -> (Tensor data, Tensor data_t)",
    kernel=_cast,
    definition=_cast_definition,
    fake=_cast_fake,
)
cast_dynamic = register(
    "cast_dynamic(Tensor x, ScalarType dtype, bool power_of_two, bool rows, bool cols, "
    "Tensor(a!)? amax=None) -> (Tensor data, Tensor data_t, Tensor scale)",
    kernel=_cast_dynamic,
    definition=_cast_dynamic_definition,
    fake=_cast_dynamic_fake,
)
