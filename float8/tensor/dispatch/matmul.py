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
    return _addmm(func, None, a, b)


@implements(aten.addmm.default)
def _addmm(
    func: Any, bias: Tensor | None, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    is_float8 = [isinstance(x, Float8Tensor) for x in (a, b, bias)]
    if not isinstance(a, Float8Tensor) or not isinstance(b, Float8Tensor) or is_float8[2]:
        kinds = ["a Float8Tensor" if each else "a Tensor" for each in is_float8]
        raise ValueError(
            f"{func}: the left operand is {kinds[0]}, the right operand {kinds[1]}, the bias "
            f"{kinds[2]}; float8 multiplies float8 only, with a plain bias. Cast the plain one "
            "with Float8Tensor.from_high_precision, or call .dequantize() on the other"
            + blame((a, b))
        )
    shapes = [tuple(x.shape) for x in (a, b, bias) if x is not None]
    fits = len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][1] == shapes[1][0]
    fits_bias = len(shapes) == 2 or shapes[2] == shapes[1][1:]
    if not fits or not fits_bias or a.dtype != b.dtype or beta != 1 or alpha != 1:
        raise ValueError(  # of a TypeError, a @ b would show its own text only
            f"{func}: shapes (a, b and bias) {shapes}, dtypes {a.dtype} and {b.dtype}, beta={beta} "
            f"and alpha={alpha} do not multiply; expected (M, K), (K, N) and (N,) of one dtype, "
            "and 1, 1"
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
