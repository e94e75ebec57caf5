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
from float8.tensor.running_module import hint_of_weights
from float8.tensor.tensor import PLAIN_BASE, Float8Tensor, implements

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
        raise ValueError(  # of a TypeError, a @ b would show its own text only
            f"{func}: float8 multiplies two Float8Tensors (M, K) and (K, N) of one dtype, and adds "
            f"a plain bias, with beta=alpha=1; a, b and bias are Float8Tensors: {is_float8}, a and "
            f"b {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}. Cast with "
            "Float8Tensor.from_high_precision, or call .dequantize()"
            f"{hint_of_weights((a, b))}. {PLAIN_BASE}"
        )
    a8_MK, b8_KN = [kernels.Float8Matrix(x.float8_data, x.scale, x.block) for x in (a, b)]
    return kernels.scaled_mm(a8_MK, b8_KN.t(), bias, out_dtype=a.dtype)
