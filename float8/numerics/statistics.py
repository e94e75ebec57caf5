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
format is unused.

Everything follows from sums and maxima, `SUMS` and `MAXIMA`: `measure_cast` finds those of one
call, calls add up on the device (`Totals`), and `Totals.statistics` moves them to the host.
Statistics keep them, so that ranks and batches merge as calls do::

    bins       how many x have which exponent field as a float64, in which the subnormal numbers of
               float32 are normal: field 0 counts the zeros, 2047 inf and NaN, and the others are
               the histogram of floor(log2 |x|)
    sums       of x, x^2, x^3, x^4 and (x - x')^2, over finite x, all in float64
    flushed    data 0 of an x that is not 0; under a scale that is NaN, the data of a zero is NaN
    saturated  |x| > scale * max(format) * (1 + 2^-20): the tolerance covers the rounding of a scale
               that was found from this very amax and clamps nothing
    amax       sqrt(max x^2), which is exact: squares of float32 are exact in float64

Operands are measured in pieces that fit into a CPU's cache, which also limits the memory on other
devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.convert.folding import named
from float8.formats import FORMATS
from float8.granularity import WHOLE, Block
from float8.kernels import MIN_SCALE
from float8.kernels.sqnr import decibels
from float8.numerics.gradient_error import energies

IN_FLOAT8 = "float8"  # the scaling of an operand that arrived in float8
FORMAT_OF = {fmt.name: fmt for fmt in FORMATS.values()}

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


@dataclass(frozen=True)
class CastLabels:
    """Which cast it is; see `CastStatistics`."""

    layer: str
    operand: str
    gemm: str
    format: str
    scaling: str
    granularity: str

    @property
    def named(self) -> dict[str, Any]:
        """All of them, by name."""
        return {name: getattr(self, name) for name in LABELS}

    @property
    def labels(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self.named.values())

    @property
    def key(self) -> tuple[str, ...]:
        """Layer, operand and GEMM; the template of the page reads it."""
        return self.labels[:3]

    @property
    def place(self) -> str:
        """Layer and operand."""
        return f"{named(self.layer)}, {self.operand}"


LABELS = tuple(field.name for field in fields(CastLabels))


@dataclass(frozen=True)
class CastStatistics(CastLabels):
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
        sums: what all of these follow from, needed to merge: `SUMS`, then `MAXIMA`. Empty in
            statistics that were written by hand.
        gradient_sqnr: of the weight's gradient, in dB: how much the layer's casts leave of it
            (`float8.numerics.gradient_error`). In the row of the ``grad_output`` that the GEMM
            ``grad_weight`` reads; None elsewhere.

    An operand that arrived in float8 has no high-precision values to compare with. Its ``flushed``,
    ``saturated`` and ``sqnr`` are None, and its other numbers are those of ``data * scale``.
    """

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
    sums: tuple[float, ...] = ()
    gradient_sqnr: float | None = None

    @property
    def totals(self) -> Totals:
        """The sums and maxima from which these statistics follow."""
        bins = torch.zeros(_HIGHEST - _LOWEST, dtype=torch.float64)
        lowest, counts = self.histogram
        bins[lowest - _LOWEST :][: len(counts)] = torch.tensor(counts, dtype=bins.dtype)
        sums, maxima = torch.tensor(self.sums, dtype=bins.dtype).tensor_split([len(SUMS)])
        return Totals(torch.cat([sums, bins]), maxima)


# --- measuring

SUMS = (
    "elements", "calls", "zeros", "nonfinite", "first", "second", "third", "fourth", "noise",
    "flushed", "saturated", "gradient", "gradient_noise",
)  # fmt: skip
MAXIMA = "amax", "minus_scale_min", "scale_max", "staleness"
_MEASURED = slice(2, 11)  # of `SUMS`: what a piece adds to
_BIAS, _FIELDS = 1023, 2048  # of float64
_LOWEST, _HIGHEST = -160, 320  # exponents that products of data and float32 scales may have
_PIECE = {"cpu": 1 << 17}  # elements: a megabyte in float64
_PIECE_ON_DEVICES = 1 << 22


class Piece(NamedTuple):
    """Some rows of a `CastMatrix`: operand, data and scales (which broadcast), in float64."""

    rows: slice
    exact: Tensor
    data: Tensor
    scale: Tensor


class CastMatrix(NamedTuple):
    """A matrix in float8: data, scales of shape ``ceil(shape / block)``, and the block.

    ``source`` is the operand that was cast, None where only the float8 data are there.
    """

    data: Tensor
    scale: Tensor
    block: Block
    source: Tensor | None = None

    def t(self) -> CastMatrix:
        """Its transpose."""
        source = None if self.source is None else self.source.t()
        return CastMatrix(self.data.t(), self.scale.t(), self.block[::-1], source)

    def pieces(self) -> Iterator[Piece]:
        """Its rows, piece by piece; without a source, the cast is taken for exact."""
        (rows, columns), (extent, _), scales = self.data.shape, self.block, self.scale
        if extent == WHOLE:
            extent, scales = 1, scales.expand(rows, -1)
        wanted = _PIECE.get(self.data.device.type, _PIECE_ON_DEVICES) // max(columns, 1)
        step = max(wanted // extent, 1) * extent
        for start in range(0, rows if columns else 0, step):
            some = slice(start, start + step)
            data = _double(self.data[some])
            scale = scales[start // extent : some.stop // extent].double()
            for dim, each in enumerate((extent, self.block[1])):
                if each not in (1, WHOLE):
                    scale = scale.repeat_interleave(each, dim).narrow(dim, 0, data.shape[dim])
            exact = data * scale if self.source is None else _double(self.source[some])
            yield Piece(some, exact, data, scale)


def _double(x: Tensor) -> Tensor:
    return x.to(torch.float64, memory_format=torch.contiguous_format)


class Totals(NamedTuple):
    """The sums and maxima of one cast over its calls, in float64 on its device.

    ``sums``: `SUMS`, then how many elements have the exponents -160 to 319. ``maxima``: `MAXIMA`.
    ``products``: those of `float8.numerics.gradient_error`, or 0.
    """

    sums: Tensor
    maxima: Tensor
    products: Tensor | float = 0.0

    def plus(self, other: Totals) -> Totals:
        """The totals of these calls and other ones."""
        maxima = torch.maximum(self.maxima, other.maxima)
        return Totals(self.sums + other.sums, maxima, self.products + other.products)

    def statistics(self, labels: CastLabels) -> CastStatistics:
        """The statistics of this cast; they are moved to the host."""
        sums, size = self.sums, len(SUMS)
        if isinstance(self.products, Tensor):
            sums[size - 2 : size] = energies(self.products)
        numbers, bins = sums[:size].tolist() + self.maxima.tolist(), sums[size:].tolist()
        of = dict(zip((*SUMS, *MAXIMA), numbers, strict=True))
        n, nonfinite, has_source = of["elements"], of["nonfinite"], labels.scaling != IN_FLOAT8
        flushed, saturated = (of[name] / max(n, 1) for name in ("flushed", "saturated"))
        is_stale = labels.scaling in ("delayed", "static") and math.isfinite(of["staleness"])
        gradient, error = of["gradient"], of["gradient_noise"]
        filled = [i for i, count in enumerate(bins) if count] or [-_LOWEST, -_LOWEST - 1]
        return CastStatistics(
            **labels.named,
            elements=int(n),
            calls=int(of["calls"]),
            zeros=int(of["zeros"]),
            nonfinite=int(nonfinite),
            amax=max(of["amax"], 0.0),
            scale_min=-of["minus_scale_min"] if n else 0.0,
            scale_max=max(of["scale_max"], 0.0),
            flushed=flushed if has_source else None,
            saturated=saturated if has_source else None,
            sqnr=decibels(of["second"], of["noise"]) if has_source and n > nonfinite else None,
            kurtosis=_kurtosis(*(of[name] / max(n - nonfinite, 1) for name in SUMS[4:8])),
            staleness=of["staleness"] if is_stale else None,
            histogram=Histogram(
                filled[0] + _LOWEST, tuple(map(int, bins[filled[0] : filled[-1] + 1]))
            ),
            sums=tuple(numbers),
            gradient_sqnr=decibels(gradient, error) if 0 < gradient < math.inf else None,
        )


def measure_cast(matrix: CastMatrix) -> Totals:
    """Measure one call of a cast.

    Args:
        matrix: of a float32, bfloat16 or float16 source, or of none: the numbers are then those of
            ``data * scale``.
    """
    n, scale = matrix.data.numel(), matrix.scale.double()
    sums = scale.new_zeros(len(SUMS) + _HIGHEST - _LOWEST)
    sums[0], sums[1] = n, 1
    maxima = sums.new_full((len(MAXIMA),), -math.inf)
    if n:
        largest = FORMATS[matrix.data.dtype].max
        for piece in matrix.pieces():
            maxima[0] = torch.maximum(maxima[0], _add_piece(sums, piece, largest))
        # The scale of a block of zeros says nothing, unless there are no others.
        smallest = torch.where(scale <= MIN_SCALE, math.inf, scale).amin().minimum(scale.amax())
        maxima[1], maxima[2] = -smallest, scale.amax()
        if scale.numel() == 1:
            maxima[3] = torch.log2(maxima[0] / (scale.reshape(()) * largest))
    return Totals(sums, maxima)


def _add_piece(sums: Tensor, piece: Piece, largest: float) -> Tensor:
    """Add a piece to the sums; its amax."""
    exact = piece.exact.view(-1)
    error = exact - (piece.data * piece.scale).view(-1)
    exponents = (exact.view(torch.int64) >> 52).bitwise_and_(_FIELDS - 1)
    bins = torch.bincount(exponents, minlength=_FIELDS)
    zeros, nonfinite = bins[0], bins[-1]
    flushed = torch.count_nonzero((piece.data.view(-1) == 0).logical_and_(exact != 0))
    if nonfinite:
        bad = ~exact.isfinite()
        exact, error = exact.masked_fill(bad, 0.0), error.masked_fill_(bad, 0.0)
    square = exact * exact
    limit = (piece.scale * (largest * (1 + 2.0**-20))).square()
    saturated = torch.count_nonzero(square.view(piece.data.shape) > limit)
    powers = exact.sum(), exact.dot(exact), exact.dot(square), square.dot(square)
    found = zeros, nonfinite, *powers, error.dot(error), flushed, saturated
    sums[_MEASURED] += torch.stack([each.double() for each in found])
    sums[len(SUMS) :] += bins[_BIAS + _LOWEST : _BIAS + _HIGHEST]
    return square.max().sqrt()


def _kurtosis(first: float, second: float, third: float, fourth: float) -> float | None:
    """The fourth central moment by the squared variance, of the moments."""
    variance = second - first**2
    if variance <= second * _LEAST_VARIANCE:
        return None
    central = fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4
    return central / variance**2


def merged(casts: Iterable[CastStatistics]) -> list[CastStatistics]:
    """The statistics of each cast as one, as if one report had seen all of their elements."""
    found: dict[tuple[str, ...], CastStatistics] = {}
    for cast in casts:
        before = found.get(cast.labels)
        both = before.totals.plus(cast.totals).statistics(cast) if before else cast
        found[cast.labels] = both
    return list(found.values())
