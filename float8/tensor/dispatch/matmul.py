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
from float8.tensor.tensor import REMEDY_OF_WEIGHTS, Float8Tensor, implements

aten = torch.ops.aten


@implements(aten.mm.default)
def _mm(func: Any, a: Tensor, b: Tensor) -> Tensor:
    return _addmm(func, None, a, b)


@implements(aten.addmm.default)
def _addmm(
    func: Any, bias: Tensor | None, a: Any, b: Any, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    is_float8 = [isinstance(x, Float8Tensor) for x in (a, b, bias)]
    fits = is_float8 == [True, True, False] and a.dtype == b.dtype and a.shape[1:] == b.shape[:1]
    if not fits or (beta, alpha) != (1, 1):
        given = [f"{type(x).__name__} {tuple(x.shape)} ({x.dtype})" for x in (a, b)]
        raise ValueError(  # of a TypeError, a @ b would show its own text only
            f"{func}: float8 multiplies two Float8Tensors (M, K) and (K, N) of one dtype, a plain "
            f"bias and beta=alpha=1, got {' and '.join(given)}; call .dequantize()"
            f"{REMEDY_OF_WEIGHTS}"
        )
    a8_MK, b8_KN = [kernels.Float8Matrix(x.float8_data, x.scale, x.block) for x in (a, b)]
    return kernels.scaled_mm(a8_MK, b8_KN.t(), bias, out_dtype=a.dtype)
