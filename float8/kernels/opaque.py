"""Ops of a compiled layer on a CPU that torch.compile does not look into.

Each runs eager code: the same bits. Inductor (2.13) has five faults that they avoid:

- It converts E4M3 to bfloat16 number by number, ten times slower than `cpu.decode`.
- A float8 operand that forward and backward both convert is one node of the joint graph, and its
  bfloat16 result is saved: two bytes per element where float8 takes one, or none for a weight. So
  an operand that backward converts again is an op of its own, with its result transposed.
- It computes a scale that is a power of two again for each element that reads it, and maxima over
  columns are slow.
- It fails (an assertion in CppScheduling.try_loop_split) to fuse casts whose blocks lie along
  different dimensions.
- AOTAutograd traces a backward under the autocast of its forward, where eager code runs it without.
  Autocast would multiply in 16 bits what is to be multiplied in float32: float16 overflows. It does
  not know the ops of this file. (Switching autocast off inside the backward is refused by dynamo.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from float8.granularity import scale_shape
from float8.kernels import cpu

_LIBRARY = torch.library.Library("float8", "FRAGMENT")


def _register(schema: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"float8::{name}", fake, lib=_LIBRARY)


def _decode(data: Tensor, transposed: bool) -> Tensor:
    out = cpu.decode(data, torch.empty_like(data, dtype=torch.bfloat16))
    return out.t() if transposed else out


def _decode_fake(data: Tensor, transposed: bool) -> Tensor:
    out = torch.empty_like(data, dtype=torch.bfloat16)
    return out.t() if transposed else out


def _cast(
    x: Tensor, scale: Tensor, block: list[int], dtype: torch.dtype, fits: bool, decoded: bool
) -> Tensor:
    out = torch.empty_like(x, dtype=torch.bfloat16 if decoded else dtype)
    return cpu.cast(x, scale, tuple(block), dtype, fits, out)


def _cast_fake(
    x: Tensor, scale: Tensor, block: list[int], dtype: torch.dtype, fits: bool, decoded: bool
) -> Tensor:
    return torch.empty_like(x, dtype=torch.bfloat16 if decoded else dtype)


def _cast_transposed(
    x: Tensor, scale: Tensor, block: list[int], dtype: torch.dtype, fits: bool
) -> Tensor:
    out = torch.empty_like(x, dtype=torch.bfloat16)
    return cpu.cast(x, scale, tuple(block), dtype, fits, out).t()


def _cast_transposed_fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, dtype=torch.bfloat16).t()


def _dynamic_scale(x: Tensor, block: list[int], format_max: float, scale_format: str) -> Tensor:
    return cpu.scale_from_amax(cpu.amax(x, tuple(block)), format_max, scale_format)


def _dynamic_scale_fake(
    x: Tensor, block: list[int], format_max: float, scale_format: str
) -> Tensor:
    dtype = torch.float8_e8m0fnu if scale_format.startswith("e8m0") else torch.float32
    return x.new_empty(scale_shape(x.shape, tuple(block)), dtype=dtype)


def _float32_mm(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _float32_mm_fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _dequantized_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: list[int],
    b_block: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return cpu.dequantized_mm(
            a, a_scale, b, b_scale, tuple(a_block), tuple(b_block), bias, out_dtype
        )


def _dequantized_mm_fake(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: list[int],
    b_block: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


_register("cpu_decode(Tensor data, bool transposed) -> Tensor", _decode, _decode_fake)
_register(
    "cpu_cast(Tensor x, Tensor scale, int[] block, ScalarType dtype, bool fits, bool decoded)"
    " -> Tensor",
    _cast,
    _cast_fake,
)
_register(
    "cpu_cast_transposed(Tensor x, Tensor scale, int[] block, ScalarType dtype, bool fits)"
    " -> Tensor",
    _cast_transposed,
    _cast_transposed_fake,
)
_register(
    "cpu_dynamic_scale(Tensor x, int[] block, float format_max, str scale_format) -> Tensor",
    _dynamic_scale,
    _dynamic_scale_fake,
)
_register("float32_mm(Tensor a, Tensor b) -> Tensor", _float32_mm, _float32_mm_fake)
_register(
    "cpu_dequantized_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, int[] a_block, "
    "int[] b_block, Tensor? bias, ScalarType out_dtype) -> Tensor",
    _dequantized_mm,
    _dequantized_mm_fake,
)
# `cpu.decode` of float8 data, or the transpose of its result.
decode = torch.ops.float8.cpu_decode.default
# The transpose of ``cpu.cast(x, ...)``, in bfloat16.
cast_transposed = torch.ops.float8.cpu_cast_transposed.default
# `cpu.scale_from_amax` of `cpu.amax`.
dynamic_scale = torch.ops.float8.cpu_dynamic_scale.default
