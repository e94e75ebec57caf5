"""The float8 copy of a tensor by the oracle, in float64."""

from __future__ import annotations

import oracle
import torch
from torch import Tensor


def rows(x: Tensor) -> Tensor:
    """The matrix whose rows are cut into groups."""
    one_row = x.dim() == 0 or x.shape[-1] < 128
    return x.detach().reshape(1, -1) if one_row else x.detach().reshape(-1, x.shape[-1])


def copy_of(x: Tensor) -> Tensor:
    """float64, of x's shape: the exact values that `dequantize` must return."""
    codes, scale = oracle.quantize(rows(x), (1, 128), torch.float8_e4m3fn, "power_of_two")
    return oracle.values(codes, scale, (1, 128), torch.float8_e4m3fn).reshape(x.shape)
