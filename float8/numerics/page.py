"""A run as one HTML file that needs nothing else: no network, no fonts, no server.

The page is ``page.html`` with ``page.css``, ``pictures.js`` and ``page.js`` put into it, and the
run as JSON in a ``<script type="application/json">``, which browsers do not execute. What came from
the run is never markup: ``<``, ``>`` and ``&`` are escaped in the JSON, the scripts write text
nodes, and a content security policy allows style and script by their SHA-256, and nothing else.

To open fast and stay small with 2,000 casts and 20 snapshots, names are said once, a snapshot is an
array per cast (`COLUMNS`), numbers keep four digits, and a histogram is a string: a character per
power of two, whose place in `LEVELS` is the share of the elements, on a logarithmic scale::

    share = 10^(DECADES * (level / (len(LEVELS) - 1) - 1)),   level 0: none

Without JavaScript the worst rows of the last snapshot are there as a plain table.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

import torch

from float8.formats import FORMATS
from float8.numerics.findings import (
    EXPECTED_SQNR,
    FINE,
    RULES,
    Finding,
    findings,
    level_of,
    noisy_below,
    rules_broken,
)
from float8.numerics.rows import Histogram, Row
from float8.numerics.snapshot import Report

DECADES = 8
LEVELS = "".join(chr(code) for code in range(35, 127) if chr(code) not in "<>&\\")
WITHOUT_SCRIPT = 200  # rows of the plain table
COLUMNS = (
    "cast", "sqnr", "amax", "scale_min", "scale_max", "flushed", "saturated", "kurtosis",
    "staleness", "elements", "calls", "zeros", "nonfinite", "level", "broken", "lowest", "shares",
)  # fmt: skip
Key = tuple[str, ...]


def page(reports: Sequence[Report], about: Mapping[str, str]) -> str:
    """The HTML of a run.

    Args:
        reports: its snapshots, in the order of the steps.
        about: what is said in the head: "file", "float8" and "torch".

    Raises:
        ValueError: there is no snapshot.
    """
    if not reports:
        raise ValueError("there is no snapshot to show: the file holds an empty run")
    style = _resource("page.css")
    script = _resource("pictures.js") + _resource("page.js")
    model = reports[-1].model or "model"
    return Template(_resource("page.html")).substitute(
        policy=policy([style], [script]),
        title=html.escape(f"{model}: float8 numerics"),
        model=html.escape(model),
        style=style,
        script=script,
        data=_json(content(reports, about)),
        table=_plain_table(reports[-1].casts),
    )


def policy(styles: Iterable[str], scripts: Iterable[str]) -> str:
    """The content security policy that allows these inline texts, by their digests, only."""
    parts = ["default-src 'none'", "base-uri 'none'", "form-action 'none'"]
    parts.append(" ".join(["style-src", *map(_digest, styles)]))
    parts.append(" ".join(["script-src", *map(_digest, scripts)]))
    return "; ".join(parts)


def content(reports: Sequence[Report], about: Mapping[str, str]) -> dict[str, Any]:
    """What the scripts read."""
    casts: dict[Key, int] = {}
    snapshots = [_snapshot(report, casts) for report in reports]
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
        "columns": COLUMNS,
        "levels": LEVELS,
        "decades": DECADES,
        "formats": formats,
        "rules": [{"one": rule.one, "advice": rule.advice} for rule in RULES],
        "casts": list(casts),
        "snapshots": snapshots,
    }


def _snapshot(report: Report, casts: dict[Key, int]) -> dict[str, Any]:
    rows = report.casts
    found = findings(rows)
    return {
        "step": report.step,
        "rows": [_numbers(row, casts.setdefault(_key(row), len(casts))) for row in rows],
        "findings": [_finding(each, casts) for each in found],
        "verdict": verdict(rows, found),
        "skipped": sorted(report.skipped.items()),
    }


def verdict(rows: Sequence[Row], found: Sequence[Finding]) -> str:
    """The health of a snapshot in a sentence."""
    if not rows:
        return "No cast was seen: was the model converted, and did it run while inspect was open?"
    if found:
        concerned = {row.key for finding in found for row in finding.rows}
        return f"{len(concerned)} of {len(rows)} casts want{'s' * (len(concerned) == 1)} a look."
    return f"All {len(rows)} casts keep what their formats can keep: there is nothing to do."


def _finding(finding: Finding, casts: Mapping[Key, int]) -> dict[str, Any]:
    return {
        "level": finding.level,
        "rule": RULES.index(finding.rule),
        "title": finding.title,
        "text": finding.text,
        "cast": casts[_key(finding.rows[0])],
    }


def _key(row: Row) -> Key:
    return (*row.key, row.format, row.scaling, row.granularity)


def _numbers(row: Row, cast: int) -> list[Any]:
    named = {
        **vars(row),
        "cast": cast,
        "level": level_of(row),
        "broken": sum(1 << i for i in rules_broken(row)),
        "lowest": row.histogram.lowest,
        "shares": shares(row.histogram),
    }
    return [_short(named[name]) for name in COLUMNS]


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if math.isfinite(value):
        short = float(f"{value:.4g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def shares(histogram: Histogram) -> str:
    """A histogram as a string; see the top of this file."""
    total = sum(histogram.counts)
    return "".join(LEVELS[_level(count / total) if count else 0] for count in histogram.counts)


def _level(share: float) -> int:
    top = len(LEVELS) - 1
    return max(1, round(top * (1 + math.log10(share) / DECADES)))


def _plain_table(rows: Sequence[Row]) -> str:
    names = (
        "layer", "operand", "gemm", "format", "nonfinite", "sqnr", "amax", "flushed", "saturated",
    )  # fmt: skip
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    lines = [
        "<tr>" + "".join(f"<td>{_cell(getattr(row, name))}</td>" for name in names) + "</tr>"
        for row in rows[:WITHOUT_SCRIPT]
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(value: Any) -> str:
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def _json(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _resource(name: str) -> str:
    return (files("float8.numerics") / name).read_text(encoding="utf-8")


assert FINE == 0, "the scripts take a level as a number"
