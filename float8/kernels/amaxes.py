"""`amaxes` of many tensors, and `column_amaxes` of a matrix: each in one pass.

`amax` of a tensor takes two ops, of which one writes its magnitudes. An infinity norm is the same
number, NaN included, and torch finds those of many tensors together: on CUDA in one launch for a
few dozen tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from float8.granularity import WHOLE
from float8.kernels import plain


def amaxes(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each tensor, as `amax` defines it: 0 of an empty tensor.

    The tensors, at least one, are on one device and may have any shapes. Returns float32, (number
    of tensors,).
    """
    # torch refuses to take the norm of an empty tensor, and of no tensors.
    full = [x for x in tensors if x.numel()]
    norms = iter(torch._foreach_norm(full, math.inf) if full else ())
    found = [next(norms) if x.numel() else x.new_zeros(()) for x in tensors]
    return torch.stack(found).float()


def column_amaxes(x_MK: Tensor) -> Tensor:
    """The largest magnitude of each column: float32 (1, K), 0 without rows."""
    if x_MK.device.type == "cpu" or x_MK.numel() == 0:
        return plain.amax(x_MK, (WHOLE, 1))
    return torch.linalg.vector_norm(x_MK, math.inf, 0, keepdim=True).float()
