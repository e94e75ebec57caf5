"""Differences between runs that share a seed, and how certain their mean is.

Two runs of one seed start from the same weights and see the same batches. With losses l and b of a
contender and its base, the difference of a seed is

    d = 100 (l / b - 1)                                          in per cent

and the interval of the mean over n seeds, at a confidence of 95 %, is Student's

    mean(d) +- t(n - 1) * std(d) / sqrt(n)

where std divides by n - 1, and t(k) is the 97.5 % quantile of the t distribution with k degrees of
freedom ("The probable error of a mean", Biometrika 6, 1908). Pairing removes what seeds differ by
from each other, which is more than recipes do.

`fit` says what many runs say together, by least squares: for observations y_i = x_i . b + e_i with
independent errors e_i of one variance,

    b = (X'X)^-1 X'y,   s^2 = |y - X b|^2 / (n - k),   var(c . b) = s^2 c' (X'X)^-1 c

and c . b lies within t(n - k) * sqrt(var(c . b)) of its estimate at a confidence of 95 % (any
textbook of linear regression).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from benchmarks.measuring.harness import Row

K = TypeVar("K")
Interval = tuple[float, float]  # the mean, and the half width

# The 97.5 % quantile of the t distribution with 1, 2, ... degrees of freedom (any table of it).
# fmt: off
QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)
# fmt: on


def quantile(freedom: int) -> float:
    """97.5 % of the t distribution; beyond 30 degrees of freedom that of 30, 4 % too much at most.

    Infinite without a degree of freedom.
    """
    return QUANTILES[min(freedom, len(QUANTILES)) - 1] if freedom > 0 else math.inf


def fit(
    observations: Sequence[tuple[Mapping[str, float], float]],
) -> Callable[[Mapping[str, float]], Interval] | None:
    """The least-squares fit; None while observations are too few to tell the coefficients.

    Args:
        observations: coefficient -> its factor, and the value observed.

    Returns:
        A function of weights of coefficients, which returns the estimate of their sum.
    """
    names = list(dict.fromkeys(name for factors, _ in observations for name in factors))

    def vector(factors: Mapping[str, float]) -> torch.Tensor:
        return torch.tensor([factors.get(name, 0.0) for name in names], dtype=torch.float64)

    freedom = len(observations) - len(names)
    if freedom < 1:
        return None
    X = torch.stack([vector(factors) for factors, _ in observations])
    if torch.linalg.matrix_rank(X) < len(names):
        return None
    y = torch.tensor([value for _, value in observations], dtype=torch.float64)
    inverse = torch.linalg.inv(X.T @ X)
    b = inverse @ X.T @ y
    variance = (y - X @ b).square().sum() / freedom

    def combined(weights: Mapping[str, float]) -> Interval:
        c = vector(weights)
        return float(c @ b), quantile(freedom) * math.sqrt(float(variance * (c @ inverse @ c)))

    return combined


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, in per cent of the base's loss, and its interval.

    Attributes:
        values: of each seed.
        diverged: runs that had no loss.
        fitted: mean and half width by another estimate than Student's.
    """

    values: tuple[float, ...]
    diverged: int = 0
    fitted: Interval | None = None

    @property
    def mean(self) -> float:
        if self.fitted is not None:
            return self.fitted[0]
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def half_width(self) -> float:
        """Of the interval; Student's is infinite with fewer than two seeds."""
        if self.fitted is not None:
            return self.fitted[1]
        n = len(self.values)
        return quantile(n - 1) * statistics.stdev(self.values) / math.sqrt(n) if n > 1 else math.inf

    def target(self, limit: float) -> Row | None:
        """Whether the whole interval lies within -limit and limit, and no run diverged.

        ``measured`` is the farther end. None where there is neither an interval nor a run that
        diverged, which misses the target.
        """
        if math.isfinite(end := abs(self.mean) + self.half_width):
            return {"target": limit, "measured": end, "met": not self.diverged and end <= limit}
        return {"target": limit, "met": False} if self.diverged else None

    def columns(self, name: str) -> Row:
        """The text, the mean and the half width (None if infinite); nothing without a value."""
        if not self.values:
            return {}
        half_width = self.half_width if math.isfinite(self.half_width) else None
        return {name: str(self), f"{name}_percent": self.mean, f"{name}_half_width": half_width}

    def __str__(self) -> str:
        width = f" ± {self.half_width:.2f}" if math.isfinite(self.half_width) else ""
        return f"{self.mean:+.2f}{width} %"


def difference(
    rows: Sequence[Row], bases: Sequence[Row], key: str = "loss", base_key: str = "loss"
) -> Difference:
    """The paired difference of runs and their bases, of those seeds that both have, in per cent.

    Args:
        rows: of one contender.
        bases: of its base; runs in which only contender and seed differ.
        key: of the losses; rows without it have none.
        base_key: of those of the bases.

    Raises:
        ValueError: two rows have one seed: they differ by more than that, see `settings`.
    """
    for found in (rows, bases):
        seeds = [row["run"]["seed"] for row in found]
        if len(seeds) > len(set(seeds)):
            raise ValueError(f"runs of one contender and setting differ by their seeds: {seeds}")
    of_base = {row["run"]["seed"]: row[base_key] for row in bases if base_key in row}
    values = [
        100 * (row[key] / of_base[row["run"]["seed"]] - 1)
        for row in sorted(rows, key=lambda row: row["run"]["seed"])
        if key in row and row["run"]["seed"] in of_base
    ]
    return Difference(tuple(values), sum("error" in row for row in rows))


def settings(rows: Sequence[Row], *varied: str) -> dict[str, list[Row]]:
    """Rows by all fields of their runs but these, in the order of their first ones."""

    def rest(row: Row) -> str:
        fields = {field: value for field, value in row["run"].items() if field not in varied}
        return json.dumps(fields, sort_keys=True)

    return grouped(rows, rest)


def by_contender(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the contender of their runs."""
    return grouped(rows, lambda row: str(row["run"]["contender"]))


def grouped(rows: Iterable[Row], key: Callable[[Row], K]) -> dict[K, list[Row]]:
    """Rows by a key, in the order of their first ones."""
    found: dict[K, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found
