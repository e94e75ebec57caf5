"""Optimizer states in 8 or 16 bits: the codes, and the matrix that holds them.

A state is a float32 matrix (R, C), its parameter's first dimension by the rest, and is quantised in
groups of ``group`` elements along C. A row has G = ceil(C / group) groups, of which the last may be
shorter. In memory it has one of three forms (`StateMatrix`):

========== =========================== =======================================================
form       per element                 per group, float32
========== =========================== =======================================================
plain      float32                     nothing
linear     code, E4M3 or float16       scale; ``value = code * scale``
expanded   code, E4M3                  scale, exponent; ``value = sign * (|code| / 448)^exponent
                                       * scale``
========== =========================== =======================================================

*Linear* is ``definition.cast_by_scale`` in blocks of (1, group), scaled by the group's own amax.

*Expanded* is COAT's dynamic range expansion (arXiv 2410.19313, section 4.1). The magnitudes of a
group of second moments span much less, or much more, than the E4M3 codes do (448 / 2^-9, about
2^17.8). A power k of them spans exactly that range, so that each group uses every code:

    f(x) = sign(x) * |x|^k,   k = log(448 / 2^-9) / log(largest / smallest)

over the group's nonzero magnitudes. The paper then divides by the scale ``max|f(x)| / 448``. Here
the division comes first, ``(|x| / largest)^k * 448``: the same number, but powers of huge and of
tiny values stay within float32. The paper's centre ``sqrt(largest * smallest)`` is a constant
factor of x, which this normalisation cancels. ``scale`` is the largest magnitude, at least 2^-126.
``exponent`` is 1 / k, kept between two bounds. At 1 / 64 a group holds one value, or nearly, and
has k = 64. At 4 every value below 2^-71 of the largest is raised to that.

Exact in every form: zeros, and in the expanded form the largest magnitude. A nonzero element
becomes 0 only in linear E4M3. An infinite or NaN element is coded as NaN and takes no part in the
range of its group; the other elements are coded as if it were 0. The square of a finite gradient
beyond 2^64 overflows float32, so it is such an element: its weight becomes NaN in the next step.
(torch keeps inf, and the weight never changes again, without an error. A second moment clamped to
the largest float32 would do the same to its group, whose moments would be at least 2^57.)

Codes are rounded to nearest, or, with a ``chance`` per element, up or down so that the expectation
of the value is x (``stochastic.py``).

Linear codes and scales are defined to the bit (see ``definition.py``). Expanded codes depend on the
last bits of ``log2`` and ``exp2``, which differ between backends: a code may be off by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from float8.formats import E4M3
from float8.kernels import definition, plain, stochastic

E4M3_MAX, SMALLEST_CODE = E4M3.max, E4M3.smallest_subnormal
LOG2_RANGE = math.log2(E4M3_MAX / SMALLEST_CODE)  # of the E4M3 magnitudes
MIN_EXPONENT = 1 / 64
MAX_EXPONENT = 4.0

# Elements of a tile: 1 MB of float32, of which a step has about 20 at once. They fit in caches.
TILE_ELEMENTS = 2**18


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(R, C) of a tensor: its first dimension and the product of the others; (1, n) of a vector."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def matrix_of(x: Tensor) -> Tensor:
    """x as a matrix (R, C): a view, or a copy if its rows are not contiguous."""
    return x.reshape(matrix_shape(x.shape))


def groups_shape(shape: Sequence[int], group: int) -> tuple[int, int]:
    """(R, ceil(C / group)): the shape of the scales of a tensor of ``shape``."""
    rows, cols = matrix_shape(shape)
    return rows, -(-cols // group)


def tiles(shape: Sequence[int], group: int, size: int | None = None) -> list[tuple[slice, slice]]:
    """The rows and columns of every tile of a matrix (R, C): how much is in float32 at once.

    All of an embedding in float32 would cost more than the moments save. A tile is whole rows or,
    where one row is longer than a tile, whole groups of one row. No group is cut, so the result
    does not depend on the size of the tiles. The elements of a tile have consecutive indices, from
    which random numbers are drawn. Under torch.compile there is one tile: the compiler makes loops
    of the whole.
    """
    rows, cols = shape
    size = max(rows * cols, 1) if torch.compiler.is_compiling() else size or TILE_ELEMENTS
    if rows * cols == 0:
        return []
    width = cols if cols <= size else max(size // group, 1) * group
    height = max(size // width, 1) if width == cols else 1
    tops = [slice(top, min(top + height, rows)) for top in range(0, rows, height)]
    lefts = [slice(left, min(left + width, cols)) for left in range(0, cols, width)]
    return [(top, left) for top in tops for left in lefts]


class StateMatrix(NamedTuple):
    """A state (or a parameter) of an optimizer in memory: a matrix (R, C) in one of three forms.

    Attributes:
        codes: (R, C), float8_e4m3fn or float16; without a scale, the values in any float dtype.
        scale: (R, ceil(C / group)), float32; None where ``codes`` are the values.
        exponent: as scale, or None where the range is not expanded.
        group: how many consecutive elements of a row share a scale.
    """

    codes: Tensor
    scale: Tensor | None = None
    exponent: Tensor | None = None
    group: int = 1

    def decode(self) -> Tensor:
        """The values, (R, C) float32."""
        if self.scale is None:
            return self.codes.to(torch.float32)
        if self.exponent is None:
            return decode_groups(self.codes, self.scale, self.group)
        return decode_expanded(self.codes, self.scale, self.exponent, self.group)

    def write(self, x_RC: Tensor, chance: Tensor | None = None) -> None:
        """Overwrite the state with ``x_RC``, (R, C) float32, in its own form.

        ``chance`` (R, C), uniform in [0, 1), rounds up or down, so that the expectation is x. None
        rounds to nearest. A matrix without a scale is always rounded to nearest.
        """
        if self.scale is None:
            new: tuple[Tensor, ...] = (x_RC,)
        elif self.exponent is None:
            new = encode_groups(x_RC, self.group, self.codes.dtype, chance)
        else:
            new = encode_expanded(x_RC, self.group, chance)
        for old, value in zip(self.tensors(), new, strict=True):
            old.copy_(value)

    def tensors(self) -> list[Tensor]:
        """Codes, scale and exponent, those that there are."""
        return [x for x in self[:3] if x is not None]

    def tile(self, rows: slice, cols: slice) -> StateMatrix:
        """Views of some rows, and of some columns that begin with a group."""
        groups = slice(cols.start // self.group, -(-cols.stop // self.group))
        scale, exponent = [None if x is None else part(x, rows, groups) for x in self[1:3]]
        return StateMatrix(part(self.codes, rows, cols), scale, exponent, self.group)


def part(x_RC: Tensor, rows: slice, cols: slice) -> Tensor:
    """A view of some rows and columns. Not ``x[rows, cols]``, which wants the tensor's device."""
    tall = x_RC.narrow(0, rows.start, rows.stop - rows.start)
    return tall.narrow(1, cols.start, cols.stop - cols.start)


def _in_whole_groups(
    function: Callable[..., tuple[Tensor, ...]], group: int, x_RC: Tensor, *matrices: Tensor | None
) -> tuple[Tensor, ...]:
    """Apply ``function`` to the columns of whole groups, then to the rest; concatenate the results.

    Inductor on a CPU (2.13) miscompiles a loop over groups that do not divide a row (see
    `float8.kernels.cpu`), and padding would copy the whole matrix. ``group`` elements share a
    scale. ``function(x, *matrices)`` returns the results; each of ``matrices`` is (R, C), (R, G) or
    None.
    """
    columns = x_RC.shape[1]
    whole = columns - columns % group
    if whole in (0, columns):
        return function(x_RC, *matrices)

    def left(x: Tensor | None) -> Tensor | None:
        return x if x is None else x[:, : whole if x.shape[1] == columns else whole // group]

    def right(x: Tensor | None) -> Tensor | None:
        return x if x is None else x[:, whole if x.shape[1] == columns else whole // group :]

    halves = [function(*map(side, (x_RC, *matrices))) for side in (left, right)]
    return tuple([torch.cat(pair, dim=1) for pair in zip(*halves, strict=True)])


def _groups(x_RC: Tensor, group: int) -> Tensor:
    """(R, G, extent): the matrix with its groups as the last dimension."""
    rows, columns = x_RC.shape
    extent = max(1, min(group, columns))
    return x_RC.reshape(rows, columns // extent, extent)


def encode_groups(
    x_RC: Tensor, group: int, dtype: torch.dtype, chance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Linear codes (R, C) and a scale (R, G) per group of a float32 matrix.

    They are rounded to nearest even, or with ``chance``, (R, C) uniform in [0, 1), up or down so
    that the expectation is x. ``dtype`` is ``torch.float8_e4m3fn`` or ``torch.float16``. A nonzero
    element stays nonzero in float16, at the cost of half a smallest subnormal, 2^-41 of the group's
    amax.
    """

    def whole(x: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        tiles = _groups(x, group)
        magnitude = tiles.abs()
        amax = torch.where(magnitude < math.inf, magnitude, 0.0).amax(2, keepdim=True)
        scale = definition.scale_from_amax(amax, torch.finfo(dtype).max)
        if chance is None:
            codes = plain.cast_by_scale(tiles, scale, (1, 1, -1), dtype)
        else:
            y = (magnitude * definition.reciprocal(scale)).clamp(max=torch.finfo(dtype).max)
            y = stochastic.on_grid(y, _groups(chance, group), dtype)
            codes = _signed(y, tiles).to(dtype)
        if dtype == torch.float16:
            smallest = torch.where(tiles < 0, -(2.0**-24), 2.0**-24).to(dtype)
            codes = torch.where((codes == 0) & (tiles != 0), smallest, codes)
        return codes.reshape(x.shape), scale.squeeze(2)

    codes, scale = _in_whole_groups(whole, group, x_RC, chance)
    return codes, scale


def _signed(y: Tensor, x: Tensor) -> Tensor:
    """y with the sign of x, NaN where x is NaN or inf."""
    y = y * x.sign()  # a zero has no sign: it stays zero
    if torch.compiler.is_compiling():
        return torch.where(x.abs() < math.inf, y, math.nan)
    return y.add_(x, alpha=0)  # in one fast pass


def decode_groups(codes_RC: Tensor, scale_RG: Tensor, group: int) -> Tensor:
    """``codes * scale``: float32 (R, C) of linear codes."""

    def whole(codes: Tensor, scale: Tensor) -> tuple[Tensor]:
        x = _groups(codes, group).to(torch.float32)
        return ((x * scale.unsqueeze(2)).reshape(codes.shape),)

    return _in_whole_groups(whole, group, codes_RC, scale_RG)[0]


def encode_expanded(
    x_RC: Tensor, group: int, chance: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """E4M3 codes (R, C) of COAT's dynamic range expansion, scale (R, G) and exponent (R, G).

    ``x_RC`` is float32 of any sign; ``group`` elements share a scale and an exponent. ``chance``,
    (R, C) uniform in [0, 1), rounds up or down so that the expectation is x, but never to 0.
    """

    def whole(x: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        tiles = _groups(x, group)
        scale, exponent = _range_of(tiles)
        factor = definition.reciprocal(scale)
        if chance is not None:
            factor = factor * (1 + 2.0**-22)  # the largest must not come out just below 448
        ratio = (tiles.abs() * factor).clamp(max=1.0)
        y = _exp2(_log2(ratio) * definition.reciprocal(exponent)) * E4M3_MAX
        y = y.clamp(SMALLEST_CODE, E4M3_MAX)
        if chance is not None:
            y = stochastic.on_expanded_grid(y, _groups(chance, group), exponent)
        codes = _signed(y, tiles).to(torch.float8_e4m3fn)
        return codes.reshape(x.shape), scale.squeeze(2), exponent.squeeze(2)

    codes, scale, exponent = _in_whole_groups(whole, group, x_RC, chance)
    return codes, scale, exponent


def _log2(x: Tensor) -> Tensor:
    # In float64, rounded once: the last bit of torch's float32 logarithms and exponentials on a CPU
    # may depend on the number of elements, and a shard of a state must equal its rows of the whole.
    return x.to(torch.float64).log2().to(torch.float32)


def _exp2(x: Tensor) -> Tensor:
    return x.to(torch.float64).exp2().to(torch.float32)


def _range_of(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """scale and exponent (R, G, 1) of the nonzero finite magnitudes of each group."""
    magnitude = tiles.abs()
    finite = torch.where(magnitude < math.inf, magnitude, 0.0)
    largest = finite.amax(2, keepdim=True).clamp(min=2.0**-126)
    smallest = torch.where(finite > 0, finite, math.inf).amin(2, keepdim=True)
    log2_range = _log2(largest) - _log2(smallest)  # -inf for a group of zeros
    return largest, (log2_range * (1 / LOG2_RANGE)).clamp(MIN_EXPONENT, MAX_EXPONENT)


def decode_expanded(codes_RC: Tensor, scale_RG: Tensor, exponent_RG: Tensor, group: int) -> Tensor:
    """``sign * (|codes| / 448)^exponent * scale``: float32 (R, C) of expanded codes."""

    def whole(codes: Tensor, scale: Tensor, exponent: Tensor) -> tuple[Tensor]:
        x = _groups(codes, group).to(torch.float32)
        log2_ratio = _log2(x.abs() * (1 / E4M3_MAX))
        value = _exp2(log2_ratio * exponent.unsqueeze(2)).copysign(x) * scale.unsqueeze(2)
        return (value.reshape(codes.shape),)

    return _in_whole_groups(whole, group, codes_RC, scale_RG, exponent_RG)[0]
