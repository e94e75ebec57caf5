"""What ``torch._scaled_mm`` is handed: operands and scales in the layouts that cuBLASLt reads.

Legend: ``a`` (M, K) and ``b`` (N, K), the contraction K last; scales ``ceil(shape / block)``.

The library reads ``a`` row-major and ``b.T`` column-major, from addresses that are multiples of 16
bytes, with K and N multiples of 16 (cuBLASLt documentation, "FP8 data types"). Everything else is
copied, or padded with zeros, into that form here. Scales, too, have layouts of their own, from
which torch tells what they are: see `_blockwise_scales`.
"""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.granularity import WHOLE, Block

ALIGNMENT = 16


def multiply(
    a_MK: Tensor,
    a_scale: Tensor,
    b_NK: Tensor,
    b_scale: Tensor,
    a_block: Block,
    b_block: Block,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """`float8.kernels.scaled_mm.scaled_mm` by ``torch._scaled_mm``; odd sizes are padded."""
    columns, inner = b_NK.shape
    if columns % ALIGNMENT or inner % ALIGNMENT:
        a_MK = pad_codes(a_MK, 0, -inner % ALIGNMENT)
        b_NK, b_scale, bias_N = _pad_b(b_NK, b_scale, b_block, bias_N)
    is_blockwise = a_block[1] != WHOLE
    if is_blockwise:
        if (128, 128) in (a_block, b_block) or a_MK.shape[0] == 1:
            a_MK, a_scale = _whole_rows_of_scales(a_MK, a_scale)
            b_NK, b_scale = _whole_rows_of_scales(b_NK, b_scale)
        a_scale = _blockwise_scales(a_scale, a_block)
        b_scale = _blockwise_scales(b_scale, b_block).t()
    elif a_block[0] == b_block[0] == WHOLE:
        a_scale, b_scale = a_scale.reshape(()), b_scale.reshape(())
    else:
        a_scale = contraction_last(a_scale.expand(a_MK.shape[0], 1))
        b_scale = contraction_last(b_scale.expand(b_NK.shape[0], 1)).reshape(1, -1)
    # torch fuses a bias of the output's own 16-bit type into tensorwise and rowwise products.
    fuses_bias = (
        bias_N is not None and not is_blockwise and bias_N.dtype == out_dtype != torch.float32
    )
    out = torch._scaled_mm(
        contraction_last(a_MK),
        contraction_last(b_NK).t(),
        scale_a=a_scale,
        scale_b=b_scale,
        bias=bias_N if fuses_bias else None,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )
    if bias_N is not None and not fuses_bias:
        out = (out + bias_N).to(out_dtype)
    return out if out.shape[1] == columns else out.narrow(1, 0, columns)


def contraction_last(x: Tensor) -> Tensor:
    """A row-major matrix that starts at a multiple of 16 bytes: x itself, or a copy.

    Storages start aligned (torch's allocator sees to it), parts of them may not. Compilers do not
    trace the question; what they hand over starts its storage.
    """
    # By strides: one row of any strides counts as contiguous, and hardware reads the strides.
    is_aligned = torch.compiler.is_compiling() or (
        x.storage_offset() * x.element_size() % ALIGNMENT == 0
    )
    if is_aligned and x.stride() == (x.shape[1], 1):
        return x
    if x.element_size() == 1 and x.stride(0) == 1 and not is_sharded(x):
        _load_transpose()
        return torch.ops.float8.transpose.default(x.t())
    # Spelt as a clone: Tensor.contiguous() needs a CUDA build even for FakeTensors.
    return x.clone(memory_format=torch.contiguous_format)


def is_sharded(x: Tensor) -> bool:
    """Whether x is a DTensor, for which the kernels have no sharding rules: aten has."""
    return hasattr(x, "device_mesh")  # by name: importing DTensor costs most of a second


def _load_transpose() -> None:
    importlib.import_module("float8.kernels.gpu.transpose")


# For torch.compile: run once, while tracing. See `float8.kernels.scaled_mm.architecture`.
_load_transpose._dynamo_marked_constant = True  # type: ignore[attr-defined]


def pad_codes(data: Tensor, rows: int, cols: int) -> Tensor:
    """Float8 codes with so many rows and columns of zeros more."""
    # Code 0 is the value 0 in every format; padding is defined for bytes, not for float8.
    return F.pad(data.view(torch.uint8), (0, cols, 0, rows)).view(data.dtype)


def _pad_b(
    b_NK: Tensor, scale: Tensor, block: Block, bias_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows = -b_NK.shape[0] % ALIGNMENT
    data = pad_codes(b_NK, rows, -b_NK.shape[1] % ALIGNMENT)
    if block[0] == 1:
        scale = F.pad(scale, (0, 0, 0, rows), value=1.0)
    elif block[0] != WHOLE:
        missing = -(-data.shape[0] // block[0]) - scale.shape[0]
        scale = F.pad(scale, (0, 0, 0, missing), value=1.0)
    return data, scale, None if bias_N is None else F.pad(bias_N, (0, rows))


def _whole_rows_of_scales(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    # cuBLASLt reads 128x128 scales in rows aligned to 16 bytes, whatever torch lets through, and
    # otherwise returns wrong numbers (pytorch/pytorch#166752): pad the contraction with zeros. The
    # 1x128 scales of a single row have the shape of 128x128 ones, for which torch takes them.
    missing = -scale.shape[1] % 4
    if not missing:
        return data, scale
    padded = pad_codes(data, 0, (scale.shape[1] + missing) * 128 - data.shape[1])
    return padded, F.pad(scale, (0, missing), value=1.0)


def _blockwise_scales(scale: Tensor, block: Block) -> Tensor:
    """Scales as torch tells them apart: 1x128 with the rows contiguous, 128x128 the columns."""
    return contraction_last(scale.t()).t() if block[0] == 1 else contraction_last(scale)
