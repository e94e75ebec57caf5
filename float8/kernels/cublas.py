"""The operands and scales of ``torch._scaled_mm``, in the layouts that cuBLASLt reads.

Legend: ``a`` (M, K) and ``b`` (N, K), the contraction K last; scales ``ceil(shape / block)``, or
E8M0 scales as `swizzled` returns them.

The library reads ``a`` row-major and ``b.T`` column-major, from addresses that are multiples of 16
bytes, with K and N multiples of 16 (cuBLASLt documentation, "FP8 data types"). With 1x128 and
128x128 scales M must be a multiple of 4 too ("128-element 1D and 128x128 2D block scaling for FP8
data types" there), which torch does not check. Operands of any other form are copied, or padded
with zeros.

cuBLASLt reads 128x128 scales in rows that are aligned to 16 bytes: four scales. Where the number of
blocks of the contraction is no multiple of 4, ``torch._scaled_mm`` gives wrong results without an
error (pytorch#166752), and refuses scales with padded rows (is_blockwise_128x128_scaling of
ATen/native/cuda/ScaledBlas.cpp). ``torch.nn.functional.scaled_mm`` takes exactly these, and runs
blockwise products in the op `cublas_blockwise_mm`: scales are padded, and no operand is copied. The
op is opaque to torch.compile, because inductor of torch 2.13 lowers ``scaled_mm`` to
``_scaled_mm``; its Triton template for 1x128 scales ignores their strides, which max-autotune with
persistent TMA would choose (pytorch#193802, pytorch#195751); and torch's shape function
(_check_scaled_mm_sizes_v2, 2.11 and 2.13) refuses sizes that are no multiples of 128, which the
CUDA function takes.

MX products take any M, and a last block that is shorter (torch's tests,
test_blockwise_mxfp8_nvfp4_mxfp4_numerics: M of 2 and 197, K of 240). ``torch._scaled_mm`` runs
them, not ``torch.nn.functional.scaled_mm``: inductor of torch 2.13 refuses the swizzled scales of
the latter (torch/_inductor/kernel/mm.py, `tuned_scaled_mm_v2`). Both end in the same call of
cuBLASLt.

On AMD gfx95 ``torch._scaled_mm`` gives MX products to hipBLASLt, which reads as many scales, but
row-major (torch's tests, same name; ``_scaled_mm_out_cuda`` of ScaledBlas.cpp). There torch wants M
and N in multiples of 32 or, later, 16, and a contraction in multiples of 32 or, later, 128: data
are padded to 32 and 128, which also makes a row of padded scales the row that hipBLASLt reads. A
bias is not fused, since torch tests none there.

Tensorwise, rowwise and MX products fuse a bias of the result's own 16-bit type, as torch 2.11 to
2.13 do. Torch's tests run that on sm_90 with CUDA 12.9, where cuBLASLt scales the rows
(pytorch#166744: test_scaled_mm_vs_emulated_row_wise), and with fast accumulation and M of 1, 3 and
33 (test/inductor/test_fp8.py); torchao passes the bias of its MX products. cuBLASLt refuses a fused
float32 bias (CUBLAS_STATUS_NOT_SUPPORTED, pytorch#190538), and none of torch's tests fuses the bias
of a blockwise product: a separate operation adds these two.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.granularity import WHOLE, Block, ceil_div, scale_shape
from float8.kernels.matrix import BY_32, SQUARE_32, Float8Matrix
from float8.kernels.registration import define_op, load_kernels, op_on

ALIGNMENT = 16
_MX = (BY_32, SQUARE_32)
_BLOCK_ROWS = 4  # M must be a multiple of it where a scale covers 128 of the contraction


def multiply_by_torch(
    a: Float8Matrix,
    b: Float8Matrix,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """`float8.kernels.products.multiply` by ``torch._scaled_mm``; odd sizes are padded."""
    rows, columns = a.data.shape[0], b.data.shape[0]
    is_mx = a.block in _MX and b.block in _MX
    is_blockwise = a.block[1] != WHOLE and not is_mx
    is_mx_on_amd = is_mx and torch.version.hip is not None
    inner = _missing_of_contraction(b.data.shape[1], a.block)
    more_rows, more_columns = -rows % _BLOCK_ROWS if is_blockwise else 0, -columns % ALIGNMENT
    if is_mx_on_amd:
        inner = -b.data.shape[1] % 128
        more_rows, more_columns = -rows % 32, -columns % 32
    if is_mx or more_rows or inner:
        a = _padded(a, more_rows, inner, is_mx)
    if is_mx or more_columns or inner:
        b = _padded(b, more_columns, inner, is_mx)
    if bias_N is not None and more_columns:
        bias_N = F.pad(bias_N, (0, more_columns))
    can_fuse = not is_blockwise and not is_mx_on_amd
    fuses_bias = bias_N is not None and can_fuse and bias_N.dtype == out_dtype != torch.float32
    a_MK, b_NK = aligned_row_major(a.data), aligned_row_major(b.data)
    if is_blockwise:
        rows_of_scales = a.block[0], b.block[0]
        out = op_on("cublas_blockwise_mm", a_MK)(
            a_MK, a.scale, b_NK, b.scale, *rows_of_scales, out_dtype, use_fast_accum
        )
    else:
        a_scale, b_scale = (a.scale, b.scale) if is_mx else _scales_of_rows(a, b)
        out = torch._scaled_mm(
            a_MK,
            b_NK.t(),
            scale_a=a_scale,
            scale_b=b_scale,
            bias=_aligned_vector(bias_N) if bias_N is not None and fuses_bias else None,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )
    if bias_N is not None and not fuses_bias:
        out = (out + bias_N).to(out_dtype)
    if more_columns:
        out = out.narrow(1, 0, columns)
    return out.narrow(0, 0, rows) if more_rows else out


def _aligned_vector(x: Tensor) -> Tensor:
    """x, or a contiguous and aligned copy of it: torch passes only the address."""
    if x.stride(0) == 1 and _starts_aligned(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _starts_aligned(x: Tensor) -> bool:
    """Whether x starts at a multiple of 16 bytes.

    Torch's allocator aligns storages, but a view may start anywhere in a storage. Compilers do not
    trace this check; the tensors that they pass start at the beginning of a storage.
    """
    return torch.compiler.is_compiling() or (x.storage_offset() * x.element_size() % ALIGNMENT == 0)


def aligned_row_major(x: Tensor) -> Tensor:
    """Row-major matrices that start at multiples of 16 bytes: x itself, or a copy."""
    # By strides: is_contiguous() accepts one row of any strides, and hardware reads the strides.
    shape = x.shape
    wanted = (shape[-1] * shape[-2], shape[-1], 1)[-len(shape) :]
    if x.stride() == wanted and _starts_aligned(x):
        return x
    is_transposed = x.dim() == 2 and x.element_size() == 1 and x.stride(0) == 1
    if is_transposed and torch.version.hip is None and not is_sharded(x):  # AMD: without Triton
        load_kernels("transpose")
        return torch.ops.float8.transpose.default(x.t())
    # A clone: Tensor.contiguous() needs a CUDA build even for FakeTensors.
    return x.clone(memory_format=torch.contiguous_format)


def is_sharded(x: Tensor) -> bool:
    """Whether x is a DTensor, for which the kernels have no sharding rules: aten has."""
    return hasattr(x, "device_mesh")  # by name: importing DTensor costs most of a second


def pad_codes(data: Tensor, rows: int, cols: int) -> Tensor:
    """Float8 data with ``rows`` more rows and ``cols`` more columns of zeros."""
    # Code 0 is the value 0 in every format; padding is defined for bytes, not for float8.
    return F.pad(data.view(torch.uint8), (0, cols, 0, rows)).view(data.dtype)


def _missing_of_contraction(inner: int, block: Block) -> int:
    """The number of zeros to append to the contraction of a product, if it is no multiple of 16.

    A contraction along which scales vary is then padded to whole blocks of 128.
    """
    multiple = ALIGNMENT if block[1] in (WHOLE, 32) else 128
    return -inner % multiple if inner % ALIGNMENT else 0


def _padded(x: Float8Matrix, rows: int, cols: int, is_mx: bool) -> Float8Matrix:
    """An operand with ``rows`` more rows and ``cols`` more columns of zeros, with scales of 1.

    E8M0 scales are swizzled, which leaves room for 128 rows and columns.
    """
    data, scale, block = x
    if is_mx:
        swizzled = scale if scale.dim() == 1 else mx_scales(scale, block, data.shape[0])
        scale = _aligned_vector(swizzled)
    if not rows and not cols:
        return Float8Matrix(data, scale, block)
    data = pad_codes(data, rows, cols)
    if not is_mx:
        down, across = scale_shape(data.shape, block)
        missing = 0, across - scale.shape[1], 0, down - scale.shape[0]
        scale = F.pad(scale, missing, value=1.0)
    return Float8Matrix(data, scale, block)


def mx_scales(scale: Tensor, block: Block, rows: int) -> Tensor:
    """Plain scales of a matrix, or of a stack of them, as `swizzled` returns those of its rows."""
    if scale.dtype != torch.float8_e8m0fnu:
        raise ValueError(
            "scaled_mm: hardware multiplies 1x32 and 32x32 blocks with E8M0 scales only, got "
            f"{scale.dtype}; cast with ScaleFormat.E8M0, or set emulate=True"
        )
    if block[-2:] == SQUARE_32:
        if scale.shape[-2] != ceil_div(rows, 32):  # those of 1x32 would be taken for others
            raise ValueError(
                f"scaled_mm: {rows} rows in blocks of 32x32 have {ceil_div(rows, 32)} rows of "
                f"scales, got {scale.shape[-2]}"
            )
        of_rows = scale.view(torch.uint8).repeat_interleave(32, -2).narrow(-2, 0, rows)
        scale = of_rows.view(scale.dtype)
    return swizzled(scale)


def _scales_of_rows(a: Float8Matrix, b: Float8Matrix) -> tuple[Tensor, Tensor]:
    """One scale per operand, or one per row of both."""
    if a.block[0] == b.block[0] == WHOLE:
        return a.scale, b.scale
    a_scale = aligned_row_major(a.scale.expand(a.data.shape[0], 1))
    return a_scale, aligned_row_major(b.scale.expand(b.data.shape[0], 1)).reshape(1, -1)


def _cublas_blockwise_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_rows: int,
    b_rows: int,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """``torch.nn.functional.scaled_mm`` with 1x128 and 128x128 scales.

    ``a`` (M, K) and ``b`` (N, K) are contiguous; M is a multiple of 4, N of 16. ``a_rows`` and
    ``b_rows``, 1 or 128, are the rows that share a scale. The scales are float32 of shape
    ``ceil(shape / (rows, 128))``, with any strides. ``out_dtype`` is bfloat16 or float32. torch
    refuses ``use_fast_accum=True`` for these scales.
    """
    kinds = {1: F.ScalingType.BlockWise1x128, 128: F.ScalingType.BlockWise128x128}

    def by_cublas() -> Tensor:
        return F.scaled_mm(
            a,
            b.t(),
            _scales_in_fours(a_scale, a_rows),
            kinds[a_rows],
            _scales_in_fours(b_scale, b_rows),
            kinds[b_rows],
            output_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )

    if a.is_cpu or not _has_deep_gemm():
        return by_cublas()
    deep_gemm = importlib.import_module("float8.kernels.gpu.deep_gemm")
    faster: Tensor = deep_gemm.or_faster(
        by_cublas, a, a_scale, b, b_scale, a_rows, b_rows, out_dtype
    )
    return faster


@functools.cache  # the search of every folder takes 28 us, longer than a launch
def _has_deep_gemm() -> bool:
    return importlib.util.find_spec("deep_gemm") is not None


def _scales_in_fours(scale: Tensor, rows: int) -> Tensor:
    """Scales in the layouts of ``scaled_mm``: 128x128 ones transposed, with padded rows."""
    if rows == 1:  # contiguous along the rows
        return aligned_row_major(scale.t()).t()
    return aligned_row_major(F.pad(scale, (0, -scale.shape[1] % 4))).t()


cublas_blockwise_mm = define_op(
    "cublas_blockwise_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, int a_rows, "
    "int b_rows, ScalarType out_dtype, bool use_fast_accum) -> Tensor",
    _cublas_blockwise_mm,
    lambda a, _, b, *others: a.new_empty((a.shape[0], b.shape[0]), dtype=others[-2]),
)


def swizzled_size(rows: int, blocks: int) -> int:
    """The number of scales that `swizzled` returns."""
    return ceil_div(rows, 128) * 128 * (ceil_div(blocks, 4) * 4)


def swizzled(scale: Tensor) -> Tensor:
    """E8M0 scales (..., rows, blocks) of 1x32 blocks -> (..., n), as cuBLASLt reads them.

    (cuBLAS documentation, "1D block scaling factors layout"; SWIZZLE_32_4_4 in torch.) The scales
    are padded with zeros to squares of 128 rows and 4 blocks, stored one after the other. In its
    512 bytes, the scale of row r and block b is at ``(r % 32) * 16 + (r // 32) * 4 + b``. On AMD
    they are padded alike and stay row-major.
    """
    *stack, rows, blocks = scale.shape
    down, across = ceil_div(rows, 128), ceil_div(blocks, 4)
    # As bytes: torch has few operations for the dtype, and inductor no code.
    codes = F.pad(scale.view(torch.uint8), (0, across * 4 - blocks, 0, down * 128 - rows))
    if torch.version.hip is None:
        codes = codes.reshape(*stack, down, 4, 32, across, 4).movedim(-2, -4).transpose(-2, -3)
    return codes.reshape(*stack, swizzled_size(rows, blocks)).view(scale.dtype)
