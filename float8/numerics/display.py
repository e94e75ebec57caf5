"""A report as text and as a picture: its casts in the order of the report, worst first.

**Text** has one line for each cast and at most 100 columns. An operand that is cast otherwise for
its second GEMM, which contracts its other dimension, has a second line marked ``.T``. The common
beginning of all layer names is written once, and names that are still too long lose their middle.
Their problems follow in words, because an SQNR follows the large elements and hides small ones that
became zero.

**A picture** has one panel for each cast: a bar for each power of two, as high as the share of the
operand's nonzero elements in it, on a logarithmic scale. The range that the format represents under
the scale in use is white. Values in the shaded parts saturate (right) or become zero (left: below
half of the smallest subnormal). Between the left shade and the dashed line, the smallest normal
value, values lose bits. Where blocks have scales of their own, the range is the widest of them.
Each panel has its own horizontal axis, because only the place within the range matters.
"""

from __future__ import annotations

import itertools
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from float8.numerics.problems import problems_of
from float8.numerics.statistics import CastStatistics, edges_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# --- text

WIDTH = 100
_HEADERS = (
    ["layer", "operand", "format", "amax", "scale", "flushed", "satur.", "SQNR", "kurt.", "stale"],
    ["", "", "", "", "", "%", "%", "dB", "", "2^"],
)
_SPACE = 2  # between columns
_SHORTEST = 12  # characters of a layer's name that are kept at least


def table_of_casts(
    casts: Sequence[CastStatistics], skipped: Mapping[str, str], top: int | None = None
) -> str:
    """The first ``top`` casts as a table; below it the problems of all, and skipped layers."""
    from tabulate import tabulate

    shown = casts[:top]
    prefix = common_prefix([cast.layer for cast in shown])
    cells = [_cells(cast) for cast in shown]
    columns = zip(*(line[1:] for line in _HEADERS), *cells, strict=True)
    width = max(WIDTH - sum(max(map(len, column)) + _SPACE for column in columns), _SHORTEST)
    names = [shortened(layer_name(cast.layer[len(prefix) :]), width) for cast in shown]
    lines = [[name, *rest] for name, rest in zip(names, cells, strict=True)]
    align = ["left"] * 3 + ["right"] * (len(_HEADERS[0]) - 3)
    # Headers as lines of the table: tabulate makes columns with its own headers two wider.
    text = tabulate([*_HEADERS, *lines], tablefmt="plain", colalign=align, disable_numparse=True)
    notes = [f"layer names begin with {prefix!r}"] if prefix else []
    if any(line[0].endswith(".T") for line in cells):
        notes.append(".T: cast for the GEMM that contracts the operand's other dimension")
    notes += [f"and {len(casts) - len(shown)} more"] if len(shown) < len(casts) else []
    notes += [f"{problem.title}: {problem.text}" for problem in problems_of(casts)]
    notes += [f"not seen: {layer_name(fqn)}: {reason}" for fqn, reason in skipped.items()]
    fill = partial(textwrap.fill, width=WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join([text, *map(fill, notes)])


def simple_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], words: int, top: int | None
) -> str:
    """The first ``top`` rows as a table, whose first ``words`` columns are not numbers."""
    from tabulate import tabulate

    align = ["left"] * words + ["right"] * (len(headers) - words)
    text = tabulate(rows[:top], headers, "simple", colalign=align, disable_numparse=True)
    left = len(rows[top:]) if top is not None else 0
    return f"{text}\nand {left} more" if left else text


def layer_name(fqn: str) -> str:
    """A layer's name; the root of a model has none."""
    return fqn or "(the module itself)"


def common_prefix(names: Sequence[str]) -> str:
    """The common beginning of several names, up to a dot."""
    if len(set(names)) < 2:
        return ""
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    same = itertools.takewhile(lambda part: len(set(part)) == 1, parts)
    return "".join(f"{part[0]}." for part in same)


def shortened(name: str, width: int) -> str:
    """At most ``width`` characters of a name, without its middle."""
    if len(name) <= width:
        return name
    start = (width - 2) // 3
    return f"{name[:start]}..{name[len(name) - (width - 2 - start) :]}"


def _operand(cast: CastStatistics) -> str:
    first = "grad_input" if cast.operand == "grad_output" else "output"
    return cast.operand if cast.gemm == first else f"{cast.operand}.T"


def _cells(cast: CastStatistics) -> list[str]:
    percents = (None if f is None else 100 * f for f in (cast.flushed, cast.saturated))
    values = (*percents, cast.sqnr, cast.kurtosis, cast.staleness)
    specs = (".2f", ".2f", ".1f", ".3g", "+.1f")
    start = [_operand(cast), cast.format, f"{cast.amax:.2g}", f"{cast.scale_max:.2g}"]
    return [*start, *(_formatted(v, spec) for v, spec in zip(values, specs, strict=True))]


def _formatted(value: float | None, spec: str) -> str:
    if value is None:
        return "-"
    text = format(value, spec)
    return text.replace("-", "").replace("+", "") if float(text) == 0 else text


# --- pictures

_ACROSS = 4  # panels
_COLOURS = {"input": "tab:blue", "weight": "tab:green", "grad_output": "tab:orange"}
_LEAST_SHARE = 1e-7  # where the vertical axis ends
_LEGEND = (
    "magnitude, in powers of two; shaded: becomes zero (left) or saturates (right); dashed: the "
    "smallest normal value"
)


def plot_casts(
    casts: Sequence[CastStatistics], path: str | os.PathLike[str], title: str = "", top: int = 24
) -> None:
    """Draw the first ``top`` casts that have a nonzero finite element; see `Report.plot`."""
    shown = [cast for cast in casts if cast.histogram.counts][:top]
    if not shown:
        raise ValueError("the report has nothing to draw: no operand had a nonzero finite element")
    from matplotlib.figure import Figure

    across = min(_ACROSS, len(shown))
    down = -(-len(shown) // across)
    figure = Figure(figsize=(3.4 * across + 0.6, 2.3 * down + 1), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False, sharey=True).flat
    for cast, axes in zip_longest(shown, panels):
        if cast is None:
            axes.set_visible(False)
        else:
            _draw(axes, cast)
    count = f" ({len(shown)} worst of {len(casts)} casts)" if len(shown) < len(casts) else ""
    figure.suptitle(title + count)
    figure.supxlabel(_LEGEND if across > 2 else _LEGEND.replace("; ", "\n"), fontsize=9)
    figure.supylabel("share of nonzero elements", fontsize=9)
    figure.savefig(path, dpi=130)


def _draw(axes: Axes, cast: CastStatistics) -> None:
    lowest, counts = cast.histogram
    exponents = range(lowest, lowest + len(counts))
    axes.set(yscale="log", ylim=(_LEAST_SHARE, 1.5))
    # The last bar ends at the amax: it reaches into the shade only if something saturates.
    last = min(max(math.log2(cast.amax) - exponents[-1], 0.1), 1) if cast.amax > 0 else 1
    shares, widths = [n / sum(counts) for n in counts], [1.0] * (len(counts) - 1) + [last]
    axes.bar(exponents, shares, width=widths, align="edge", color=_COLOURS[cast.operand], lw=0)
    edges, start, end = edges_of(cast), exponents[0], exponents[-1] + 1
    axes.set_xlim(start - 1, end + 1)  # a scale that is not a number has no range
    if edges:
        left, right = min(start, edges[0]) - 2, max(end, edges[-1]) + 2
        axes.set_xlim(left, right)
        for span in ((left, edges[0]), (edges[-1], right)):
            axes.axvspan(*span, color="tab:red", alpha=0.13, lw=0, zorder=0)
        axes.axvline(
            edges[2] - math.log2(cast.scale_max / cast.scale_min), color="0.4", ls="--", lw=0.8
        )
    parts = [f"{_operand(cast)}, {cast.format}"]
    parts += [] if cast.sqnr is None else [f"{cast.sqnr:.1f} dB"]
    parts += [f"{cast.nonfinite} inf or NaN"] if cast.nonfinite else []
    for name, share in (("flushed", cast.flushed), ("saturated", cast.saturated)):
        if share:
            parts.append(f"{share:.2g} {name}" if share < 1e-4 else f"{share:.2%} {name}")
    name = shortened(layer_name(cast.layer), 34)
    axes.set_title(f"{name}\n{', '.join(parts)}", fontsize=8, loc="left")
    axes.tick_params(labelsize=7)
