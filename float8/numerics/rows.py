"""What is said of one cast: a `Row`, the unit that every table, picture and file is made of.

A row is one operand of one layer, cast for one product; x is the operand in the compute dtype,
x' = code * scale what the product reads, both over the finite elements of all calls and ranks that
the row stands for::

    SQNR      = 10 log10( sum x^2 / sum (x - x')^2 )                               in dB
    kurtosis  = E[(x - mean)^4] / var^2                                            3 for a Gaussian
    staleness = log2( amax / (scale * max(format)) )                               in octaves

SQNR says how much of the operand survived: about 32 dB is what E4M3 gives where nothing saturates
or flushes, 26 dB E5M2 (a uniform error over steps of 2^-3, of 2^-2). Kurtosis says why a scale for
the whole tensor may not suffice: outliers. Staleness says how far a delayed or static scale is from
the values: above 0 they saturate, below it the upper end of the format is unused.

SQNR and kurtosis are ratios of sums. `Row.sums` keeps these, in float64, so that rows of several
ranks merge exactly (`merged`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from float8.formats import FORMATS
from float8.kernels.sqnr import decibels

OPERANDS = ("input", "weight", "grad_output")
Key = tuple[str, str, str]


class Histogram(NamedTuple):
    """How many nonzero finite elements have which ``floor(log2 |x|)``.

    ``counts[i]`` is of the exponent ``lowest + i``; the ends are not empty.
    """

    lowest: int = 0
    counts: tuple[int, ...] = ()


EMPTY = Histogram()


class Sums(NamedTuple):
    """Sums over finite elements, in float64: of the powers of x, and of ``(x - x')^2``.

    ``noise`` is None where there is no operand in high precision to compare with.
    """

    first: float
    second: float
    third: float
    fourth: float
    noise: float | None


@dataclass(frozen=True)
class Row:
    """The statistics of one cast.

    Args:
        layer: its name in the model.
        operand: "input", "weight" or "grad_output".
        gemm: the product that the cast feeds, "output", "grad_input" or "grad_weight". A second
            use of an operand has a row of its own only where it is cast otherwise.
        format: such as "e4m3".
        scaling: "dynamic", "delayed" or "static"; "float8" where the operand came in float8.
        granularity: "tensorwise", "rowwise" or the extents of a block, as "1x128".
        elements: how many were cast, over all calls.
        calls: how often.
        zeros, nonfinite: how many elements were zero, inf or NaN before the cast.
        amax: the largest finite magnitude.
        scale_min, scale_max: of the scales in use (``value = code * scale``); 0 without elements.
        flushed: the fraction of the elements that were not zero and became zero.
        saturated: the fraction of the elements that were beyond the range, by more than rounding.
        sqnr: in dB; inf where the cast was exact, -inf where it left nothing finite. None where
            the operand was all zero.
        kurtosis: None where the elements are all equal, or so nearly (to 0.3 %) that their sums
            cannot tell.
        staleness: in octaves; of the call where it was largest. None unless the scale is delayed
            or static and the operand not all zero.
        histogram: of the operand in powers of two.
        sums: what rows are merged by; None in a row made by hand.

    ``flushed``, ``saturated`` and ``sqnr`` are None for an operand that came in float8: there is
    nothing in high precision to compare with, and the other numbers are those of ``code * scale``.
    """

    layer: str
    operand: str
    gemm: str
    format: str
    scaling: str
    granularity: str
    elements: int
    calls: int
    zeros: int
    nonfinite: int
    amax: float
    scale_min: float
    scale_max: float
    flushed: float | None
    saturated: float | None
    sqnr: float | None
    kurtosis: float | None
    staleness: float | None
    histogram: Histogram = EMPTY
    sums: Sums | None = None

    @property
    def key(self) -> Key:
        """What tells it from the other rows of a report, but for how the operand came."""
        return self.layer, self.operand, self.gemm

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest magnitude that the format represents under its scales."""
        fmt = _FORMATS[self.format]
        return fmt.smallest_subnormal * self.scale_min, fmt.max * self.scale_max

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, and ``range``; for computing. See `encoded` for a file."""
        found = asdict(self) | {"range": self.range}
        found["histogram"] = self.histogram._asdict()
        found["sums"] = None if self.sums is None else self.sums._asdict()
        return found


_FORMATS = {fmt.name: fmt for fmt in FORMATS.values()}
_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def worst_first(rows: Iterable[Row]) -> list[Row]:
    """What met inf or NaN, then lowest SQNR first; rows without one last; else as given."""

    def place(row: Row) -> float:
        return -math.inf if row.nonfinite else math.inf if row.sqnr is None else row.sqnr

    return sorted(rows, key=place)


def encoded(value: Any) -> Any:
    """For strict JSON, which has no inf and no NaN: these become words."""
    if isinstance(value, Mapping):
        return {name: encoded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [encoded(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def decoded(found: Mapping[str, Any]) -> Row:
    """The row that ``encoded(row.as_dict())`` was made of.

    Raises:
        ValueError: a field is missing or unknown.
    """
    names = {field.name for field in fields(Row)}
    given = {name: value for name, value in found.items() if name != "range"}
    if given.keys() != names:
        raise ValueError(
            f"a row has the fields {', '.join(sorted(names))}; missing: "
            f"{sorted(names - given.keys())}, unknown: {sorted(given.keys() - names)}"
        )
    histogram, sums = given.pop("histogram"), given.pop("sums")
    numbers = {name: _number(name, value) for name, value in given.items()}
    return Row(
        **numbers,
        histogram=Histogram(histogram["lowest"], tuple(histogram["counts"])),
        sums=None if sums is None else Sums(**{n: _number(n, v) for n, v in sums.items()}),
    )


def _number(name: str, value: Any) -> Any:
    is_word = name in _WORDS  # a layer may be called "nan"
    return value if is_word or not isinstance(value, str) else _NUMBERS[value]


_WORDS = ("layer", "operand", "gemm", "format", "scaling", "granularity")


def sqnr_of(sums: Sums) -> float | None:
    """In dB; see `Row`."""
    if sums.noise is None or sums.second == 0:
        return None
    return decibels(sums.second, sums.noise)


# Of E[x^2]. Sums of powers lose the square of this ratio times some 1e-14 to rounding: 1e-4 of a
# kurtosis here, all of it at 1e-7.
_LEAST_VARIANCE = 1e-5


def kurtosis_of(sums: Sums, finite: int) -> float | None:
    """The fourth central moment by the squared variance of ``finite`` elements; see `Row`."""
    if finite == 0:
        return None
    first, second, third, fourth = (total / finite for total in sums[:4])
    variance = second - first**2
    if variance <= second * _LEAST_VARIANCE:
        return None
    central = fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4
    return central / variance**2


def merged(rows: Iterable[Row]) -> list[Row]:
    """Rows of equal key as one, as if one report had seen all of their elements.

    Counts and sums add; amaxes, scales and staleness are the extreme ones. An operand that came in
    float8 at some calls and was cast at others has a row of each kind, and they stay apart.

    Raises:
        ValueError: two rows of one key are of different casts, or a row has no sums.
    """
    by_key: dict[tuple[Key, bool], Row] = {}
    for row in rows:
        key = row.key, row.scaling == "float8"
        by_key[key] = row if key not in by_key else _merged(by_key[key], row)
    return list(by_key.values())


def _merged(a: Row, b: Row) -> Row:
    _check_mergeable(a, b)
    assert a.sums is not None
    assert b.sums is not None
    elements, nonfinite = a.elements + b.elements, a.nonfinite + b.nonfinite
    scaled = [row for row in (a, b) if row.elements] or [a]
    sums = Sums(*(_both(x, y) for x, y in zip(a.sums, b.sums, strict=True)))  # type: ignore[arg-type]
    return replace(
        a,
        elements=elements,
        calls=a.calls + b.calls,
        zeros=a.zeros + b.zeros,
        nonfinite=nonfinite,
        amax=max(a.amax, b.amax),
        scale_min=min(row.scale_min for row in scaled),
        scale_max=max(row.scale_max for row in scaled),
        flushed=_fraction(a, b, a.flushed, b.flushed),
        saturated=_fraction(a, b, a.saturated, b.saturated),
        sqnr=sqnr_of(sums),
        kurtosis=kurtosis_of(sums, elements - nonfinite),
        staleness=max((s for s in (a.staleness, b.staleness) if s is not None), default=None),
        histogram=_added(a.histogram, b.histogram),
        sums=sums,
    )


def _check_mergeable(a: Row, b: Row) -> None:
    name = f"{a.layer} {a.operand} ({a.gemm})"
    for field in ("format", "scaling", "granularity"):
        mine, theirs = getattr(a, field), getattr(b, field)
        if mine != theirs:
            raise ValueError(
                f"{name}: {field} is {mine!r} in one report and {theirs!r} in the other; merge "
                "reports of one model with one config"
            )
    if a.sums is None or b.sums is None:
        raise ValueError(f"{name}: a row without sums cannot be merged; it was made by hand")


def _both(x: float | None, y: float | None) -> float | None:
    return None if x is None or y is None else x + y


def _fraction(a: Row, b: Row, x: float | None, y: float | None) -> float | None:
    if x is None or y is None:
        return None
    return (x * a.elements + y * b.elements) / max(a.elements + b.elements, 1)


def _added(a: Histogram, b: Histogram) -> Histogram:
    if not a.counts or not b.counts:
        return a if a.counts else b
    lowest = min(a.lowest, b.lowest)
    counts = [0] * (max(h.lowest + len(h.counts) for h in (a, b)) - lowest)
    for histogram in (a, b):
        for i, count in enumerate(histogram.counts, histogram.lowest - lowest):
            counts[i] += count
    return Histogram(lowest, tuple(counts))
