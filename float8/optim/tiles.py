"""Tiles: how much of a parameter an eager step works on at once.

A step decodes moments to float32, computes, and encodes again. All of an embedding at once would
cost more float32 than the moments save, so a matrix is walked in tiles of at most `TILE` elements:
whole rows, or, where one row is longer than that, whole groups of one row. Groups are never cut, so
the result does not depend on the size of the tiles; and tiles follow one another in memory, so the
elements of a tile have consecutive numbers (what a counter-based random number is drawn from).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

TILE = 2**18  # elements: 1 MB of float32, of which a step has some 20 at once; fits in caches


def tiles(
    shape: Sequence[int], group: int, size: int | None = None
) -> Iterator[tuple[slice, slice]]:
    """The rows and columns of every tile of a matrix.

    Args:
        shape: (R, C).
        group: how many neighbours in a row belong together.
        size: the most elements that a tile may have, `TILE` by default; one group is the least.
    """
    rows, cols = shape
    size = size or TILE
    if rows * cols <= size:
        if rows * cols:
            yield slice(0, rows), slice(0, cols)
        return
    width = cols if cols <= size else max(size // group, 1) * group
    height = max(size // width, 1) if width == cols else 1
    for top in range(0, rows, height):
        for left in range(0, cols, width):
            yield slice(top, min(top + height, rows)), slice(left, min(left + width, cols))


def part(x_RC: Tensor, rows: slice, cols: slice) -> Tensor:
    """A view of some rows and columns. Not ``x[rows, cols]``, which wants the tensor's device."""
    tall = x_RC.narrow(0, rows.start, rows.stop - rows.start)
    return tall.narrow(1, cols.start, cols.stop - cols.start)
