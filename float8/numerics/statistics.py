"""The statistics of one cast: their formulas, their measurement on a device, and their merging.

A `CastStatistics` describes one operand of one layer, cast for one GEMM. x is the operand in the
compute dtype, x' = data * scale is what the GEMM reads. Sums run over the finite elements of all
calls and ranks that the object stands for::

    SQNR      = 10 log10( sum x^2 / sum (x - x')^2 )                               in dB
    kurtosis  = E[(x - mean)^4] / var^2                                            3 for a Gaussian
    staleness = log2( amax / (scale * max(format)) )                               in octaves

SQNR says how much of the operand is left. About 32 dB is the value of E4M3 where nothing saturates
or is flushed, and 26 dB that of E5M2 (a uniform error over steps of 2^-3 and of 2^-2). A large
kurtosis means outliers: one scale for the whole tensor may not suffice. Staleness says how far a
delayed or static scale is from the values: above 0 they saturate, below it the upper end of the
format is unused. SQNR and kurtosis are computed from `Sums`, so that several ranks merge exactly.

How `measure_cast` finds the numbers::

    bins       how many x have which exponent field as a float64, in which the subnormal numbers of
               float32 are normal: field 0 counts the zeros, 2047 inf and NaN, and the others are
               the histogram of floor(log2 |x|)
    sums       of x, x^2, x^3, x^4 and (x - x')^2, over finite x, all in float64
    flushed    data 0 of an x that is not 0; under a scale that is NaN, the data of a zero is NaN
    saturated  |x| > scale * max(format) * (1 + 2^-20): the tolerance covers the rounding of a scale
               that was found from this very amax and clamps nothing
    amax       sqrt(max x^2), which is exact: squares of float32 are exact in float64

Operands are measured in pieces that fit into a CPU's cache, which also limits the memory on other
devices. Nothing waits for the device before `statistics_of` moves all numbers to the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.formats import FORMATS
from float8.granularity import WHOLE, Block
from float8.kernels import MIN_SCALE
from float8.kernels.sqnr import decibels

OPERANDS = ("input", "weight", "grad_output")
SMOOTH = ", smooth"  # after the granularity of an operand that was multiplied by factors
IN_FLOAT8 = "float8"  # the scaling of an operand that arrived in float8
FORMAT_OF = {fmt.name: fmt for fmt in FORMATS.values()}
CastKey = tuple[str, str, str]

# Of E[x^2]. Rounding changes a kurtosis by some 1e-14 over the square of this ratio: by 1e-4 here,
# by all of it at 1e-7.
_LEAST_VARIANCE = 1e-5


class Histogram(NamedTuple):
    """How many nonzero finite elements have which ``floor(log2 |x|)``.

    ``counts[i]`` is of the exponent ``lowest + i``; the ends are not empty.
    """

    lowest: int = 0
    counts: tuple[int, ...] = ()


EMPTY = Histogram()


class Sums(NamedTuple):
    """Sums over finite elements, in float64: of the powers of x, and of ``(x - x')^2``.

    ``noise`` is None where there is no operand in high precision to compare with. ``gradient`` and
    ``gradient_noise`` are those of `float8.numerics.gradient_error`, None for other operands.
    """

    first: float
    second: float
    third: float
    fourth: float
    noise: float | None
    gradient: float | None = None
    gradient_noise: float | None = None

    def plus(self, other: Sums) -> Sums:
        """The sums over these elements and other ones."""
        return Sums(
            self.first + other.first,
            self.second + other.second,
            self.third + other.third,
            self.fourth + other.fourth,
            _sum(self.noise, other.noise),
            _sum(self.gradient, other.gradient),
            _sum(self.gradient_noise, other.gradient_noise),
        )

    def sqnr(self, elements: int) -> float | None:
        """In dB; None without finite elements, or without an operand in high precision."""
        return decibels(self.second, self.noise) if elements and self.noise is not None else None

    @property
    def gradient_sqnr(self) -> float | None:
        """In dB; None where it is not known, or where the gradient is zero or not finite."""
        if not self.gradient or self.gradient_noise is None or not math.isfinite(self.gradient):
            return None
        return decibels(self.gradient, self.gradient_noise)

    def kurtosis(self, elements: int) -> float | None:
        """The fourth central moment by the squared variance of this many elements."""
        if not elements:
            return None
        first, second, third, fourth = (total / elements for total in self[:4])
        variance = second - first**2
        if variance <= second * _LEAST_VARIANCE:
            return None
        central = fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4
        return central / variance**2


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


class CastLabels(NamedTuple):
    """Which cast it is; see `CastStatistics`."""

    layer: str
    operand: str
    gemm: str
    format: str
    scaling: str
    granularity: str


@dataclass(frozen=True)
class CastStatistics:
    """The statistics of one cast.

    With x the operand and x' = data * scale what the GEMM reads of it, over finite elements::

        sqnr      = 10 log10( sum x^2 / sum (x - x')^2 )       in dB
        kurtosis  = E[(x - mean)^4] / var^2                    3 for a Gaussian
        staleness = log2( amax / (scale * max(format)) )       in octaves

    About 32 dB is the SQNR of E4M3 where nothing saturates or is flushed, 26 dB that of E5M2. A
    large kurtosis means outliers: one scale for the whole tensor may not suffice. Staleness says
    how far a delayed or static scale is from the values: above 0 they saturate, below 0 the upper
    end of the format is unused.

    Args:
        layer: its name in the model.
        operand: "input", "weight" or "grad_output".
        gemm: the GEMM that reads the cast: "output", "grad_input" or "grad_weight". A second GEMM
            has statistics of its own only where the operand is cast otherwise for it.
        format: such as "e4m3".
        scaling: "dynamic", "delayed" or "static"; "float8" for an operand that arrived in float8.
        granularity: "tensorwise", "rowwise" or the extents of a block, as "1x128". Of a layer with
            ``smooth_input=True``, ", smooth" follows: the numbers are those of x * s and w / s.
        elements: how many were cast, over all calls.
        calls: how often.
        zeros, nonfinite: how many elements were zero, inf or NaN before the cast.
        amax: the largest finite magnitude.
        scale_min, scale_max: of the scales in use (``value = data * scale``); 0 without elements.
        flushed: the fraction of the elements that were not zero and became zero.
        saturated: the fraction of the elements that were beyond the range, by more than rounding.
        sqnr: in dB; inf where the cast was exact, as of zeros; -inf where nothing finite was left;
            None where there is nothing to compare: no finite element, or an operand in float8.
        kurtosis: None where the elements are all equal, or differ by less than 0.3 %.
        staleness: in octaves; of the call where it was largest. None unless the scale is delayed
            or static and the operand not all zero.
        histogram: of the operand in powers of two.
        sums: needed to merge; None in statistics that were written by hand.
        gradient_sqnr: of the weight's gradient, in dB: how much the layer's casts leave of it
            (`float8.numerics.gradient_error`). In the row of the ``grad_output`` that the GEMM
            ``grad_weight`` reads; None elsewhere.

    An operand that arrived in float8 has no high-precision values to compare with. Its ``flushed``,
    ``saturated`` and ``sqnr`` are None, and its other numbers are those of ``data * scale``.
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
    gradient_sqnr: float | None = None

    @property
    def key(self) -> CastKey:
        """Layer, operand and GEMM."""
        return self.layer, self.operand, self.gemm

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest magnitude that the format represents under its scales."""
        fmt = FORMAT_OF[self.format]
        return fmt.smallest_subnormal * self.scale_min, fmt.max * self.scale_max

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, and ``range``."""
        found = asdict(self) | {"range": self.range}
        found["histogram"] = self.histogram._asdict()
        found["sums"] = None if self.sums is None else self.sums._asdict()
        return found


# --- merging


def merged(casts: Iterable[CastStatistics]) -> list[CastStatistics]:
    """The statistics of each key as one, as if one report had seen all of their elements.

    An operand that arrived in float8 in some calls only has two: these are not merged.

    Raises:
        ValueError: two of one key are of different casts, or have no sums.
    """
    by_key: dict[tuple[CastKey, bool], CastStatistics] = {}
    for cast in casts:
        key = cast.key, cast.scaling == IN_FLOAT8
        by_key[key] = cast if key not in by_key else _merged(by_key[key], cast)
    return list(by_key.values())


def _merged(a: CastStatistics, b: CastStatistics) -> CastStatistics:
    name = f"{a.layer} {a.operand} ({a.gemm})"
    for field in ("format", "scaling", "granularity"):
        one, other = getattr(a, field), getattr(b, field)
        if one != other:
            raise ValueError(
                f"{name}: {field} is {one!r} in one report and {other!r} in the other; merge "
                "reports of one model with one config"
            )
    if a.sums is None or b.sums is None:
        raise ValueError(f"{name}: statistics without sums cannot be merged")
    elements, nonfinite = a.elements + b.elements, a.nonfinite + b.nonfinite
    with_scale = [cast for cast in (a, b) if cast.elements] or [a]
    sums = a.sums.plus(b.sums)

    def fraction(x: float | None, y: float | None) -> float | None:
        if x is None or y is None:
            return None
        return (x * a.elements + y * b.elements) / max(elements, 1)

    return replace(
        a,
        elements=elements,
        calls=a.calls + b.calls,
        zeros=a.zeros + b.zeros,
        nonfinite=nonfinite,
        amax=max(a.amax, b.amax),
        scale_min=min(cast.scale_min for cast in with_scale),
        scale_max=max(cast.scale_max for cast in with_scale),
        flushed=fraction(a.flushed, b.flushed),
        saturated=fraction(a.saturated, b.saturated),
        sqnr=sums.sqnr(elements - nonfinite),
        kurtosis=sums.kurtosis(elements - nonfinite),
        staleness=max((s for s in (a.staleness, b.staleness) if s is not None), default=None),
        histogram=_added(a.histogram, b.histogram),
        sums=sums,
        gradient_sqnr=sums.gradient_sqnr,
    )


def _added(a: Histogram, b: Histogram) -> Histogram:
    if not a.counts or not b.counts:
        return a if a.counts else b
    lowest = min(a.lowest, b.lowest)
    counts = [0] * (max(h.lowest + len(h.counts) for h in (a, b)) - lowest)
    for histogram in (a, b):
        for i, count in enumerate(histogram.counts, histogram.lowest - lowest):
            counts[i] += count
    return Histogram(lowest, tuple(counts))


# --- measuring

_BIAS, _FIELDS = 1023, 2048  # of float64
_LOWEST, _HIGHEST = -160, 320  # exponents that products of data and float32 scales may have
_SUMS = (
    "first", "second", "third", "fourth", "noise", "flushed", "saturated", "zeros", "nonfinite",
)  # fmt: skip
_MAXIMA = ("amax", "minus_scale_min", "scale_max", "amax_by_range")
_PIECE = {"cpu": 1 << 17}  # elements: a megabyte in float64
_PIECE_ON_DEVICES = 1 << 22


class Float8Matrix(NamedTuple):
    """A matrix in float8: data, scales of shape ``ceil(shape / block)``, and the block."""

    data: Tensor
    scale: Tensor
    block: Block

    def t(self) -> Float8Matrix:
        """Its transpose."""
        return Float8Matrix(self.data.t(), self.scale.t(), self.block[::-1])


class CastTotals(NamedTuple):
    """The sums and maxima of one cast over its calls, in float64 on the device of the newest call.

    ``sums``: `_SUMS`, then how many elements have the exponents -160 to 319. ``maxima``: `_MAXIMA`.
    """

    elements: int
    sums: Tensor
    maxima: Tensor
    calls: int = 1

    def plus(self, other: CastTotals) -> CastTotals:
        """The totals of these calls and other ones."""
        device = other.sums.device
        return CastTotals(
            self.elements + other.elements,
            self.sums.to(device) + other.sums,
            torch.maximum(self.maxima.to(device), other.maxima),
            self.calls + other.calls,
        )


def measure_cast(x: Tensor | None, matrix: Float8Matrix, may_saturate: bool = True) -> CastTotals:
    """Measure one call of a cast; `statistics_of` makes statistics of the totals.

    Args:
        x: (rows, columns), float32, bfloat16 or float16. None if there are only the float8 data:
            the numbers are then those of ``data * scale``, and ``noise`` is 0.
        matrix: the result of the cast.
        may_saturate: False skips the search for saturated elements, where the scale is that of x.
    """
    if not matrix.data.is_contiguous() and matrix.data.stride(0) == 1:
        # No number depends on the order of the elements, and columns are slow to read.
        x, matrix = None if x is None else x.t(), matrix.t()
    dtype, device = matrix.data.dtype, matrix.data.device
    sums = torch.zeros(len(_SUMS) + _HIGHEST - _LOWEST, dtype=torch.float64, device=device)
    maxima = sums.new_full((len(_MAXIMA),), -math.inf)
    elements = matrix.data.numel()
    if elements:
        largest = FORMATS[dtype].max
        values = torch.arange(256, dtype=torch.uint8, device=device).view(dtype).double()
        for rows, scale_rows in pieces(matrix):
            piece = Float8Matrix(matrix.data[rows], matrix.scale[scale_rows], matrix.block)
            part = None if x is None else x[rows]
            amax = _add_piece(sums, part, piece, values, largest if may_saturate else None)
            maxima[0] = torch.maximum(maxima[0], amax)
        scale = matrix.scale.double()
        # The scale of a block of zeros says nothing, unless there are no others.
        smallest = torch.where(scale <= MIN_SCALE, math.inf, scale).amin().minimum(scale.amax())
        maxima[1], maxima[2] = -smallest, scale.amax()
        if scale.numel() == 1:
            maxima[3] = maxima[0] / (scale.reshape(()) * largest)
    return CastTotals(elements, sums, maxima)


def pieces(matrix: Float8Matrix) -> Iterator[tuple[slice, slice]]:
    """Rows of the matrix, and those of its scales, piece by piece."""
    rows, columns = matrix.data.shape
    extent = matrix.block[0]
    wanted = max(_PIECE.get(matrix.data.device.type, _PIECE_ON_DEVICES) // columns, 1)
    if extent == WHOLE:
        for start in range(0, rows, wanted):
            yield slice(start, start + wanted), slice(None)
        return
    blocks = max(wanted // extent, 1)
    for start in range(0, matrix.scale.shape[0], blocks):
        end = start + blocks
        yield slice(start * extent, end * extent), slice(start, end)


def _add_piece(
    sums: Tensor, x: Tensor | None, piece: Float8Matrix, values: Tensor, largest: float | None
) -> Tensor:
    """Add a piece to the sums; its amax. ``values`` are those of the 256 bytes of the format."""
    shape = piece.data.shape
    x_cast = values.index_select(0, piece.data.reshape(-1).view(torch.uint8).int())
    is_zero = x_cast == 0
    scale = per_element(piece.scale.double(), shape, piece.block)
    x_cast = x_cast.view(shape).mul_(scale)
    exact = (x_cast if x is None else x.to(torch.float64)).reshape(-1)
    bins = _count_exponents(exact)
    zeros, nonfinite = bins[0], bins[-1]
    flushed = torch.count_nonzero(is_zero.logical_and_(exact != 0))
    error = None if x is None else exact - x_cast.view(-1)
    # The condition is tested on a CPU only: on other devices the test would wait for them.
    if exact.device.type != "cpu" or bool(nonfinite):
        bad = ~exact.isfinite()
        exact.masked_fill_(bad, 0.0)
        error = None if error is None else error.masked_fill_(bad, 0.0)
    noise = exact.new_zeros(()) if error is None else torch.dot(error, error)
    square = exact * exact
    saturated = exact.new_zeros(())
    if largest is not None:
        limit = (scale * (largest * (1 + 2.0**-20))).square()
        saturated = torch.count_nonzero(square.view(shape) > limit)
    powers = exact.sum(), torch.dot(exact, exact), torch.dot(exact, square), square.dot(square)
    counts = flushed, saturated, zeros, nonfinite
    found = torch.stack([n.double() for n in (*powers, noise, *counts)])
    sums[: len(_SUMS)] += found
    sums[len(_SUMS) :] += bins[_BIAS + _LOWEST : _BIAS + _HIGHEST]
    return square.max().sqrt()


def per_element(scale: Tensor, shape: torch.Size, block: Block) -> Tensor:
    """Scales that broadcast against the elements."""
    for dim, extent in enumerate(block):
        if extent not in (1, WHOLE):
            scale = scale.repeat_interleave(extent, dim).narrow(dim, 0, shape[dim])
    return scale


def _count_exponents(x: Tensor) -> Tensor:
    """How many elements of a float64 vector have which exponent field: (2048,)."""
    fields = (x.view(torch.int64) >> 52).bitwise_and_(_FIELDS - 1)
    if x.device.type == "cpu":
        return torch.bincount(fields, minlength=_FIELDS)
    # bincount would read the largest field back to the host; histc counts integers exactly.
    return torch.histc(fields.int(), bins=_FIELDS, min=0, max=_FIELDS - 1)


def statistics_of(casts: Sequence[tuple[CastLabels, CastTotals]]) -> list[CastStatistics]:
    """The statistics of each cast, in the order given; one transfer to the host."""
    if not casts:
        return []
    device = casts[0][1].sums.device
    vectors = [torch.cat([totals.sums, totals.maxima]).to(device) for _, totals in casts]
    numbers = torch.stack(vectors).tolist()
    return [_statistics(*cast, row) for cast, row in zip(casts, numbers, strict=True)]


def _statistics(labels: CastLabels, totals: CastTotals, numbers: list[float]) -> CastStatistics:
    elements, scaling = totals.elements, labels.scaling
    total = dict(zip(_SUMS, numbers, strict=False))
    largest = dict(zip(_MAXIMA, numbers[-len(_MAXIMA) :], strict=True))
    counts = [int(n) for n in numbers[len(_SUMS) : -len(_MAXIMA)]]
    filled = [i for i, count in enumerate(counts) if count]
    histogram = EMPTY
    if filled:
        first, last = filled[0], filled[-1]
        histogram = Histogram(_LOWEST + first, tuple(counts[first : last + 1]))
    has_source, is_fixed = scaling != IN_FLOAT8, scaling in ("delayed", "static")
    noise = total["noise"] if has_source else None
    sums = Sums(total["first"], total["second"], total["third"], total["fourth"], noise)
    nonfinite, by_range = int(total["nonfinite"]), largest["amax_by_range"]
    return CastStatistics(
        *labels,
        elements=elements,
        calls=totals.calls,
        zeros=int(total["zeros"]),
        nonfinite=nonfinite,
        amax=max(largest["amax"], 0.0),
        scale_min=-largest["minus_scale_min"] if elements else 0.0,
        scale_max=max(largest["scale_max"], 0.0),
        flushed=total["flushed"] / max(elements, 1) if has_source else None,
        saturated=total["saturated"] / max(elements, 1) if has_source else None,
        sqnr=sums.sqnr(elements - nonfinite),
        kurtosis=sums.kurtosis(elements - nonfinite),
        staleness=math.log2(by_range) if is_fixed and 0 < by_range < math.inf else None,
        histogram=histogram,
        sums=sums,
    )
