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

Everything is found from sums and maxima (`CastTotals`): `measure_cast` finds those of one call,
calls add up on the device, and `statistics_of` moves them to the host. `merged` takes them from
statistics again, so that ranks and batches merge as calls do::

    bins       how many x have which exponent field as a float64, in which the subnormal numbers of
               float32 are normal: field 0 counts the zeros, 2047 inf and NaN, and the others are
               the histogram of floor(log2 |x|)
    sums       of x, x^2, x^3, x^4 and (x - x')^2, over finite x, all in float64
    flushed    data 0 of an x that is not 0; under a scale that is NaN, the data of a zero is NaN
    saturated  |x| > scale * max(format) * (1 + 2^-20): the tolerance covers the rounding of a scale
               that was found from this very amax and clamps nothing
    amax       sqrt(max x^2), which is exact: squares of float32 are exact in float64

Operands are measured in pieces that fit into a CPU's cache, which also limits the memory on other
devices. Nothing waits for the device before `statistics_of`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
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
    def labels(self) -> CastLabels:
        """Which cast it is."""
        return CastLabels(*(getattr(self, name) for name in CastLabels._fields))

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


def edges_of(cast: CastStatistics) -> list[float]:
    """The exponents below which all is flushed, some is, and some is subnormal; above which some
    saturates, and all does. Empty where a scale is no positive number.
    """
    low, high = cast.scale_min, cast.scale_max
    if not (low > 0 and math.isfinite(high)):
        return []
    fmt = FORMAT_OF[cast.format]
    normal = float(torch.finfo(fmt.dtype).smallest_normal)
    flushed = fmt.smallest_subnormal / 2
    pairs = (flushed, low), (flushed, high), (normal, high), (fmt.max, low), (fmt.max, high)
    return [math.log2(value) + math.log2(scale) for value, scale in pairs]


def bars_of(cast: CastStatistics) -> list[tuple[float, float, float]]:
    """Start and end of each power of two, as exponents, and the share of its nonzero elements.

    The last ends at the amax: it reaches beyond the range only if something saturates.
    """
    lowest, counts = cast.histogram
    ends = [lowest + i + 1.0 for i in range(len(counts))]
    if counts and cast.amax > 0:
        ends[-1] = min(max(math.log2(cast.amax), ends[-1] - 0.8), ends[-1])
    found = zip(ends, counts, strict=True)
    return [(math.ceil(end) - 1, end, count / sum(counts)) for end, count in found if count]


# --- measuring

_BIAS, _FIELDS = 1023, 2048  # of float64
_LOWEST, _HIGHEST = -160, 320  # exponents that products of data and float32 scales may have
_TOTALS = (*Sums._fields, "flushed", "saturated", "zeros", "nonfinite")
_GRADIENT = slice(5, 7)  # of `_TOTALS`
_PIECE = {"cpu": 1 << 17}  # elements: a megabyte in float64
_PIECE_ON_DEVICES = 1 << 22
PROBES = 16  # columns of `Products`


class Piece(NamedTuple):
    """Some rows of a `Float8Matrix`: operand, data and scales (which broadcast), in float64."""

    rows: slice
    exact: Tensor
    data: Tensor
    scale: Tensor


class Float8Matrix(NamedTuple):
    """A matrix in float8: data, scales of shape ``ceil(shape / block)``, and the block.

    ``source`` is the operand that was cast, None where only the float8 data are there.
    """

    data: Tensor
    scale: Tensor
    block: Block
    source: Tensor | None = None

    def t(self) -> Float8Matrix:
        """Its transpose."""
        source = None if self.source is None else self.source.t()
        return Float8Matrix(self.data.t(), self.scale.t(), self.block[::-1], source)

    @property
    def is_column_major(self) -> bool:
        """Whether the rows of its transpose are read faster."""
        return not self.data.is_contiguous() and self.data.stride(0) == 1

    def pieces(self) -> Iterator[Piece]:
        """Its rows, piece by piece; without a source, the cast is taken for exact."""
        rows, columns = self.data.shape
        extent = rows if self.block[0] == WHOLE else self.block[0]
        wanted = max(_PIECE.get(self.data.device.type, _PIECE_ON_DEVICES) // max(columns, 1), 1)
        step = wanted if self.block[0] == WHOLE else max(wanted // extent, 1) * extent
        for start in range(0, rows if columns else 0, step):
            some = slice(start, start + step)
            blocks = slice(start // extent, some.stop // extent)
            blocks = slice(None) if self.block[0] == WHOLE else blocks
            data = self.data[some].double()
            scale = _per_element(self.scale[blocks].double(), data.shape, self.block)
            exact = data * scale if self.source is None else self.source[some].double()
            yield Piece(some, exact, data, scale)


def _per_element(scale: Tensor, shape: torch.Size, block: Block) -> Tensor:
    for dim, extent in enumerate(block):
        if extent not in (1, WHOLE):
            scale = scale.repeat_interleave(extent, dim).narrow(dim, 0, shape[dim])
    return scale


class Products(NamedTuple):
    """A product of exact operands, and that of their casts; float64. See `gradient_error`."""

    exact: Tensor
    cast: Tensor

    def plus(self, other: Products) -> Products:
        """The products of these calls and other ones."""
        return Products(*(a.to(b.device) + b for a, b in zip(self, other, strict=True)))

    def energies(self) -> Tensor:
        """Estimates of ``|G|^2`` and ``|E|^2`` from the sum of the products of all calls."""
        pair = torch.stack([self.exact, self.cast - self.exact])
        return pair.square().sum((1, 2)) / PROBES


class CastTotals(NamedTuple):
    """The sums and maxima of one cast over its calls, in float64 on the device of the newest call.

    ``sums``: `_TOTALS`, NaN where unknown, then how many elements have the exponents -160 to 319.
    ``maxima``: of amax, minus the scale, the scale, and the staleness.
    ``products``: of a gradient with the input, in random projections; None of other operands.
    """

    elements: int
    sums: Tensor
    maxima: Tensor
    calls: int = 1
    products: Products | None = None

    def plus(self, other: CastTotals) -> CastTotals:
        """The totals of these calls and other ones."""
        device, both = other.sums.device, (self.products, other.products)
        products = both[0].plus(both[1]) if both[0] and both[1] else both[0] or both[1]
        return CastTotals(
            self.elements + other.elements,
            self.sums.to(device) + other.sums,
            torch.maximum(self.maxima.to(device), other.maxima),
            self.calls + other.calls,
            products,
        )

    def vector(self, device: torch.device) -> Tensor:
        """All numbers, with the energies of the weight's gradient and of its error."""
        sums = self.sums
        if self.products is not None:
            sums = sums.clone()
            sums[_GRADIENT] = self.products.energies().to(sums.device)
        return torch.cat([sums, self.maxima]).to(device)


def measure_cast(matrix: Float8Matrix) -> CastTotals:
    """Measure one call of a cast; `statistics_of` makes statistics of the totals.

    Args:
        matrix: of a float32, bfloat16 or float16 source, or of none: the numbers are then those of
            ``data * scale``.
    """
    # No number depends on the order of the elements.
    matrix = matrix.t() if matrix.is_column_major else matrix
    sums = matrix.scale.new_zeros(len(_TOTALS) + _HIGHEST - _LOWEST, dtype=torch.float64)
    sums[_GRADIENT] = math.nan
    maxima = sums.new_full((4,), -math.inf)
    if matrix.data.numel():
        largest = FORMATS[matrix.data.dtype].max
        for piece in matrix.pieces():
            maxima[0] = torch.maximum(maxima[0], _add_piece(sums, piece, largest))
        scale = matrix.scale.double()
        # The scale of a block of zeros says nothing, unless there are no others.
        smallest = torch.where(scale <= MIN_SCALE, math.inf, scale).amin().minimum(scale.amax())
        maxima[1], maxima[2] = -smallest, scale.amax()
        if scale.numel() == 1:
            maxima[3] = torch.log2(maxima[0] / (scale.reshape(()) * largest))
    return CastTotals(matrix.data.numel(), sums, maxima)


def _add_piece(sums: Tensor, piece: Piece, largest: float) -> Tensor:
    """Add a piece to the sums; its amax."""
    exact = piece.exact.reshape(-1)
    error = exact - (piece.data * piece.scale).view(-1)
    bins = _count_exponents(exact)
    zeros, nonfinite = bins[0], bins[-1]
    flushed = torch.count_nonzero((piece.data.view(-1) == 0).logical_and_(exact != 0))
    # The condition is tested on a CPU only: on other devices the test would wait for them.
    if exact.device.type != "cpu" or bool(nonfinite):
        bad = ~exact.isfinite()
        exact, error = exact.masked_fill(bad, 0.0), error.masked_fill_(bad, 0.0)
    square = exact * exact
    limit = (piece.scale * (largest * (1 + 2.0**-20))).square()
    saturated = torch.count_nonzero(square.view(piece.data.shape) > limit)
    powers = exact.sum(), exact.dot(exact), exact.dot(square), square.dot(square), error.dot(error)
    known = slice(0, len(powers)), slice(_GRADIENT.stop, len(_TOTALS))
    for some, found in zip(known, (powers, (flushed, saturated, zeros, nonfinite)), strict=True):
        sums[some] += torch.stack([each.double() for each in found])
    sums[len(_TOTALS) :] += bins[_BIAS + _LOWEST : _BIAS + _HIGHEST]
    return square.max().sqrt()


def _count_exponents(x: Tensor) -> Tensor:
    """How many elements of a float64 vector have which exponent field: (2048,)."""
    fields = (x.view(torch.int64) >> 52).bitwise_and_(_FIELDS - 1)
    if x.device.type == "cpu":
        return torch.bincount(fields, minlength=_FIELDS)
    # bincount would read the largest field back to the host; histc counts integers exactly.
    return torch.histc(fields.int(), bins=_FIELDS, min=0, max=_FIELDS - 1)


# --- from totals to statistics, and back


def statistics_of(casts: Sequence[tuple[CastLabels, CastTotals]]) -> list[CastStatistics]:
    """The statistics of each cast, in the order given; one transfer to the host."""
    if not casts:
        return []
    device = casts[0][1].sums.device
    numbers = torch.stack([totals.vector(device) for _, totals in casts]).tolist()
    return [_statistics(*cast, row) for cast, row in zip(casts, numbers, strict=True)]


def _statistics(labels: CastLabels, totals: CastTotals, numbers: list[float]) -> CastStatistics:
    elements, has_source = totals.elements, labels.scaling != IN_FLOAT8
    total = dict(zip(_TOTALS, numbers, strict=False))
    amax, minus_scale_min, scale_max, staleness = numbers[-4:]
    nonfinite = int(total["nonfinite"])
    noise, gradient, error = total["noise"], total["gradient"], total["gradient_noise"]
    is_known = not math.isnan(gradient)
    energies = (gradient, error) if is_known else (None, None)
    first, second, third, fourth = numbers[:4]
    sums = Sums(first, second, third, fourth, noise if has_source else None, *energies)
    is_compared = has_source and elements > nonfinite
    has_ratio = is_known and 0 < gradient < math.inf
    is_stale = labels.scaling in ("delayed", "static") and math.isfinite(staleness)
    return CastStatistics(
        *labels,
        elements=elements,
        calls=totals.calls,
        zeros=int(total["zeros"]),
        nonfinite=nonfinite,
        amax=max(amax, 0.0),
        scale_min=-minus_scale_min if elements else 0.0,
        scale_max=max(scale_max, 0.0),
        flushed=total["flushed"] / max(elements, 1) if has_source else None,
        saturated=total["saturated"] / max(elements, 1) if has_source else None,
        sqnr=decibels(sums.second, noise) if is_compared else None,
        kurtosis=_kurtosis(sums, elements - nonfinite),
        staleness=staleness if is_stale else None,
        histogram=_histogram(numbers[len(_TOTALS) : -4]),
        sums=sums,
        gradient_sqnr=decibels(gradient, error) if has_ratio else None,
    )


def _kurtosis(sums: Sums, elements: int) -> float | None:
    """The fourth central moment by the squared variance of this many elements."""
    first, second, third, fourth = (total / max(elements, 1) for total in sums[:4])
    variance = second - first**2
    if variance <= second * _LEAST_VARIANCE:
        return None
    central = fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4
    return central / variance**2


def _histogram(bins: Sequence[float]) -> Histogram:
    filled = [i for i, count in enumerate(bins) if count]
    if not filled:
        return EMPTY
    counts = bins[filled[0] : filled[-1] + 1]
    return Histogram(_LOWEST + filled[0], tuple(int(count) for count in counts))


def _totals(cast: CastStatistics) -> CastTotals:
    """The inverse of `statistics_of`."""
    assert cast.sums is not None, "statistics that were written by hand have no sums to merge"
    n = cast.elements
    fractions = [math.nan if f is None else round(f * n) for f in (cast.flushed, cast.saturated)]
    sums = [math.nan if each is None else each for each in cast.sums]
    bins, lowest = [0.0] * (_HIGHEST - _LOWEST), cast.histogram.lowest - _LOWEST
    bins[lowest : lowest + len(cast.histogram.counts)] = cast.histogram.counts
    stale = -math.inf if cast.staleness is None else cast.staleness
    scales = (-cast.scale_min, cast.scale_max) if n else (-math.inf, -math.inf)
    numbers = [*sums, *fractions, cast.zeros, cast.nonfinite, *bins, cast.amax, *scales, stale]
    vector = torch.tensor(numbers, dtype=torch.float64)
    return CastTotals(n, vector[:-4], vector[-4:], cast.calls)


def merged(casts: Iterable[CastStatistics]) -> list[CastStatistics]:
    """The statistics of each key as one, as if one report had seen all of their elements.

    An operand that arrived in float8 in some calls only has two: these are not merged.

    Raises:
        ValueError: two of one key are of different casts.
    """
    by_key: dict[tuple[CastKey, bool], list[CastStatistics]] = {}
    for cast in casts:
        by_key.setdefault((cast.key, cast.scaling == IN_FLOAT8), []).append(cast)
    for one, *others in by_key.values():
        if other := next((each for each in others if each.labels != one.labels), None):
            raise ValueError(
                f"{'/'.join(one.labels)} and {'/'.join(other.labels)} are different casts: merge "
                "reports of one model with one config"
            )
    return [
        same[0]
        if len(same) == 1
        else statistics_of([(same[0].labels, reduce(CastTotals.plus, map(_totals, same)))])[0]
        for same in by_key.values()
    ]
