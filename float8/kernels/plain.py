"""The ops that plain PyTorch runs, each one op to torch.compile on a CPU.

Eager and compiled code run the same function, so they have the same bits, and a compiled layer has
the nodes of a cast and of a product, as on a GPU. (Inductor's own code for them would be slower:
of torch 2.13 it converts float8 number by number, computes a scale again for each element that
reads it, and saves the converted operand for backward.)

The ops have no rules for DTensors, and on a GPU the compiler fuses what no kernel runs: such
tensors get the definition, which is made of aten ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from float8.formats import ScaleFormat
from float8.granularity import WHOLE, Block, scale_shape
from float8.kernels import cpu, definition
from float8.kernels.cublas import is_sharded

_LIBRARY = torch.library.Library("float8", "FRAGMENT")


def _register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"float8::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.float8, name).default


def _is_op_of(x: Tensor) -> bool:
    return x.is_cpu and not is_sharded(x)


# --- the parts of a cast


def _amax(x: Tensor, block: Sequence[int]) -> Tensor:
    return cpu.amax(x, tuple(block)).clone()  # of one element, amax may return x itself


def _amax_fake(x: Tensor, block: Sequence[int]) -> Tensor:
    return x.new_empty(scale_shape(x.shape, tuple(block)), dtype=torch.float32)


def _cast(x: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    return cpu.cast(x, scale, tuple(block), dtype)


def _cast_fake(x: Tensor, scale: Tensor, block: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _dequantize(data: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    return cpu.dequantize(data, scale, tuple(block), dtype)


def _dequantize_fake(data: Tensor, scale: Tensor, block: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(data, dtype=dtype)


_amax_op = _register("amax(Tensor x, int[] block) -> Tensor", _amax, _amax_fake)
_cast_op = _register(
    "cast_scaled(Tensor x, Tensor scale, int[] block, ScalarType dtype) -> Tensor",
    _cast,
    _cast_fake,
)
_dequantize_op = _register(
    "dequantize(Tensor data, Tensor scale, int[] block, ScalarType dtype) -> Tensor",
    _dequantize,
    _dequantize_fake,
)


def amax(x: Tensor, block: Block) -> Tensor:
    """`definition.amax`."""
    return _amax_op(x, block) if _is_op_of(x) else definition.amax(x, block)


def cast(x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """`definition.cast`."""
    run = _cast_op if _is_op_of(x) else definition.cast
    return run(x, scale, block, dtype)


def dequantize(data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """`definition.dequantize`."""
    if _is_op_of(data):
        return _dequantize_op(data, scale, block, dtype)
    return definition.dequantize(data, scale, block, dtype)


def amax_by_rows(x_MK: Tensor) -> Tensor:
    """The largest magnitude of a matrix, float32 (1, 1), from those of its rows.

    Inductor finds those in the kernel that writes x, elementwise or a norm, from values before
    their rounding to x's dtype. It stores them in that dtype: rounding keeps the order of numbers,
    so they are the amaxes of what it writes.
    """
    if x_MK.numel() == 0:
        return amax(x_MK, (WHOLE, WHOLE))
    rows_M = torch.linalg.vector_norm(x_MK, math.inf, 1)
    return torch.linalg.vector_norm(rows_M, math.inf).float().reshape(1, 1)


def column_amaxes(x_MK: Tensor) -> Tensor:
    """The largest magnitude of each column: float32 (1, K), 0 without rows."""
    if x_MK.device.type == "cpu" or x_MK.numel() == 0:
        return amax(x_MK, (WHOLE, 1))
    return torch.linalg.vector_norm(x_MK, math.inf, 0, keepdim=True).float()


# --- a cast, in one orientation or both

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]  # data, scale, data_t, scale_t


def _cast_plain(
    x: Tensor,
    scale: Tensor | None,
    block: Sequence[int],
    dtype: torch.dtype,
    scale_format: str,
    row_major: bool,
    transposed: bool,
    where: Any = cpu,
) -> Outputs:
    block, outputs = tuple(block), []
    for wanted, source in ((row_major, x), (transposed, x.mT)):
        if not wanted:
            outputs += [x.new_empty((0, 0), dtype=dtype), x.new_empty((0, 0))]
        elif scale is None:
            outputs += where.cast_dynamic(source, block, dtype, scale_format)
        else:
            outputs += [where.cast(source, scale, block, dtype), x.new_empty((0, 0))]
    return tuple(outputs)  # type: ignore[return-value]


def _cast_plain_fake(
    x: Tensor,
    scale: Tensor | None,
    block: Sequence[int],
    dtype: torch.dtype,
    scale_format: str,
    row_major: bool,
    transposed: bool,
) -> Outputs:
    scale_dtype = ScaleFormat(scale_format).dtype
    outputs = []
    for wanted, source in ((row_major, x), (transposed, x.mT)):
        if not wanted:
            outputs += [x.new_empty((0, 0), dtype=dtype), x.new_empty((0, 0))]
            continue
        new = x.new_empty((0, 0))
        if scale is None:
            new = x.new_empty(scale_shape(source.shape, tuple(block)), dtype=scale_dtype)
        outputs += [torch.empty_like(source, dtype=dtype), new]
    return tuple(outputs)  # type: ignore[return-value]


_cast_plain_op = _register(
    "cast_plain(Tensor x, Tensor? scale, int[] block, ScalarType dtype, str scale_format, "
    "bool row_major, bool transposed) -> (Tensor data, Tensor scale, Tensor data_t, "
    "Tensor scale_t)",
    _cast_plain,
    _cast_plain_fake,
)


def cast_plain(
    x: Tensor,
    scale: Tensor | None,
    block: Block,
    dtype: torch.dtype,
    scale_format: str,
    row_major: bool,
    transposed: bool,
) -> Outputs:
    """Cast a matrix, or a stack of them: row-major and transposed, each as `definition.cast`.

    The arguments are those of `float8.kernels.casts.cast_operand`. With a ``scale``, that of the
    one orientation that is wanted, or of the tensor, no scales are returned.
    """
    if _is_op_of(x):
        return _cast_plain_op(x, scale, block, dtype, scale_format, row_major, transposed)
    return _cast_plain(x, scale, block, dtype, scale_format, row_major, transposed, definition)


# --- a product


def _scaled_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, a_block: Any, b_block: Any, *others: Any
) -> Tensor:
    arguments = a, a_scale, b, b_scale, tuple(a_block), tuple(b_block), *others
    if not torch.is_autocast_enabled(a.device.type):
        return cpu.scaled_mm(*arguments)
    # AOTAutograd traces a backward under the autocast of its forward, eager code runs it without.
    with torch.autocast(a.device.type, enabled=False):
        return cpu.scaled_mm(*arguments)


def _scaled_mm_fake(a: Tensor, a_scale: Tensor, b: Tensor, *others: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=others[-1])


_scaled_mm_op = _register(
    "scaled_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, int[] a_block, int[] b_block, "
    "Tensor? bias, ScalarType out_dtype) -> Tensor",
    _scaled_mm,
    _scaled_mm_fake,
)


def scaled_mm(a_MK: Tensor, *others: Any) -> Tensor:
    """`definition.scaled_mm`, whose arguments these are, on every device."""
    run = definition.scaled_mm if is_sharded(a_MK) else _scaled_mm_op
    return run(a_MK, *others)
