"""`Metrics`: six numbers that say where in a format's range a tensor lies.

============ ==================== =================================================
name         long name            of a tensor x of n elements
============ ==================== =================================================
``mean_abs`` mean absolute value  sum |x| / n
``abs_mean`` absolute mean value  |sum x| / n
``std``      standard deviation   sqrt(sum (x - mean)^2 / (n - 1)), 0 for n = 1
``abs_max``  absolute maximum     max |x|: beyond a format's largest value, it saturates
``abs_min``  absolute minimum     min |x|: below its smallest value, it becomes zero
``numel``    number of elements   n
============ ==================== =================================================

They are computed in float32, of a float64 tensor in float64, and are NaN for n = 0. `Metrics` holds
them for a tensor and, after a backward pass, for the gradient with respect to it. The tensors
themselves are not kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from float8.tensor import Float8Tensor


class Metrics:
    """The numbers of a tensor, ``fwd``, and of its gradient, ``bwd``: None before a backward.

    Args:
        fwd_tensor: any shape, floating point.
    """

    @dataclass(frozen=True)
    class Data:
        """The numbers of one tensor."""

        mean_abs: float
        abs_mean: float
        std: float
        abs_max: float
        abs_min: float
        numel: int

    def __init__(self, fwd_tensor: Tensor) -> None:
        self.fwd = self.from_tensor(fwd_tensor)
        self.bwd: Metrics.Data | None = None

    def set_bwd(self, bwd_tensor: Tensor) -> None:
        """Stores the numbers of the gradient in place of those of an earlier backward pass."""
        self.bwd = self.from_tensor(bwd_tensor)

    def __repr__(self) -> str:
        return f"Metrics(fwd={self.fwd}, bwd={self.bwd})"

    @staticmethod
    def from_tensor(t: Tensor) -> Metrics.Data:
        """The numbers of a tensor; waits for its device once. Transforms do not see these calls."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            x = high_precision(t)
            n = x.numel()
            if n == 0:
                return Metrics.Data(math.nan, math.nan, math.nan, math.nan, math.nan, 0)
            size = x.abs()
            std = x.std() if n > 1 else torch.zeros_like(x.sum())
            found = torch.stack([size.mean(), x.mean().abs(), std, size.max(), size.min()])
            mean_abs, abs_mean, deviation, abs_max, abs_min = found.tolist()
            return Metrics.Data(mean_abs, abs_mean, deviation, abs_max, abs_min, n)

    @staticmethod
    def names() -> list[str]:
        """The names of the numbers, as attributes of `Data`."""
        return list(_LONG)

    @staticmethod
    def full_names() -> list[str]:
        """The long names, in the order of `names`."""
        return list(_LONG.values())

    @staticmethod
    def get_full_name(short_name: str) -> str:
        """The long name of a number.

        Raises:
            ValueError: no number has this name.
        """
        if short_name not in _LONG:
            raise ValueError(f"{short_name!r} is not a metric; use one of {', '.join(_LONG)}")
        return _LONG[short_name]


_LONG = {
    "mean_abs": "mean absolute value",
    "abs_mean": "absolute mean value",
    "std": "standard deviation",
    "abs_max": "absolute maximum",
    "abs_min": "absolute minimum",
    "numel": "number of elements",
}


def high_precision(t: Any) -> Tensor:
    """A tensor without graph, dense, in float32, or in float64 if it is of that; dequantised."""
    x: Tensor = t.dequantize() if isinstance(t, Float8Tensor) else t.detach()
    x = x if x.layout == torch.strided else x.to_dense()
    return x if x.dtype == torch.float64 else x.float()
