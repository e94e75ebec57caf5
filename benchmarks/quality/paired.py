"""Differences between runs that share a seed, and how certain their mean is.

Two runs of one seed start from the same weights and see the same batches. With losses l and b of a
contender and its base, the difference of a seed is

    d = 100 (l / b - 1)                                          in per cent

and the interval of the mean over n seeds, at a confidence of 95 %, is Student's

    mean(d) +- t(n - 1) * std(d) / sqrt(n)

where std divides by n - 1, and t(k) is the 97.5 % quantile of the t distribution with k degrees of
freedom ("The probable error of a mean", Biometrika 6, 1908). Pairing removes what seeds differ by
from each other, which is more than recipes do.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.measuring.harness import Row
from benchmarks.quality.least_squares import quantile

K = TypeVar("K")


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
