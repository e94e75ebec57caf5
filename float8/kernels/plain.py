"""The ops that plain PyTorch runs: their schemas and fakes. Each is one op to torch.compile.

Eager and compiled code run the same function, so they have the same bits, and a compiled layer has
the nodes of a cast and of a product, as on a GPU. (Inductor's own code for them would be slower:
of torch 2.13 it converts float8 number by number, computes a scale again for each element that
reads it, and saves the converted operand for backward.)

The ops have no rules for DTensors, and on a GPU the compiler fuses what no kernel runs: such
tensors get the definition, which is made of aten ops.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8.formats import ScaleFormat
from float8.granularity import WHOLE, Block, scale_shape
from float8.kernels import cpu, definition
from float8.kernels.cublas import is_sharded
from float8.kernels.registration import define_op


def _is_op_of(x: Tensor) -> bool:
    return x.is_cpu and not is_sharded(x)


# --- the parts of a cast


def _amax_fake(x: Tensor, block: Sequence[int]) -> Tensor:
    return x.new_empty(scale_shape(x.shape, tuple(block)), dtype=torch.float32)


def _empty_like(x: Tensor, scale: Tensor, block: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


_amax_op = define_op("amax(Tensor x, int[] block) -> Tensor", cpu.amax, _amax_fake)
_cast_op = define_op(
    "cast_scaled(Tensor x, Tensor scale, int[] block, ScalarType dtype) -> Tensor",
    cpu.cast_by_scale,
    _empty_like,
)
_dequantize_op = define_op(
    "dequantize(Tensor data, Tensor scale, int[] block, ScalarType dtype) -> Tensor",
    cpu.dequantize,
    _empty_like,
)


def amax(x: Tensor, block: Block) -> Tensor:
    """`definition.amax`."""
    return _amax_op(x, block) if _is_op_of(x) else definition.amax(x, block)


def cast_by_scale(x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """`definition.cast_by_scale`."""
    run = _cast_op if _is_op_of(x) else definition.cast_by_scale
    return run(x, scale, block, dtype)


def dequantize(data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """`definition.dequantize`."""
    if _is_op_of(data):
        return _dequantize_op(data, scale, block, dtype)
    return definition.dequantize(data, scale, block, dtype)


def column_amaxes(x_MK: Tensor) -> Tensor:
    """The largest magnitude of each column: float32 (1, K), 0 without rows."""
    if x_MK.device.type == "cpu" or x_MK.numel() == 0:
        return amax(x_MK, (WHOLE, 1))
    return torch.linalg.vector_norm(x_MK, math.inf, 0, keepdim=True).float()


# --- a cast, in one orientation or both


def _cast_both_fake(
    x: Tensor,
    scale: Tensor | None,
    block: Sequence[int],
    dtype: torch.dtype,
    scale_format: str,
    swizzled: bool,
    row_major: bool,
    transposed: bool,
    finds_amax: bool,
) -> cpu.CastOutputs:
    if x.device.type != "cpu":  # in the layouts that a GPU's GEMMs read
        layouts = importlib.import_module("float8.kernels.gpu.cast")
        how = block, dtype, scale_format, swizzled, row_major, transposed, finds_amax
        return layouts.empty_outputs(x, scale, *how)
    block = (1, *block)[-x.dim() :]
    is_whole, scale_dtype = block[-2:] == (WHOLE, WHOLE), ScaleFormat(scale_format).dtype
    outputs: list[Tensor | None] = []
    for wanted, source, has_scale in (
        (row_major, x, is_whole or row_major),
        (transposed, x.mT, transposed and not is_whole),
    ):
        outputs.append(torch.empty_like(source, dtype=dtype) if wanted else None)
        shape = scale_shape(source.shape, block) if has_scale and scale is None else None
        outputs.append(None if shape is None else x.new_empty(shape, dtype=scale_dtype))
    amax = x.new_empty(scale_shape(x.shape, block), dtype=torch.float32) if finds_amax else None
    return *outputs, amax  # type: ignore[return-value]


define_op(
    "cast(Tensor x, Tensor? scale, int[] block, ScalarType dtype, str scale_format, bool swizzled, "
    "bool row_major, bool transposed, bool finds_amax) -> "
    "(Tensor data, Tensor scale_out, Tensor data_t, Tensor scale_t, Tensor amax)",
    cpu.cast_both,
    _cast_both_fake,
    "CPU",
)


# --- a product


def _scaled_mm_fake(a: Tensor, a_scale: Tensor, b: Tensor, *others: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=others[-1])


define_op(
    "scaled_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, int[] a_block, int[] b_block, "
    "Tensor? bias, ScalarType out_dtype) -> Tensor",
    cpu.scaled_mm,
    _scaled_mm_fake,
)
