"""A run of `inspect` or `inspect_every` as a page: one HTML file, for a browser or a phone.

    python -m float8.numerics.report run.json -o report.html

It shows the problems of one snapshot in plain words, the alarms of the run, every cast in a table
that sorts and filters, its histogram against the format's range, and how it changed over the steps.
The snapshot is the last one, or that of --step. The file needs no network.
"""

# The page is page.html, with page.css and page.js put into it, and everything else is made here. No
# text of the run is markup: `tag` escapes it, and a content security policy allows one style and
# one script by their SHA-256. The script only filters, sorts and opens rows: all is there without.

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from string import Template

from float8.numerics import problems
from float8.numerics.alarms import Alarm
from float8.numerics.display import layer_name
from float8.numerics.markup import Markup, breakable, counted, joined, shown, tag
from float8.numerics.pictures import axis, histogram, lines, power_of_two
from float8.numerics.problems import Problem, kinds_of, level_of, problems_of
from float8.numerics.snapshot import Report, read_run
from float8.numerics.statistics import CastLabels, CastStatistics, edges_of

LEVELS = ("fine", "look", "bad")
TITLES = ("Healthy", "Worth a look", "Something is wrong")
SHOWN_ALARMS = 100  # active ones first
COLUMNS = {  # of numbers: the name, and how a value is shown
    "sqnr": ("SQNR dB", "{:.1f}"),
    "flushed": ("Flushed", "{:.2%}"),
    "saturated": ("Saturated", "{:.2%}"),
    "amax": ("Amax", "{:.3g}"),
    "scale_max": ("Scale", "{:.3g}"),
    "kurtosis": ("Kurtosis", "{:.3g}"),
    "staleness": ("Stale", "{:+.1f}"),
}
# The column in which a kind of problem is seen; the others are in that of the SQNR.
_KIND_COLUMNS = {
    problems.SATURATES: "saturated", problems.FLUSHES: "flushed", problems.STALE: "staleness",
}  # fmt: skip
_FIRST_GEMMS = {"input": "output", "weight": "output", "grad_output": "grad_input"}
_Places = Mapping[CastLabels, int]


def page(
    reports: Sequence[Report],
    about: Mapping[str, str],
    alarms: Sequence[Alarm] = (),
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
    if not reports:
        raise ValueError("there is no snapshot to show: the file holds an empty run")
    steps = [report.step for report in reports]
    if step is not None and step not in steps:
        raise ValueError(f"there is no snapshot of step {step}; there are those of {steps}")
    at = steps.index(step) if step is not None else len(steps) - 1
    report, names = reports[at], [_name_of(report, i) for i, report in enumerate(reports)]
    looks = [{cast.labels: cast for cast in report.casts} for report in reports]
    places = {own: i for i, own in enumerate(looks[at])}
    rows = [
        _row(i, cast, {name: look.get(own) for name, look in zip(names, looks, strict=True)})
        for i, (own, cast) in enumerate(looks[at].items())
    ]
    style, script = _resource("page.css"), _resource("page.js")
    head = (about["file"], f"float8 {about['float8']}", f"torch {about['torch']}")
    policy = f"style-src {_digest(style)}; script-src {_digest(script)}"
    return Template(_resource("page.html")).substitute(
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; {policy}",
        style=style,
        script=script,
        model=joined([report.model or "model"]),
        about=joined([" · ".join([*head, counted(len(reports), "snapshot")])]),
        health=_health(report, names[at], places),
        alarms=_alarms(alarms, places) if alarms else "",
        run=_run(reports, names) if len(reports) > 1 else "",
        tiles=_tiles(report.casts),
        axis=axis(),
        rows=joined(rows),
        looks="many" if len(reports) > 1 else "one",
    )


def summary(casts: Sequence[CastStatistics], found: Sequence[Problem]) -> str:
    """The health of a snapshot in a sentence."""
    if not casts:
        return "No cast was seen: was the model converted, and did it run while inspect was open?"
    if found:
        concerned = {cast.key for problem in found for cast in problem.casts}
        return f"{len(concerned)} of {len(casts)} casts want{'s' * (len(concerned) == 1)} a look."
    return f"All {len(casts)} casts keep what their formats can keep: there is nothing to do."


def _name_of(report: Report, place: int) -> str:
    return f"snapshot {place + 1}" if report.step is None else f"step {report.step}"


def _badge(level: int, name: str = "") -> Markup:
    return tag("b", name or LEVELS[level], class_=f"badge l{level}")


def _finding(badge: Markup, title: str, text: str, advice: str, place: int | None) -> Markup:
    link = () if place is None else (" ", tag("a", "Show it", href=f"#c{place}"))
    parts = tag("h3", badge, title), tag("p", text, *link), tag("p", advice, class_="muted")
    return tag("div", *parts, class_="problem")


def _health(report: Report, name: str, places: _Places) -> Markup:
    found = problems_of(report.casts)
    level = max((problem.level for problem in found), default=0)
    title = f"{TITLES[level]} at {name}" if len(report) else "Nothing seen"
    findings = [
        _finding(_badge(p.level), p.title, p.text, p.kind.advice, places[p.casts[0].labels])
        for p in found
    ]
    parts = [tag("h2", title), tag("p", summary(report.casts, found))]
    parts.append(tag("div", *findings, class_="problems"))
    if report.skipped:
        said = f"{counted(len(report.skipped), 'layer')} not seen, or not wholly"
        skipped = sorted(report.skipped.items())
        reasons = (tag("p", tag("b", layer), f": {reason}") for layer, reason in skipped)
        parts.append(tag("details", tag("summary", said), *reasons, class_="problem"))
    return tag("section", *parts, id="health", class_=f"card l{level}")


def _alarms(alarms: Sequence[Alarm], places: _Places) -> Markup:
    """Those that are active, then the others, the newest first."""
    active, findings = sum(alarm.is_active for alarm in alarms), []
    ordered = sorted(reversed(alarms), key=lambda alarm: not alarm.is_active)
    for alarm in ordered[:SHOWN_ALARMS]:
        to = "" if alarm.first == alarm.last else f" to step {alarm.last}"
        wrong = f"wrong {'from' if to else 'at'} step {alarm.first}{to}"
        end = "not ended" if alarm.is_active else f"ended at step {alarm.ended}"
        text = f"{alarm.message} (step {alarm.started}; {wrong}, {end})"
        badge = _badge(2, "active") if alarm.is_active else _badge(0, "ended")
        title, place = f"{alarm.rule}: {alarm.place}", places.get(alarm.labels)
        findings.append(_finding(badge, title, text, alarm.advice, place))
    left = len(alarms) - SHOWN_ALARMS
    findings += [tag("p", f"and {left} more", class_="problem")] if left > 0 else []
    title = tag("h2", f"{counted(len(alarms), 'alarm')}, {active} active")
    parts = title, tag("div", *findings, class_="problems")
    return tag("section", *parts, id="alarms", class_=f"card l{2 if active else 0}")


def _run(reports: Sequence[Report], names: Sequence[str]) -> Markup:
    """The SQNR over the snapshots, and what those say that want a look."""
    known = [[c.sqnr for c in r.casts if c.sqnr is not None] for r in reports]
    series = {
        "median": [statistics.median(values) if values else None for values in known],
        "worst": [min(values, default=None) for values in known],
    }
    key = Markup(" and ").join(tag("b", name, class_=f"k-{name}") for name in series)
    parts = [tag("h2", "SQNR over the run: ", Markup(key)), *lines(series, "over-run", names)]
    found = [problems_of(report.casts) for report in reports]
    levels = [max((problem.level for problem in each), default=0) for each in found]
    for level, group in groupby(range(len(reports)), key=levels.__getitem__):
        first, *later = group
        said = f"{names[first]} to {names[later[-1]]} " if later else f"{names[first]} "
        texts = (tag("p", tag("b", f"{one.title}. "), one.text) for one in found[first])
        head = tag("summary", said, _badge(level)), tag("p", f"At {names[first]}:")
        parts += [tag("details", *head, *texts)] if level else []
    return tag("section", *parts, id="run", class_="card")


def _tiles(casts: Sequence[CastStatistics]) -> Markup:
    def tile(name: str, value: float | None, spec: str, where: str) -> Markup:
        parts = tag("small", name), tag("b", shown(value, spec)), tag("small", breakable(where))
        return tag("div", *parts, class_="tile")

    def worst(name: str, key: str, spec: str, sign: int = 1) -> Markup:
        known = [cast for cast in casts if getattr(cast, key) is not None]
        cast = max(known, key=lambda cast: sign * getattr(cast, key), default=None)
        value = getattr(cast, key, None)
        where = f"{layer_name(cast.layer)} {cast.operand}" if cast and value else "in all casts"
        return tile(name, value, spec, where)

    sqnrs = [cast.sqnr for cast in casts if cast.sqnr is not None]
    layers = len({cast.layer for cast in casts})
    return joined(
        (
            worst("worst SQNR", "sqnr", "{:.1f} dB", -1),
            tile(
                "median SQNR", statistics.median(sqnrs or [math.nan]), "{:.1f} dB", "of all casts"
            ),
            worst("most saturated", "saturated", "{:.2%}"),
            worst("most flushed", "flushed", "{:.2%}"),
            worst("inf or NaN", "nonfinite", "{:,}"),
            tile("layers", layers, "{:,}", counted(len(casts), "cast")),
        )
    )


# --- the table


def _row(place: int, cast: CastStatistics, over: Mapping[str, CastStatistics | None]) -> Markup:
    """A cast of the shown snapshot: its summary is the row, and the rest is what opens.

    Args:
        place: of the row, which names it.
        cast: of the shown snapshot.
        over: name of each snapshot -> this cast in it.
    """
    bars, large_bars = histogram(cast, f"h{place}")
    sqnrs = [None if look is None else look.sqnr for look in over.values()]
    line, large_line = lines({"own": sqnrs}, f"t{place}", list(over))
    second = "" if cast.gemm == _FIRST_GEMMS.get(cast.operand) else f" for {cast.gemm}"
    how = f"{cast.format.upper()} {cast.scaling} {cast.granularity}{second}"
    cells = (
        tag("span", breakable(layer_name(cast.layer)), class_="layer"),
        tag("span", cast.operand, tag("small", how), class_="operand"),
        tag("span", bars, class_="histogram"),
        tag("span", line, class_="trend"),
        *(_cell(cast, key) for key in COLUMNS),
    )
    said = tag("figcaption", "Share of the elements by magnitude, before the cast (logarithmic)")
    figure = tag("figure", large_bars, said, large_line)
    parts = [tag("div", figure, _facts(cast), class_="panes")]
    parts += [tag("p", tag("b", f"It {kind.one}. "), kind.advice) for kind in kinds_of(cast)]
    if wrong := [name for name, look in over.items() if look and level_of(look)]:
        parts.append(tag("p", f"It wants a look at {', '.join(wrong)}."))
    inside, class_ = tag("div", *parts, class_="inside"), f"cast l{level_of(cast)}"
    return tag("details", tag("summary", *cells), inside, id=f"c{place}", class_=class_)


def _cell(cast: CastStatistics, key: str) -> Markup:
    (name, spec), level, more = COLUMNS[key], level_of(cast), []
    wrong = {_KIND_COLUMNS.get(kind, "sqnr") for kind in kinds_of(cast)}
    if key == "sqnr":
        if cast.sqnr is not None and cast.sqnr < problems.noisy_below(cast.format):
            wrong.add(key)  # also where another problem explains it
        more += [_badge(level)] if level else []
        more += [tag("small", f"{cast.nonfinite:,} inf or NaN")] if cast.nonfinite else []
    if key == "scale_max" and cast.scale_min != cast.scale_max:
        more.append(tag("small", f"from {cast.scale_min:.3g}"))
    value = tag("i", shown(getattr(cast, key), spec))
    class_ = f"{key} l{level}" if key in wrong else key
    return tag("span", tag("small", name, class_="name"), value, *more, class_=class_)


def _facts(cast: CastStatistics) -> Markup:
    facts = {
        "elements": f"{cast.elements:,} in {counted(cast.calls, 'call')}",
        "zeros": f"{cast.zeros:,}",
        "inf or NaN": f"{cast.nonfinite:,}",
        "scales": f"{cast.scale_min:.3g} to {cast.scale_max:.3g}",
        "SQNR": f"{shown(cast.sqnr, '{:.1f}')} of {problems.EXPECTED_SQNR[cast.format]:g} dB",
        "gradient SQNR": shown(cast.gradient_sqnr, "{:.1f} dB"),
    }
    if edges := edges_of(cast):
        facts["precise between"] = f"{power_of_two(edges[2])} and {power_of_two(edges[4])}"
        facts["zero below"] = power_of_two(edges[0])
    return tag("dl", *(part for k, v in facts.items() for part in (tag("dt", k), tag("dd", v))))


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _resource(name: str) -> str:
    return (files("float8.numerics") / name).read_text(encoding="utf-8")


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
