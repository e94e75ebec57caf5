"""What is measured of one cast, on plain tensors, on the device that has them.

`measure` compares an operand with its codes and returns two vectors of float64: numbers that add up
over calls (`ADDS`) and numbers of which the largest counts (`TOPS`). A `Tally` gathers those of one
row of a report; `rows_of` brings all tallies to the host, in one transfer per device. Nothing waits
for the device before that.

How the numbers come about, of x in high precision, its codes c and scales s::

    bins       how many x have which exponent field as a float64, which is normal even where a
               float32 is subnormal: field 0 counts the zeros, 2047 inf and NaN, the others are the
               histogram of floor(log2 |x|)
    sums       of x, x^2, x^3, x^4 and (x - c s)^2, over finite x, all in float64
    flushed    code 0 of an x that is not 0; under a scale that is NaN a zero has no zero code
    saturated  |x| > s max(format) (1 + 2^-20): the tolerance is what rounding does to a scale that
               was found from this very amax, and which clamps nothing
    amax       sqrt(max x^2), which is exact: squares of float32 are exact in float64

An operand is worked on in pieces that stay in a CPU's cache, and that do not double the memory that
a device needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from float8.formats import FORMATS
from float8.granularity import WHOLE, Block
from float8.kernels import MIN_SCALE
from float8.numerics.rows import Histogram, Row, Sums, kurtosis_of, sqnr_of

_BIAS, _FIELDS = 1023, 2048  # of float64
_LOWEST, _HIGHEST = -160, 320  # exponents that products of codes and float32 scales may have
ADDS = ("first", "second", "third", "fourth", "noise", "flushed", "saturated", "zeros", "nonfinite")
TOPS = ("amax", "minus_scale_min", "scale_max", "reach")
_PIECE = {"cpu": 1 << 17}  # elements: a megabyte in float64
_PIECE_ON_DEVICES = 1 << 22


class Coded(NamedTuple):
    """A matrix in float8: codes, scales of shape ``ceil(shape / block)``, and the block."""

    data: Tensor
    scale: Tensor
    block: Block


class Measured(NamedTuple):
    """What `measure` found; ``adds`` ends with the counts of the exponents from -160 to 319."""

    elements: int
    adds: Tensor
    tops: Tensor


def measure(x: Tensor | None, coded: Coded, may_saturate: bool = True) -> Measured:
    """The statistics of one cast.

    Args:
        x: (rows, columns), float32, bfloat16 or float16; None where only the codes are there: the
            statistics are then those of ``code * scale``, and ``noise`` is 0.
        coded: what the cast made of it.
        may_saturate: False saves the search where the scale is that of this very x.

    Returns:
        the counts and sums.
    """
    x, coded = _in_memory_order(x, coded)
    elements = coded.data.numel()
    adds = torch.zeros(
        len(ADDS) + _HIGHEST - _LOWEST, dtype=torch.float64, device=coded.data.device
    )
    tops = adds.new_full((len(TOPS),), -math.inf)
    if not elements:
        return Measured(0, adds, tops)
    largest = FORMATS[coded.data.dtype].max
    table = torch.arange(256, dtype=torch.uint8, device=adds.device).view(coded.data.dtype).double()
    for rows in _pieces(coded):
        part = None if x is None else x[rows.x]
        codes = table.index_select(0, coded.data[rows.x].reshape(-1).view(torch.uint8).int())
        _measure_piece(part, codes, rows, coded, largest if may_saturate else None, adds, tops)
    _measure_scale(coded.scale, largest, tops)
    return Measured(elements, adds, tops)


class _Rows(NamedTuple):
    """A piece: which rows of the matrix, and which of its scales."""

    x: slice
    scale: slice


def _in_memory_order(x: Tensor | None, coded: Coded) -> tuple[Tensor | None, Coded]:
    """Nothing that is measured depends on the order, and columns are slow to read."""
    data = coded.data
    if data.is_contiguous() or data.stride(0) != 1:
        return x, coded
    return None if x is None else x.t(), Coded(data.t(), coded.scale.t(), coded.block[::-1])


def _pieces(coded: Coded) -> Iterator[_Rows]:
    rows, columns = coded.data.shape
    extent = coded.block[0]
    wanted = max(_PIECE.get(coded.data.device.type, _PIECE_ON_DEVICES) // columns, 1)
    if extent == WHOLE:
        for start in range(0, rows, wanted):
            yield _Rows(slice(start, start + wanted), slice(None))
        return
    blocks = max(wanted // extent, 1)
    for start in range(0, coded.scale.shape[0], blocks):
        end = start + blocks
        yield _Rows(slice(start * extent, end * extent), slice(start, end))


def _measure_piece(
    part: Tensor | None,
    codes: Tensor,
    rows: _Rows,
    coded: Coded,
    largest: float | None,
    adds: Tensor,
    tops: Tensor,
) -> None:
    shape = coded.data[rows.x].shape
    zero_codes = codes == 0
    scale = _per_element(coded.scale[rows.scale].double(), shape, coded.block)
    values = codes.view(shape).mul_(scale)
    x = (values if part is None else part.to(torch.float64)).reshape(-1)
    bins = _count_exponents(x)
    zeros, nonfinite = bins[0], bins[-1]
    flushed = torch.count_nonzero(zero_codes.logical_and_(x != 0))
    noise = x.new_zeros(())
    error = None if part is None else x - values.view(-1)
    # Asked where it costs nothing; a device does not wait to be asked.
    if x.device.type != "cpu" or bool(nonfinite):
        bad = ~x.isfinite()
        x.masked_fill_(bad, 0.0)
        error = None if error is None else error.masked_fill_(bad, 0.0)
    if error is not None:
        noise = torch.dot(error, error)
    square = x * x
    saturated = x.new_zeros(())
    if largest is not None:
        limit = (scale * (largest * (1 + 2.0**-20))).square()
        saturated = torch.count_nonzero(square.view(shape) > limit)
    sums = (x.sum(), torch.dot(x, x), torch.dot(x, square), torch.dot(square, square), noise)
    found = torch.stack([n.double() for n in (*sums, flushed, saturated, zeros, nonfinite)])
    adds[: len(ADDS)] += found
    adds[len(ADDS) :] += bins[_BIAS + _LOWEST : _BIAS + _HIGHEST]
    tops[0] = torch.maximum(tops[0], square.max().sqrt())


def _per_element(scale: Tensor, shape: torch.Size, block: Block) -> Tensor:
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
    # bincount asks the device for the largest of them; histc is told, and counts integers exactly.
    return torch.histc(fields.int(), bins=_FIELDS, min=0, max=_FIELDS - 1)


def _measure_scale(scale: Tensor, largest: float, tops: Tensor) -> None:
    scale = scale.double()
    # That of a block of zeros says nothing, unless there are no others.
    smallest = torch.where(scale <= MIN_SCALE, math.inf, scale).amin().minimum(scale.amax())
    tops[1], tops[2] = -smallest, scale.amax()
    if scale.numel() == 1:
        tops[3] = tops[0] / (scale.reshape(()) * largest)


@dataclass
class Tally:
    """One row of a report while it is filled. The words are those of `Row`.

    ``has_source`` says whether there was an operand in high precision, ``is_fixed`` whether the
    scale was there before the values (delayed, static), so that it may be stale.
    """

    layer: str
    operand: str
    gemm: str
    format: str
    scaling: str
    granularity: str
    has_source: bool
    is_fixed: bool
    elements: int = 0
    calls: int = 0
    adds: Tensor | None = None
    tops: Tensor | None = None

    def add(self, measured: Measured) -> None:
        """Take in one more cast; on another device than before, the numbers move there."""
        self.calls += 1
        self.elements += measured.elements
        if self.adds is None or self.tops is None:
            self.adds, self.tops = measured.adds.clone(), measured.tops.clone()
            return
        device = measured.adds.device
        self.adds = self.adds.to(device) + measured.adds
        self.tops = torch.maximum(self.tops.to(device), measured.tops)


def rows_of(tallies: Sequence[Tally]) -> list[Row]:
    """The rows, in the order given; one transfer for each device."""
    by_device: dict[torch.device, list[Tally]] = {}
    for tally in tallies:
        assert tally.adds is not None
        by_device.setdefault(tally.adds.device, []).append(tally)
    numbers: dict[int, list[float]] = {}
    for same in by_device.values():
        parts = [torch.cat([t.adds, t.tops]) for t in same]  # type: ignore[list-item]
        numbers |= {id(t): n for t, n in zip(same, torch.stack(parts).tolist(), strict=True)}
    return [_row(tally, numbers[id(tally)]) for tally in tallies]


def _row(tally: Tally, numbers: list[float]) -> Row:
    adds = dict(zip(ADDS, numbers, strict=False))
    counts = [int(n) for n in numbers[len(ADDS) : -len(TOPS)]]
    tops = dict(zip(TOPS, numbers[-len(TOPS) :], strict=True))
    noise = adds["noise"] if tally.has_source else None
    sums = Sums(adds["first"], adds["second"], adds["third"], adds["fourth"], noise)
    finite = tally.elements - int(adds["nonfinite"])
    return Row(
        layer=tally.layer,
        operand=tally.operand,
        gemm=tally.gemm,
        format=tally.format,
        scaling=tally.scaling,
        granularity=tally.granularity,
        elements=tally.elements,
        calls=tally.calls,
        zeros=int(adds["zeros"]),
        nonfinite=int(adds["nonfinite"]),
        amax=max(tops["amax"], 0.0),
        scale_min=-tops["minus_scale_min"] if tally.elements else 0.0,  # nothing was scaled
        scale_max=max(tops["scale_max"], 0.0),
        flushed=_fraction(adds["flushed"], tally),
        saturated=_fraction(adds["saturated"], tally),
        sqnr=sqnr_of(sums),
        kurtosis=kurtosis_of(sums, finite),
        staleness=_staleness(tops["reach"]) if tally.is_fixed else None,
        histogram=_trimmed(counts),
        sums=sums,
    )


def _fraction(count: float, tally: Tally) -> float | None:
    return count / max(tally.elements, 1) if tally.has_source else None


def _staleness(reach: float) -> float | None:
    return math.log2(reach) if 0 < reach < math.inf else None


def _trimmed(counts: list[int]) -> Histogram:
    filled = [i for i, count in enumerate(counts) if count]
    if not filled:
        return Histogram()
    return Histogram(_LOWEST + filled[0], tuple(counts[filled[0] : filled[-1] + 1]))
