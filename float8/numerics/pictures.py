"""The pictures of the page as SVG: histograms over the range of their format, and SQNRs over a run.

A picture is drawn once, without a size, in a ``<symbol>``. A cast's row shows the symbol small; the
opened row shows it again, large, with texts around it whose places are percentages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from float8.numerics.markup import Markup, joined, tag
from float8.numerics.statistics import CastStatistics, edges_of

_DECADES = 8  # of the vertical axis of a histogram
_UNITS = 100  # of a picture, from top to bottom
_OCTAVE = 10  # units, of a histogram from left to right
_LARGE = 140  # pixels from top to bottom
_BELOW = _LARGE + 18  # where the texts below a large picture stand
_ZONES = "flushed", "flushed-some", "subnormal", "normal", "saturated-some", "saturated"
_BARS = "flushed", "subnormal", "normal", "saturated"
Pictures = tuple[Markup, Markup]  # small, large
NOTHING = Markup(""), Markup("")
_RAISED = str.maketrans("-0123456789.", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹·")


def power_of_two(exponent: float, digits: int = 1) -> str:
    """Such as 2⁻⁹."""
    return f"2{f'{exponent:.{digits}f}'.translate(_RAISED)}"


def histogram(cast: CastStatistics, name: str) -> Pictures:
    """The share of the elements in each power of two, on a logarithmic scale.

    Args:
        cast: whose histogram.
        name: of the symbol.
    """
    (lowest, counts), edges = cast.histogram, edges_of(cast)
    ends = [lowest, lowest + len(counts)] if counts else []
    ends += [math.floor(edges[0]) - 1, math.ceil(edges[-1]) + 2] if edges else []
    if not ends:
        return NOTHING
    first, last = min(ends), max(ends)
    paths: dict[str, str] = {}

    def add(kind: str, start: float, end: float, share: float) -> None:
        if end > start:
            a, b = (round(_OCTAVE * (exponent - first)) for exponent in (start, end))
            box = f"M{a} {_UNITS}V{round(_UNITS * (1 - share))}H{b}V{_UNITS}z"
            paths[kind] = paths.get(kind, "") + box

    if edges:
        borders = [first, *edges[:3], max(edges[2:4]), edges[4], last]
        for kind, start, end in zip(_ZONES, borders, borders[1:], strict=False):
            add(f"zone {kind}", start, end, 1.0)
    # Bars are cut where the zones end. An amax at the end of the range saturates nothing.
    flushed, normal = (edges[0], edges[2]) if edges else (-math.inf, -math.inf)
    cuts = -math.inf, flushed, normal, edges[-1] if edges and cast.saturated else math.inf, math.inf
    ends_of_bars = [e + 1.0 for e in range(lowest, lowest + len(counts))]
    if counts:
        ends_of_bars[-1] -= min(max(ends_of_bars[-1] - math.log2(cast.amax or 1.0), 0.0), 0.8)
    for count, end in zip(counts, ends_of_bars, strict=True):
        level = 1 + math.log10(count / sum(counts)) / _DECADES if count else 0.0
        for kind, low, high in zip(_BARS, cuts, cuts[1:], strict=False):
            if count:
                add(f"bar {kind}", max(math.ceil(end) - 0.9, low), min(end, high), max(level, 0.02))
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if last - first <= 9 * n)
    powers = range(-(-(first + 1) // every) * every, last, every)
    texts = [
        (f"{100 * (e - first) / (last - first):.1f}%", _BELOW, power_of_two(e, 0)) for e in powers
    ]
    return _drawn(paths, name, _OCTAVE * (last - first), texts, Markup('<use href="#axis"/>'))


def axis() -> Markup:
    """The vertical axis of all large histograms; the page has it once."""
    marks = (("100 %", 0), ("1 %", 2), ("0.01 %", 4), ("1 ppm", 6))
    places = [(said, round(decades / _DECADES * _LARGE)) for said, decades in marks]
    grid = [tag("line", x1=0, x2="100%", y1=y, y2=y) for _, y in places]
    texts = [tag("text", said, x=2, y=y + 11) for said, y in places]
    return tag("svg", tag("g", *grid, *texts, id="axis"), class_="axis")


def lines(
    series: Mapping[str, Sequence[float | None]], name: str, looks: Sequence[str]
) -> Pictures:
    """Values in dB at each look.

    Args:
        series: their names and values.
        name: of the symbol.
        looks: their names.
    """
    known = [v for values in series.values() for v in values if v is not None and math.isfinite(v)]
    if not known or len(looks) < 2:
        return NOTHING
    low, high = min(known), max(known)
    pad = max(0.5, (high - low) * 0.1)

    def y(value: float) -> int:
        return round(_UNITS * (high + pad - value) / (high - low + 2 * pad))

    paths = {}
    for kind, values in series.items():
        path, before = "", False
        for i, value in enumerate(values):
            is_known = value is not None and math.isfinite(value)
            if value is not None and is_known:
                path += f"L{i} {y(value)}" if before else f"M{i} {y(value)}h0"  # h0 draws a dot
            before = is_known
        paths[f"line {kind}"] = path
    top, bottom = (round(_LARGE * y(value) / _UNITS) for value in (high, low))
    texts = [
        ("0", top - 4, f"{high:.1f} dB"),
        ("0", bottom + 14, f"{low:.1f} dB"),
        ("0", _BELOW, looks[0]),
        ("100%", _BELOW, looks[-1]),
    ]
    return _drawn(paths, name, len(looks) - 1, texts)


def _drawn(
    paths: Mapping[str, str],
    name: str,
    width: float,
    texts: Sequence[tuple[str, int, str]],
    *behind: Markup,
) -> Pictures:
    shapes = joined(tag("path", class_=kind, d=path) for kind, path in paths.items() if path)
    box = {"viewBox": f"0 0 {width} {_UNITS}", "preserveAspectRatio": "none"}
    symbol = tag("symbol", shapes, id=name, **box)
    small = tag("svg", symbol, tag("use", href=f"#{name}"), class_="small", aria_hidden="true")
    again = tag("use", href=f"#{name}", width="100%", height=_LARGE)
    anchor = {"0": "start", "100%": "end"}
    said = [tag("text", s, x=x, y=y, text_anchor=anchor.get(x, "middle")) for x, y, s in texts]
    return small, tag("svg", *behind, again, *said, class_="large", height=_BELOW + 6)
