"""Products of two Float8Tensors, which run as one scaled float8 GEMM.

``a @ b``: the contraction is a's last and b's first dimension, so ``b`` is handed to the kernel as
its transpose, with its block transposed; ``w.t()`` of a row-major weight is what hardware likes
best. The result is a plain tensor of a's dtype. A Float8Tensor is never multiplied with a
high-precision tensor: that would need a silent conversion of one of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8 import kernels
from float8.granularity import transpose_block
from float8.tensor.tensor import Float8Tensor, blame, implements

aten = torch.ops.aten


@implements(aten.mm.default)
def _mm(func: Any, a: Tensor, b: Tensor) -> Tensor:
    return _product(func, a, b, None)


@implements(aten.addmm.default)
def _addmm(
    func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    if beta != 1 or alpha != 1:
        raise ValueError(f"{func} of Float8Tensors has beta and alpha of 1, got {beta}, {alpha}")
    return _product(func, a, b, bias)


def _product(func: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if not isinstance(a, Float8Tensor) or not isinstance(b, Float8Tensor):
        raise _mixed(func, a, b)
    if isinstance(bias, Float8Tensor):
        raise TypeError(f"{func}: the bias is a Float8Tensor; call .dequantize() on it first")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{func}: shapes {tuple(a.shape)} and {tuple(b.shape)} do not multiply; expected "
            "(M, K) and (K, N)"
        )
    if a.dtype != b.dtype:  # a ValueError: of a TypeError, a @ b would show its own text only
        raise ValueError(
            f"{func}: the operands stand for {a.dtype} and {b.dtype}; convert one with .to(dtype)"
        )
    if bias is not None and bias.shape != b.shape[1:]:
        raise ValueError(
            f"{func}: the bias has shape {tuple(bias.shape)}, expected {tuple(b.shape[1:])}"
        )
    return kernels.scaled_mm(
        a.float8_data,
        a.scale,
        b.float8_data.t(),
        b.scale.t(),
        a.block,
        transpose_block(b.block),
        bias,
        out_dtype=a.dtype,
    )


def _mixed(func: Any, a: Tensor, b: Tensor) -> ValueError:
    names = [
        f"{name} is a {type(x).__name__}({x.dtype}, {tuple(x.shape)})"
        for name, x in (("the left operand", a), ("the right operand", b))
    ]
    return ValueError(
        f"{func}: {names[0]}, {names[1]}; float8 multiplies float8 only. Cast the plain one with "
        "Float8Tensor.from_high_precision, or call .dequantize() on the other; where it comes from "
        "RMSNormCast, LayerNormCast or SwiGLUCast, convert the layer that reads it, or use the "
        "plain norm or gate" + blame((a, b))
    )
