"""A run of `inspect` or `inspect_every` as a page: one HTML file, for a browser or a phone.

    python -m float8.numerics.report run.json -o report.html

It shows the alarms and the problems in plain words, every cast in a table that sorts and filters,
its histogram against the format's range, and how it changed over the steps. The file needs no
network.
"""

# The page is page.html with page.css and the scripts of SCRIPTS put into it, and the run as JSON in
# a <script type="application/json">, which browsers do not execute. No text of the run is markup:
# "<", ">" and "&" are escaped in the JSON, the scripts write text nodes, and a content security
# policy allows one style and one script by their SHA-256. Without JavaScript the worst casts of the
# last snapshot are there as a plain table.
#
# To stay small with 2,000 casts and 20 snapshots, names are written once, a snapshot is an array
# per cast (ROW_COLUMNS), numbers have four digits, and a histogram is a string: a character per
# power of two, whose place in SHARE_LEVELS is the share of the elements, on a logarithmic scale:
#
#     share = 10^(DECADES * (level / (len(SHARE_LEVELS) - 1) - 1)),   level 0: none

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import math
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import torch

from float8.formats import FORMATS
from float8.numerics.alarms import Alarm, labels_of
from float8.numerics.explanations import as_html as explanations_as_html
from float8.numerics.problems import (
    EXPECTED_SQNR,
    PROBLEM_KINDS,
    Problem,
    kinds_of,
    level_of,
    noisy_below,
    problems_of,
)
from float8.numerics.snapshot import Report, read_run
from float8.numerics.statistics import CastLabels, CastStatistics, Histogram

DECADES = 8
SHARE_LEVELS = "".join(chr(code) for code in range(35, 127) if chr(code) not in "<>&\\")
ROWS_WITHOUT_SCRIPT = 200
SHOWN_ALARMS = 100  # active ones first
SCRIPTS = ("pictures.js", "explanations.js", "page.js", "keyboard.js", "print.js")  # in this order
ROW_COLUMNS = (
    "cast", "sqnr", "amax", "scale_min", "scale_max", "flushed", "saturated", "kurtosis",
    "staleness", "elements", "calls", "zeros", "nonfinite", "level", "problems", "lowest", "shares",
    "gradient_sqnr",
)  # fmt: skip


def page(reports: Sequence[Report], about: Mapping[str, str], alarms: Sequence[Alarm] = ()) -> str:
    """The HTML of a run.

    Args:
        reports: its snapshots, in the order of the steps.
        about: for the head: "file", "float8" and "torch".
        alarms: of its file.

    Raises:
        ValueError: there is no snapshot.
    """
    if not reports:
        raise ValueError("there is no snapshot to show: the file holds an empty run")
    style = _resource("page.css")
    script = "".join(_resource(name) for name in SCRIPTS)
    model = html.escape(reports[-1].model or "model")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src {_digest(style)}; script-src {_digest(script)}"
    )
    return Template(_resource("page.html")).substitute(
        policy=policy,
        model=model,
        style=style,
        script=script,
        data=_inline_json(content(reports, about, alarms)),
        table=_plain_table(reports[-1].casts),
        explanations=explanations_as_html(),
    )


def content(
    reports: Sequence[Report], about: Mapping[str, str], alarms: Sequence[Alarm] = ()
) -> dict[str, Any]:
    """The data of the scripts."""
    casts: dict[CastLabels, int] = {}
    snapshots = [_snapshot(report, casts) for report in reports]
    shown = [_alarm(alarm, reports, casts) for alarm in _newest_first(alarms)[:SHOWN_ALARMS]]
    formats = {
        fmt.name: {
            "flushed": fmt.smallest_subnormal / 2,
            "normal": float(torch.finfo(fmt.dtype).smallest_normal),
            "max": fmt.max,
            "expected": EXPECTED_SQNR[fmt.name],
            "noisy": noisy_below(fmt.name),
        }
        for fmt in FORMATS.values()
    }
    return {
        "model": reports[-1].model,
        "about": dict(about),
        "labels": CastLabels._fields,
        "columns": ROW_COLUMNS,
        "levels": SHARE_LEVELS,
        "decades": DECADES,
        "formats": formats,
        "kinds": [{"one": kind.one, "advice": kind.advice} for kind in PROBLEM_KINDS],
        "casts": list(casts),
        "snapshots": snapshots,
        "alarms": shown,
        "alarm_count": len(alarms),
        "active_alarms": sum(alarm.is_active for alarm in alarms),
    }


def _snapshot(report: Report, casts: dict[CastLabels, int]) -> dict[str, Any]:
    """One snapshot; ``casts`` numbers the casts of all."""
    rows = report.casts
    found = problems_of(rows)
    return {
        "step": report.step,
        "rows": [_numbers(row, casts.setdefault(labels_of(row), len(casts))) for row in rows],
        "problems": [
            {
                "level": problem.level,
                "kind": PROBLEM_KINDS.index(problem.kind),
                "title": problem.title,
                "text": problem.text,
                "cast": casts[labels_of(problem.casts[0])],
            }
            for problem in found
        ],
        "summary": summary(rows, found),
        "skipped": sorted(report.skipped.items()),
    }


def _newest_first(alarms: Sequence[Alarm]) -> list[Alarm]:
    """Those that are active come first."""
    return sorted(reversed(alarms), key=lambda alarm: not alarm.is_active)


def _alarm(alarm: Alarm, reports: Sequence[Report], casts: dict[CastLabels, int]) -> dict[str, Any]:
    """One alarm; ``snapshot`` is the place of that in which it started, None where it is gone."""
    steps = [report.step for report in reports]
    shown = ("rule", "layer", "operand", "first", "started", "last", "ended", "message", "advice")
    return {
        **{name: getattr(alarm, name) for name in shown},
        "snapshot": steps.index(alarm.started) if alarm.started in steps else None,
        "cast": casts.setdefault(alarm.labels, len(casts)),
    }


def summary(casts: Sequence[CastStatistics], problems: Sequence[Problem]) -> str:
    """The health of a snapshot in a sentence."""
    if not casts:
        return "No cast was seen: was the model converted, and did it run while inspect was open?"
    if problems:
        concerned = {cast.key for problem in problems for cast in problem.casts}
        return f"{len(concerned)} of {len(casts)} casts want{'s' * (len(concerned) == 1)} a look."
    return f"All {len(casts)} casts keep what their formats can keep: there is nothing to do."


def _numbers(cast: CastStatistics, number: int) -> list[Any]:
    named = {
        **vars(cast),
        "cast": number,
        "level": level_of(cast),
        "problems": sum(1 << i for i in kinds_of(cast)),
        "lowest": cast.histogram.lowest,
        "shares": shares(cast.histogram),
    }
    return [_rounded(named[name]) for name in ROW_COLUMNS]


def _rounded(value: Any) -> Any:
    """A number in four digits; one that is not finite as the text that JavaScript reads."""
    if not isinstance(value, float):
        return value
    if math.isfinite(value):
        short = float(f"{value:.4g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def shares(histogram: Histogram) -> str:
    """A histogram as a string; see the top of this file."""
    total, top = sum(histogram.counts), len(SHARE_LEVELS) - 1
    levels = (
        max(1, round(top * (1 + math.log10(count / total) / DECADES))) if count else 0
        for count in histogram.counts
    )
    return "".join(SHARE_LEVELS[level] for level in levels)


def _plain_table(casts: Sequence[CastStatistics]) -> str:
    names = (
        "layer", "operand", "gemm", "format", "nonfinite", "sqnr", "amax", "flushed", "saturated",
    )  # fmt: skip
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    lines = [
        "<tr>" + "".join(f"<td>{_cell(getattr(cast, name))}</td>" for name in names) + "</tr>"
        for cast in casts[:ROWS_WITHOUT_SCRIPT]
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(value: Any) -> str:
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def _inline_json(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _resource(name: str) -> str:
    return (files("float8.numerics") / name).read_text(encoding="utf-8")


# --- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; 0, or 2 with a line on stderr if it cannot be written."""
    options = parser().parse_args(arguments)
    run: Path = options.run
    target: Path = options.output or run.with_suffix(".html")
    try:
        _write(run, target)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    print(target)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options; the description is the top of this file."""
    options = argparse.ArgumentParser(
        prog="python -m float8.numerics.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("run", type=Path, help="the JSON file that Report.save or a monitor wrote")
    options.add_argument(
        "-o", "--output", type=Path, help="by default beside the run, with the suffix .html"
    )
    return options


def _write(run: Path, target: Path) -> None:
    reports, alarms = read_run(run)
    if not reports:
        raise ValueError(f"{run}: there is no snapshot in it")
    if target.exists() and target.samefile(run):
        raise ValueError(f"{target}: the page would overwrite the run; name another by -o")
    head = json.loads(run.read_text(encoding="utf-8"))
    about = {"file": run.name, **{name: str(head.get(name, "?")) for name in ("float8", "torch")}}
    target.write_text(page(reports, about, alarms), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
