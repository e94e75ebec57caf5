"""Casts, and runs of a monitor, that are written by hand: healthy ones and others."""

from __future__ import annotations

import math
from dataclasses import replace

from float8.numerics.snapshot import Report
from float8.numerics.statistics import CastStatistics, Histogram

HEALTHY = CastStatistics(
    layer="ffn", operand="input", gemm="output", format="e4m3", scaling="delayed",
    granularity="tensorwise", elements=1000, calls=1, zeros=0, nonfinite=0, amax=3.0,
    scale_min=3 / 448, scale_max=3 / 448, flushed=0.01, saturated=0.0, sqnr=31.0, kurtosis=3.0,
    staleness=0.0, histogram=Histogram(-3, (10, 400, 0, 590)),
)  # fmt: skip
ROW = replace(
    HEALTHY, layer="nan", elements=10, zeros=1, scale_min=0.25, scale_max=0.5, flushed=0.1,
    saturated=0.2, sqnr=30.0, staleness=-1.0, histogram=Histogram(-2, (1, 0, 8)),
    # 10 elements, 1 call, 1 zero; powers 1 to 4 and noise; 1 flushed, 2 saturated
    sums=(10, 1, 1, 0, 1.0, 20.0, 3.0, 60.0, 0.02, 1, 2, 0, 0, 3.0, -0.25, 0.5, -1.0),
)  # fmt: skip
GEMMS = {"input": "output", "weight": "output", "grad_output": "grad_input"}
EVIL = "</script><img src=x onerror=\"document.title='owned'\"><!--"


def cast(i, operand, step, octaves=20):
    """A cast whose numbers all depend on its place, so that an order is visible."""
    fmt, sqnr = ("e5m2", 25.0) if operand == "grad_output" else ("e4m3", 31.0)
    amax = 2.0 ** -(i % 7) * (1 + i / 1000)
    counts = tuple(round(1e6 * math.exp(-((e - octaves + 5) ** 2) / 12)) for e in range(octaves))
    return replace(
        HEALTHY,
        layer=f"blocks.{i}.ffn",
        operand=operand,
        gemm=GEMMS[operand],
        format=fmt,
        amax=amax,
        scale_min=amax / 448,
        scale_max=amax / 448,
        sqnr=sqnr - (i * 37 % 11) / 10 - step / 1000,
        kurtosis=3 + i / 100,
        elements=sum(counts),
        histogram=Histogram(1 - octaves, counts),
    )


def run(steps=(0, 50, 100), layers=30, worst="blocks.2.ffn"):
    """Snapshots in which one gradient saturates, and one operand met NaN."""
    reports = []
    for step in steps:
        rows = [cast(i, operand, step) for i in range(layers) for operand in GEMMS]
        bad = next(row for row in rows if (row.layer, row.operand) == (worst, "grad_output"))
        rows[rows.index(bad)] = replace(
            bad, saturated=0.02, sqnr=9.0 - step / 100, staleness=1.5, kurtosis=400.0
        )
        rows.append(replace(rows[0], layer=EVIL, nonfinite=4, sqnr=None, kurtosis=None))
        rows.append(replace(rows[0], layer="exact", sqnr=math.inf, histogram=Histogram()))
        skipped = {EVIL + "2": "it was not called"}
        reports.append(Report(rows, model=f"GPT{EVIL}", step=step, skipped=skipped))
    return reports
