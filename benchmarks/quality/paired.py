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
from torch import Tensor

from benchmarks.measuring.harness import Row

K = TypeVar("K")

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


Observation = tuple[Mapping[str, float], float]  # coefficient -> its factor; the value observed


@dataclass(frozen=True)
class Fit:
    """Coefficients by name, and how certain they are.

    Attributes:
        coefficients: estimates.
        covariance: of the estimates, in the order of ``coefficients``.
        freedom: degrees of freedom of the errors.
    """

    coefficients: dict[str, float]
    covariance: Tensor
    freedom: int

    def combined(self, weights: Mapping[str, float]) -> tuple[float, float]:
        """``sum(weight * coefficient)``, and the half width of its interval."""
        c = torch.tensor([weights.get(n, 0.0) for n in self.coefficients], dtype=torch.float64)
        mean = sum(weight * self.coefficients[name] for name, weight in weights.items())
        return mean, quantile(self.freedom) * math.sqrt(float(c @ self.covariance @ c))


def fit(observations: Sequence[Observation]) -> Fit | None:
    """The least-squares fit; None while observations are too few to tell the coefficients."""
    names = list(dict.fromkeys(name for factors, _ in observations for name in factors))
    X = torch.tensor(
        [[factors.get(name, 0.0) for name in names] for factors, _ in observations],
        dtype=torch.float64,
    )
    y = torch.tensor([value for _, value in observations], dtype=torch.float64)
    freedom = len(observations) - len(names)
    if freedom < 1 or torch.linalg.matrix_rank(X) < len(names):
        return None
    inverse = torch.linalg.inv(X.T @ X)
    b = inverse @ X.T @ y
    variance = (y - X @ b).square().sum() / freedom
    return Fit(dict(zip(names, b.tolist(), strict=True)), variance * inverse, freedom)


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, in per cent of the base's loss, and its interval.

    Attributes:
        values: of each seed.
        diverged: runs that had no loss.
        fitted: mean and half width by another estimate than Student's, such as that of
            `recipes.gaps`.
    """

    values: tuple[float, ...]
    diverged: int = 0
    fitted: tuple[float, float] | None = None

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
        if n < 2:
            return math.inf
        return quantile(n - 1) * statistics.stdev(self.values) / math.sqrt(n)

    def within(self, limit: float) -> bool:
        """Whether the whole interval lies between -limit and limit, and no run diverged.

        A contender that is better than its base by more than that is told apart by its mean.
        """
        return not self.diverged and abs(self.mean) + self.half_width <= limit

    def target(self, limit: float) -> Row | None:
        """Whether it is `within` a limit; ``measured`` is the farther end of the interval.

        None where there is neither an interval nor a run that diverged, which misses the target.
        """
        if math.isfinite(end := abs(self.mean) + self.half_width):
            return {"target": limit, "measured": end, "met": self.within(limit)}
        return {"target": limit, "met": False} if self.diverged else None

    def columns(self, name: str) -> Row:
        """The text, the mean and the half width (None if infinite); nothing without a value."""
        if not self.values:
            return {}
        half_width = self.half_width if math.isfinite(self.half_width) else None
        return {name: str(self), f"{name}_percent": self.mean, f"{name}_half_width": half_width}

    def __str__(self) -> str:
        return interval(self.mean, self.half_width) + " %"


def interval(mean: float, half_width: float, digits: int = 2) -> str:
    """Both numbers as text; no width where there is one value alone."""
    width = f" ± {half_width:.{digits}f}" if math.isfinite(half_width) else ""
    return f"{mean:+.{digits}f}{width}"


def ends_below(line: Row, column: str, limit: float, against: str) -> list[Row]:
    """Whether the interval of a difference, or that of a single seed, ends at or below a limit.

    A run that diverged misses it. Without one and without a difference there is no target.

    Args:
        line: with the `Difference.columns` of the column, and ``diverged``.
        column: of the difference.
        limit: in per cent.
        against: what the difference is to.
    """
    target: Row = {"against": f"gap to {against}, %", "target": limit, "met": False}
    if column in line:
        end = line[f"{column}_percent"] + (line[f"{column}_half_width"] or 0.0)
        target |= {"measured": end, "met": end <= limit and not line["diverged"]}
    return [target] if column in line or line["diverged"] else []


def difference(
    rows: Sequence[Row], bases: Sequence[Row], key: str = "loss", base_key: str = "loss"
) -> Difference:
    """The paired difference of runs and their bases, in per cent; see `pairs`."""
    values = [100 * (own / base - 1) for own, base in pairs(rows, bases, key, base_key)]
    return Difference(tuple(values), sum("error" in row for row in rows))


def pairs(
    rows: Sequence[Row], bases: Sequence[Row], key: str = "loss", base_key: str = "loss"
) -> list[tuple[float, float]]:
    """Values of runs and of their bases, of those seeds that both have.

    Args:
        rows: of one contender.
        bases: of its base; runs in which only contender and seed differ.
        key: of the values.
        base_key: of those of the base.

    Raises:
        ValueError: two rows have one seed: they differ by more than that, see `settings`.
    """
    for found in (rows, bases):
        seeds = [row["run"]["seed"] for row in found]
        if len(seeds) > len(set(seeds)):
            raise ValueError(
                f"runs of one contender and setting differ by their seeds, got {seeds}"
            )
    base_of_seed = {row["run"]["seed"]: row[base_key] for row in bases if base_key in row}
    return [
        (row[key], base_of_seed[row["run"]["seed"]])
        for row in sorted(rows, key=lambda row: row["run"]["seed"])
        if key in row and row["run"]["seed"] in base_of_seed
    ]


def with_loss(rows: Iterable[Row], loss_of: Callable[[Row], float | None]) -> list[Row]:
    """The runs of rows with another loss, for `difference`; without those that lack it."""
    return [{"run": row["run"], "loss": loss} for row in rows if (loss := loss_of(row)) is not None]


def settings(rows: Sequence[Row], *varied: str) -> dict[str, list[Row]]:
    """Rows by all fields of their runs but these, in the order of their first ones.

    Args:
        rows: of a study.
        varied: fields that runs of one group may differ by; runs that lack one are among them.
    """

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
