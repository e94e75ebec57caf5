"""A report as a picture: for each cast, where its values lie, and what the format represents.

Each panel is one row of the report, worst first: a bar for each power of two, as high as the share
of the operand's nonzero elements in it, on a logarithmic scale, since what is lost is rare. The
format's range under the scale in use is white; the ground is shaded where values would saturate (to
the right) and where they become zero (to the left: below half the smallest subnormal). Between the
dashed line, the smallest normal value, and the left shade values lose bits. Where blocks have
scales of their own, the range is the widest that any of them has.

Each panel has its own horizontal axis: it is the place within the range that tells, not the
magnitude.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from float8.formats import FORMATS
from float8.numerics.rows import Row
from float8.numerics.table import named, operand_of, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 4
_COLOURS = {"input": "tab:blue", "weight": "tab:green", "grad_output": "tab:orange"}
_LEAST = 1e-7  # share of elements at which the vertical axis ends
_LEGEND = (
    "magnitude, in powers of two; shaded: becomes zero (left) or saturates (right); dashed: the "
    "smallest normal value"
)
_NORMAL = {
    fmt.name: float(torch.finfo(fmt.dtype).smallest_normal) for fmt in FORMATS.values()
}  # fmt: skip


def plot(rows: Sequence[Row], path: str | os.PathLike[str], title: str = "", top: int = 24) -> None:
    """Draw the first ``top`` rows that have anything to draw.

    Args:
        rows: in the order of the panels.
        path: of the picture; its suffix is the format, as ``.png`` or ``.svg``.
        title: above the panels.
        top: how many rows.

    Raises:
        ValueError: there is nothing to draw.
        ImportError: matplotlib is not installed.
    """
    shown = [row for row in rows if row.histogram.counts][:top]
    if not shown:
        raise ValueError("the report has nothing to draw: no operand had a nonzero finite element")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot draws with matplotlib: pip install matplotlib") from error
    across = min(COLUMNS, len(shown))
    down = -(-len(shown) // across)
    figure = Figure(figsize=(3.4 * across + 0.6, 2.3 * down + 1), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
    for row, axes in zip(shown, panels, strict=False):
        _draw(axes, row)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    left = len(rows) - len(shown)
    figure.suptitle(title + (f" ({len(shown)} worst of {len(rows)} casts)" if left else ""))
    figure.supxlabel(_LEGEND if across > 2 else _LEGEND.replace("; ", "\n"), fontsize=9)
    figure.supylabel("share of nonzero elements", fontsize=9)
    figure.savefig(path, dpi=130)


def _draw(axes: Axes, row: Row) -> None:
    lowest, counts = row.histogram
    total = sum(counts)
    exponents = range(lowest, lowest + len(counts))
    axes.set_yscale("log")
    axes.set_ylim(_LEAST, 1.5)
    shares = [count / total for count in counts]
    # The last one ends at the amax, so that what does not saturate is not in the shade.
    last = min(max(math.log2(row.amax) - exponents[-1], 0.1), 1) if row.amax > 0 else 1
    widths = [1.0] * (len(counts) - 1) + [last]
    axes.bar(exponents, shares, width=widths, align="edge", color=_COLOURS[row.operand], lw=0)
    _draw_range(axes, row, exponents)
    axes.set_title(f"{shortened(named(row.layer), 34)}\n{_summary(row)}", fontsize=8, loc="left")
    axes.tick_params(labelsize=7)


def _draw_range(axes: Axes, row: Row, exponents: Sequence[int]) -> None:
    smallest, largest = row.range
    start, end = exponents[0], exponents[-1] + 1
    if not (math.isfinite(largest) and largest > 0):
        axes.set_xlim(start - 1, end + 1)
        return  # a scale that is no number has no range
    low, high = math.log2(smallest) - 1, math.log2(largest)
    normal = math.log2(_NORMAL[row.format] * row.scale_min)
    axes.set_xlim(min(start, low) - 2, max(end, high) + 2)
    left, right = axes.get_xlim()
    for span in ((left, low), (high, right)):
        axes.axvspan(*span, color="tab:red", alpha=0.13, lw=0, zorder=0)
    axes.axvline(normal, color="0.4", ls="--", lw=0.8)


def _summary(row: Row) -> str:
    parts = [f"{operand_of(row)}, {row.format}"]
    if row.sqnr is not None:
        parts.append(f"{row.sqnr:.1f} dB")
    if row.nonfinite:
        parts.append(f"{row.nonfinite} inf or NaN")
    for name in ("flushed", "saturated"):
        if share := getattr(row, name):
            parts.append(f"{share:.2g} {name}" if share < 1e-4 else f"{share:.2%} {name}")
    return ", ".join(parts)
