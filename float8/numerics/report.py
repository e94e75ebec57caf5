"""A run of `inspect` or `inspect_every` as a page: one HTML file, for a browser or a phone.

    python -m float8.numerics.report run.json -o report.html

It shows the problems of one snapshot in plain words, the alarms of the run, every cast in a table
that sorts and filters, its histogram against the format's range, and how it changed over the steps.
The snapshot is the last one, or that of --step. The file needs no network.
"""

# page.html is the page, as a template of Jinja (which torch needs too), with page.css and page.js
# put into it; what is computed is here. No text of the run is markup: the template escapes all, and
# a content security policy allows one style and one script by their SHA-256. The script only
# filters, sorts and opens rows: all is there without.

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from float8.numerics import alarms as rules
from float8.numerics import snapshot
from float8.numerics.snapshot import Report, read_run
from float8.numerics.statistics import FORMAT_OF, CastStatistics

SHOWN_ALARMS = 100  # active ones first
_DECADES = 8  # of the vertical axis of a histogram
_UNITS = 100  # of a picture, from top to bottom
_OCTAVE = 10  # units, of a histogram from left to right
_ZONES = "flushed", "flushed-some", "subnormal", "normal", "saturated-some", "saturated"
_BARS = "flushed", "subnormal", "normal", "saturated"
_RAISED = str.maketrans("-0123456789.", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹·")


def page(
    reports: Sequence[Report],
    about: Mapping[str, str],
    alarms: Sequence[rules.Alarm] = (),
    step: int | None = None,
) -> str:
    """The HTML of a run.

    Args:
        reports: its snapshots, in the order of the steps.
        about: for the head: "file", "float8" and "torch".
        alarms: of its file.
        step: of the snapshot that is shown; None is the last one.

    Raises:
        ValueError: there is no snapshot, or none of this step.
    """
    from jinja2 import Environment, FileSystemLoader

    found = [i for i, report in enumerate(reports) if step is None or report.step == step]
    if not found:
        at, steps = "" if step is None else f" of step {step}", [r.step for r in reports]
        raise ValueError(f"there is no snapshot{at} to show; the file has those of {steps}")
    names = [
        f"snapshot {i}" if report.step is None else f"step {report.step}"
        for i, report in enumerate(reports, 1)
    ]
    report = reports[found[-1]]
    looks = [{cast.labels: cast for cast in each.casts} for each in reports]
    rows = []
    for cast in report.casts:
        own = [look.get(cast.labels) for look in looks]
        line = lines({"own": [each.sqnr if each else None for each in own]}, names)
        wrong = [n for n, each in zip(names, own, strict=True) if each and rules.level_of(each)]
        rows.append((cast, histogram(cast), line, wrong))
    severity = {kind.name: i for i, kind in enumerate(rules.PROBLEM_KINDS)}
    newest = sorted(alarms, key=lambda a: a.started, reverse=True)
    folder = Path(__file__).parent
    texts = {kind: (folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js")}
    digests = {kind: hashlib.sha256(text.encode()).digest() for kind, text in texts.items()}
    options = dict.fromkeys(("autoescape", "trim_blocks", "lstrip_blocks"), True)
    environment: Any = Environment(loader=FileSystemLoader(folder), **options)  # type: ignore[arg-type]
    return str(
        environment.get_template("page.html").render(
            report=report,
            reports=reports,
            about=about,
            alarms=sorted(newest, key=lambda a: (not a.is_active, severity.get(a.rule, 0))),
            most=SHOWN_ALARMS,
            problems=rules.problems_of(report.casts),
            rows=rows,
            names=names,
            at=found[-1],
            places={cast.labels: i for i, cast in enumerate(report.casts)},
            rules=rules,
            snapshot=snapshot,
            lines=lines,
            edges_of=edges_of,
            power_of_two=power_of_two,
            run=_run(reports),
            digests={k: f"sha256-{base64.b64encode(d).decode()}" for k, d in digests.items()},
            **texts,
        )
    )


def _run(reports: Sequence[Report]) -> dict[str, Any]:
    """The SQNRs at each look, and the looks in a row at which the worst problem has one level."""
    known = [[c.sqnr for c in report.casts if c.sqnr is not None] for report in reports]
    found = [rules.problems_of(report.casts) for report in reports]
    levels = [max((problem.level for problem in each), default=0) for each in found]
    groups = [(level, [*g]) for level, g in groupby(range(len(reports)), levels.__getitem__)]
    series = {
        "median": [statistics.median(values) if values else None for values in known],
        "worst": [min(values, default=None) for values in known],
    }
    return {"problems": found, "groups": groups, "series": series}


# --- pictures


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


class Picture(NamedTuple):
    """An SVG: its width in units, and paths by class.

    Texts below it: place from left in %, and what. Horizontal lines: units from the top, and what;
    none is the axis of shares that all histograms have.
    """

    width: float
    paths: dict[str, str]
    marks: list[tuple[float, str]]
    levels: Sequence[tuple[int, str]] = ()


def power_of_two(exponent: float, digits: int = 1) -> str:
    """Such as 2⁻⁹."""
    return f"2{f'{exponent:.{digits}f}'.translate(_RAISED)}"


def histogram(cast: CastStatistics) -> Picture | None:
    """The share of the elements in each power of two, on a logarithmic scale."""
    edges, bars = edges_of(cast), bars_of(cast)
    ends = [exponent for start, end, _ in bars for exponent in (start, math.ceil(end))]
    ends += [math.floor(edges[0]) - 1, math.ceil(edges[-1]) + 2] if edges else []
    if not ends:
        return None
    first, last = int(min(ends)), int(max(ends))
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
    for start, end, share in bars:
        level = max(1 + math.log10(share) / _DECADES, 0.02)
        for kind, low, high in zip(_BARS, cuts, cuts[1:], strict=False):
            add(f"bar {kind}", max(start + 0.1, low), min(end, high), level)
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if last - first <= 9 * n)
    powers = range(-(-(first + 1) // every) * every, last, every)
    marks = [(100 * (e - first) / (last - first), power_of_two(e, 0)) for e in powers]
    return Picture(_OCTAVE * (last - first), paths, marks)


def lines(series: Mapping[str, Sequence[float | None]], looks: Sequence[str]) -> Picture | None:
    """Values in dB at each look, by name, over an axis of whole dB."""
    finite = {
        kind: {i: v for i, v in enumerate(values) if v is not None and math.isfinite(v)}
        for kind, values in series.items()
    }
    known = [value for points in finite.values() for value in points.values()]
    if not known or len(looks) < 2:
        return None
    low, high, last = min(known), max(known), len(looks) - 1
    every = next(n * 10**k for k in count() for n in (1, 2, 5) if high - low <= 4 * n * 10**k)
    first = math.floor(low / every) * every
    end = max(math.ceil(high / every) * every, first + every)

    def y(value: float) -> int:
        return round(_UNITS * (0.05 + 0.9 * (end - value) / (end - first)))

    paths = {
        f"line {kind}": "".join(  # h0 draws a dot
            f"L{i} {y(v)}" if i - 1 in points else f"M{i} {y(v)}h0" for i, v in points.items()
        )
        for kind, points in finite.items()
    }
    marks = [(100 * i / last, looks[i]) for i in sorted({0, last // 3, 2 * last // 3, last})]
    levels = [(y(value), f"{value} dB") for value in range(first, end + 1, every)]
    return Picture(last, paths, marks, levels)


# --- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; 0, or 2 with a line on stderr if it cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m float8.numerics.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", type=Path, help="the JSON file that Report.save or a monitor wrote")
    add("-o", "--output", type=Path, help="by default beside the run, with the suffix .html")
    add("--step", type=int, help="the snapshot to show; by default the last one")
    options = parser.parse_args(arguments)
    run: Path = options.run
    target: Path = options.output or run.with_suffix(".html")
    try:
        reports, alarms = read_run(run)
        if target.exists() and target.samefile(run):
            raise ValueError("the page would overwrite the run; name another by -o")
        about = json.loads(run.read_text(encoding="utf-8")) | {"file": run.name}
        target.write_text(page(reports, about, alarms, options.step), encoding="utf-8")
    except (OSError, ValueError) as error:
        at = f"{run}: " if str(run) not in str(error) else ""
        print(f"{at}{' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
