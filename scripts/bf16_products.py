"""bf16 matrix products at the speed of float32's, on a CPU that has no units for bf16.

A bf16 matrix unit multiplies exactly, adds in float32 and rounds the sum once:

    y_MN = bf16(sum_k float32(a_MK) * float32(b_KN))

A product of two bf16 numbers, 8 bits each, has 16 bits and so is exact in float32's 24: a float32
product of the same operands, rounded, is the same sum in another order. Where there is no such unit
torch takes 4 to 40 times as long for a bf16 product as for this one (measured, with AVX2, forward
and both gradients of the demo's layers), which is most of a training step.

`Bf16Products` is a dispatch mode: it sees the products that autograd makes, not the user's calls
only. It does not reach into compiled graphs, where it is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


class Bf16Products(TorchDispatchMode):
    """While it is on, bf16 products are computed in float32 and rounded once."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS and all(x.dtype == torch.bfloat16 for x in args):
            left, right = args
            return func(left.float(), right.float()).bfloat16()
        return func(*args, **(kwargs or {}))
