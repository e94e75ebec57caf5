"""The study of learning rates: which is best for each recipe, and how much higher ones it stands.

Every contender is trained with its usual rate times powers of two. Losses are means over seeds.

    optimum   the vertex of the parabola in log2(rate) through the best rate and its two neighbours
              (`measuring/optimum.py`), as a factor of the usual rate
    gap       of the loss at the best rate of the grid to that of the base at its own best rate
    edge      the highest factor up to which no rate above the best one ends more than 3 % above it
    diverged  rates of which a run had no finite loss

The interval of ``gap`` does not know that the same runs chose the two rates: it is too narrow, by
what differs between rates that are nearly as good.

A recipe whose edge is lower than its base's needs more care with the rate than bf16 does.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.measuring.harness import Row
from benchmarks.measuring.optimum import ROOM, optimum
from benchmarks.quality.contenders import BASE, UNIT_BASE, base_of
from benchmarks.quality.paired import by_contender, difference, grouped, settings
from benchmarks.quality.run import Run, usual_rate, usual_runs

CONTENDERS = (
    *(BASE, "tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"),
    *(UNIT_BASE, "unit"),
)
OCTAVES = range(-2, 6)  # log2 of the factor
COLUMNS = {
    "layer": ("contender", ""),
    "seeds": ("seeds", ".0f"),
    "optimum": ("best factor", ".2f"),
    "loss": ("loss there", ".4f"),
    "gap": ("gap, each at its best", ""),
    "edge": ("edge", "g"),
    **{f"x{2.0**octave:g}": (f"x{2.0**octave:g}", ".3f") for octave in OCTAVES},
    "diverged": ("diverged", ".0f"),
}


def runs(options: argparse.Namespace) -> list[Run]:
    """Every contender with every rate, the usual one first."""
    outwards = sorted(OCTAVES, key=abs)
    return [
        replace(run, learning_rate=run.learning_rate * 2.0**octave)
        for seed in options.seeds
        for octave in outwards
        for run in usual_runs(options, [seed])
    ]


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per contender; no targets."""
    found: list[Row] = []
    for of_setting in settings(rows, "contender", "seed", "learning_rate").values():
        by_octave = {name: octaves(own) for name, own in by_contender(of_setting).items()}
        curves = {name: curve(own) for name, own in by_octave.items()}
        for name, own in by_octave.items():
            line: Row = {"layer": name, "seeds": max(len(of_rate) for of_rate in own.values())}
            line["diverged"] = sum(any("error" in row for row in each) for each in own.values())
            line |= {f"x{2.0**octave:g}": loss for octave, loss in curves[name].items()}
            if curves[name]:
                line |= {"loss": min(curves[name].values()), "optimum": 2 ** optimum(curves[name])}
                line["edge"] = 2.0 ** edge(curves[name])
            if name != base_of(name) and curves[name] and curves.get(base_of(name)):
                base = base_of(name)
                gap = difference(own[best(curves[name])], by_octave[base][best(curves[base])])
                line["gap"] = str(gap)
            found.append(line)
    return found, []


def octaves(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """log2 of the factor of the usual rate -> rows of one contender, rates rising."""

    def octave(row: Row) -> int:
        run = row["run"]
        return round(math.log2(run["learning_rate"] / usual_rate(run["contender"], run["width"])))

    return dict(sorted(grouped(rows, octave).items()))


def curve(by_octave: dict[int, list[Row]]) -> dict[int, float]:
    """The mean loss of each rate, without those of which a run diverged."""
    return {
        octave: statistics.fmean(row["loss"] for row in rows)
        for octave, rows in by_octave.items()
        if all("loss" in row for row in rows)
    }


def best(losses: dict[int, float]) -> int:
    """The rate of the lowest loss."""
    return min(losses, key=losses.__getitem__)


def edge(losses: dict[int, float]) -> int:
    """The highest rate up to which, from the best one on, all end within `ROOM` of the best."""
    octave = best(losses)
    limit = ROOM * losses[octave]
    while losses.get(octave + 1, math.inf) < limit:
        octave += 1
    return octave
