"""A report as text: one line for each cast, worst first, at most 100 columns wide.

An operand whose second use is cast otherwise has a second line, marked ``.T``: the product that
contracts its other dimension reads its transpose. What all layer names begin with is said once, and
names that are still too long lose their middle.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence

from float8.numerics.rows import Row

WIDTH = 100
_HEADERS = (
    ["layer", "operand", "format", "amax", "scale", "flushed", "satur.", "SQNR", "kurt.", "stale"],
    ["", "", "", "", "", "%", "%", "dB", "", "2^"],
)
_SPACE = 2  # between columns
_SHORTEST = 12  # what is left of a layer's name at least


def table(rows: Sequence[Row], skipped: Mapping[str, str], top: int | None = None) -> str:
    """The rows as they come, at most ``top`` of them, and what was not seen."""
    from tabulate import tabulate

    shown = rows[:top]
    prefix = common_prefix([row.layer for row in shown])
    cells = [_cells(row) for row in shown]
    columns = zip(*(line[1:] for line in _HEADERS), *cells, strict=True)
    room = WIDTH - sum(max(map(len, column)) + _SPACE for column in columns)
    names = [shortened(named(row.layer[len(prefix) :]), max(room, _SHORTEST)) for row in shown]
    lines = [[name, *rest] for name, rest in zip(names, cells, strict=True)]
    align = ["left"] * 3 + ["right"] * (len(_HEADERS[0]) - 3)
    # As lines of the table: tabulate gives every column of its own headers two more characters.
    text = tabulate([*_HEADERS, *lines], tablefmt="plain", colalign=align, disable_numparse=True)
    notes = [f"layer names begin with {prefix!r}"] if prefix else []
    if any(line[0].endswith(".T") for line in cells):
        notes.append(".T: the cast that the product over the operand's other dimension reads")
    notes += [f"and {len(rows) - len(shown)} more"] if len(shown) < len(rows) else []
    notes += _of_nonfinite([row for row in rows if row.nonfinite])
    notes += [f"not seen: {named(fqn)}: {reason}" for fqn, reason in skipped.items()]
    wrapped = [
        textwrap.fill(note, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for note in notes
    ]
    return "\n".join([text, *wrapped])


def _of_nonfinite(rows: Sequence[Row]) -> list[str]:
    """The other numbers are those of the finite elements alone."""
    if not rows:
        return []
    first, count = rows[0], len(rows)
    where = f"{named(first.layer)}, {operand_of(first)}"
    found = f"{first.nonfinite:,} of {first.elements:,} elements"
    return [f"inf or NaN in {count} cast{'s' * (count > 1)}; {where}: {found}"]


def named(fqn: str) -> str:
    """A layer's name; the root of a model has none."""
    return fqn or "(the module itself)"


def common_prefix(names: Sequence[str]) -> str:
    """What all of several names begin with, up to a dot."""
    if len(set(names)) < 2:
        return ""
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    same = itertools.takewhile(lambda part: len(set(part)) == 1, parts)
    return "".join(f"{part[0]}." for part in same)


def shortened(name: str, width: int) -> str:
    """At most ``width`` characters of a name: its ends tell more than its middle."""
    if len(name) <= width:
        return name
    start = (width - 2) // 3
    return f"{name[:start]}..{name[len(name) - (width - 2 - start) :]}"


def operand_of(row: Row) -> str:
    """The operand, ``.T`` where it is cast for the product that contracts its other dimension."""
    first = "grad_input" if row.operand == "grad_output" else "output"
    return row.operand if row.gemm == first else f"{row.operand}.T"


def _cells(row: Row) -> list[str]:
    return [
        operand_of(row),
        row.format,
        f"{row.amax:.2g}",
        f"{row.scale_max:.2g}",
        _shown(row.flushed, 100, ".2f"),
        _shown(row.saturated, 100, ".2f"),
        _shown(row.sqnr, 1, ".1f"),
        _shown(row.kurtosis, 1, ".3g"),
        _shown(row.staleness, 1, "+.1f"),
    ]


def _shown(value: float | None, factor: float, spec: str) -> str:
    if value is None:
        return "-"
    text = format(value * factor, spec)
    return text.replace("-", "").replace("+", "") if float(text) == 0 else text
