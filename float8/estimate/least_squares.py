"""Non-negative least squares: times cannot be made of negative costs.

The smallest ``sum_i (A x - b)_i^2`` over x >= 0, by the active-set method of Lawson and Hanson
("Solving Least Squares Problems", 1974, chapter 23): unknowns enter one at a time, the one along
which the error falls fastest first; those that a free solution would make negative leave at 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_TOLERANCE = 1e-10


def explain(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """What each count costs, so that costs times counts come nearest to the times, relatively.

    ::

        seconds[i] ~ sum_j counts[i][j] * cost[j],   cost >= 0

    Args:
        counts: one row per time; of any magnitude, columns may be all zero.
        seconds: the times to explain, above 0. An error of 10 % counts alike for all of them.

    Returns:
        one cost per column; 0 for what the times are better explained without.
    """
    if not counts:
        raise ValueError("there is nothing to fit: no time was given")
    times = torch.tensor(seconds, dtype=torch.float64)
    matrix = torch.tensor(counts, dtype=torch.float64) / times.unsqueeze(1)
    sizes = matrix.amax(0)
    scaled = matrix / sizes.where(sizes > 0, 1.0)  # counts of 10^12 and of 1 then weigh alike
    costs = nonnegative(scaled, torch.ones(len(seconds), dtype=torch.float64))
    return [float(cost) for cost in costs / sizes.where(sizes > 0, 1.0)]


def nonnegative(a: Tensor, b: Tensor) -> Tensor:
    """The x >= 0 of least ``|a @ x - b|``: a (rows, unknowns), b (rows,), float64."""
    x = torch.zeros(a.shape[1], dtype=a.dtype)
    free = torch.zeros(a.shape[1], dtype=torch.bool)
    for _ in range(3 * a.shape[1] + 1):
        downhill = (a.t() @ (b - a @ x)).masked_fill(free, 0.0)
        if float(downhill.max()) <= _TOLERANCE:
            break
        free[int(downhill.argmax())] = True
        x = _settle(a, b, x, free)
    return x


def _settle(a: Tensor, b: Tensor, x: Tensor, free: Tensor) -> Tensor:
    """The best x in which only ``free`` unknowns differ from 0; those that would be < 0 leave."""
    while bool(free.any()):
        target = torch.zeros_like(x)
        target[free] = torch.linalg.lstsq(a[:, free], b.unsqueeze(1)).solution.squeeze(1)
        negative = free & (target <= 0)
        if not bool(negative.any()):
            return target
        step = (x[negative] / (x[negative] - target[negative])).min()
        x = x + step * (target - x)
        free &= x > _TOLERANCE
        x = x.where(free, 0.0)
    return x
