"""Where losses on a grid of learning rates are lowest, and how much more is still near that.

The optimum is the vertex of the parabola in log2(learning rate) through the best point of the grid
and the two next to it; at an edge of the grid, or beside a rate that diverged, the best point.
"""

from __future__ import annotations

ROOM = 1.03  # a loss below that times the best one is near it


def optimum(curve: dict[int, float]) -> float:
    """Where a curve, log2(learning rate) -> loss, is lowest."""
    best = min(curve, key=curve.__getitem__)
    if best - 1 not in curve or best + 1 not in curve:
        return float(best)
    left, middle, right = (curve[best + step] for step in (-1, 0, 1))
    bend = left - 2 * middle + right
    return best + (left - right) / (2 * bend) if bend > 0 else float(best)
