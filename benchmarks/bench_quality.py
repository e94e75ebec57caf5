"""How much worse than bf16 does a model end that was trained in float8?

Many small trainings (`quality/training.py`) in pairs: runs of one seed share weights, batches and
evaluation, and differ by their contender (`quality/contenders.py`). A line per contender has its
mean loss and its paired gap to its base, in per cent. Target: the gap's interval lies within 0.25
%.

A base has a control, as ``bf16 rounded``, which has no reason to be better or worse. Both are then
the base, and a least-squares fit (`quality/intervals.py`) over all runs of a setting,

    100 ln(loss) = (a constant of the seed) + (one of the contender, 0 for base and control) + error

gives every contender's gap. Of n seeds, with k contenders beside base and control,

    gap +- t(f) s sqrt(3 / 2n),    f = k (n - 1) + n

A pair has errors of its own run and of the mean of two base runs: their variance is 1.5 s^2, not
2 s^2. That pairs of one seed share the base runs is part of the fit. s^2 is of all runs, k (n - 1)
degrees of freedom from the contenders and n from the control. At 8 contenders the interval is 0.7
times as wide as Student's at 5 seeds, 0.8 times at 8, with the same confidence of 95 %.

Contenders of base bf16 share one fit. That takes their errors to have one variance, as where small
differences grow to the noise of training whatever made them. Unit-scaled contenders have a fit
each, k = 1: recipe ``unit`` saturates, and fails in some seeds. Column ``std`` is for the check:
the standard deviation of a contender's own pairs. One whose errors are twice as large as the
others' lies in its interval in 8 of 10 studies, not in 19 of 20. The control's own gap, and those
to a base that has no control, are Student's. Each interval holds alone: of 8 contenders that equal
their base, about one in 4 studies has one whose interval lacks 0.

`MEAN` is what they cost together: the mean coefficient of all recipes of base bf16, whose interval
the errors of the base decide.

The file named by -o is written after every run, and a call with the same file makes only the runs
that it lacks: stop it at any time, and go on another night.

    python benchmarks/bench_quality.py --jobs 2 -o quality.json
    python benchmarks/bench_quality.py --quick
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import picture, report
from benchmarks.measuring.harness import Row
from benchmarks.measuring.report import PEER
from benchmarks.quality.contenders import (
    BASE,
    CONTROLS,
    NOISE,
    SAVING,
    UNIT_BASE,
    UNIT_DYNAMIC,
    UNIT_NOISE,
    base_of,
)
from benchmarks.quality.intervals import (
    Difference,
    Interval,
    by_contender,
    difference,
    fit,
    settings,
)
from benchmarks.quality.study import Study
from benchmarks.quality.training import Run, train, usual_rate
from float8.config import RECIPES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMIT = 0.25  # per cent of the base's loss
MEAN = "mean of the recipes"  # of `float8.config.RECIPES`
CONTENDERS = (
    *(BASE, NOISE, "tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"),
    *(SAVING, UNIT_BASE, UNIT_NOISE, "unit", UNIT_DYNAMIC, PEER + "tensorwise", PEER + "rowwise"),
)
COLUMNS = report.columns(
    "layer setting seeds loss gap std bf16_gap alarmed diverged",
    layer="contender", gap="gap to base", std="std of its pairs", bf16_gap="evaluated in bf16",
    alarmed="runs with an alarm",
)  # fmt: skip


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line per contender and setting: the mean loss, and the paired difference to the base."""
    found: list[Row] = []
    for setting, of_setting in settings(rows, "contender", "seed").items():
        contenders = by_contender(of_setting)
        at_end, in_bf16 = gaps(contenders), gaps(contenders, "bf16_loss")
        for name in (*contenders, *([MEAN] if MEAN in at_end else [])):
            own = contenders.get(name, [])
            losses = [row["loss"] for row in own if "loss" in row]
            line: Row = {"layer": name, "seeds": len(losses), "fields": json.loads(setting)}
            if name == MEAN:
                line["seeds"] = len(at_end[MEAN].values)
            else:
                line["diverged"] = len(own) - len(losses)
            if losses:
                line["loss"] = statistics.fmean(losses)
            if watched := [row["alarms"] for row in own if "alarms" in row]:
                line["alarmed"] = f"{sum(map(bool, watched))} of {len(watched)}"
            if gap := at_end.get(name):
                line |= {"target": gap.target(LIMIT), **gap.columns("gap")}
                if len(gap.values) > 1:
                    line["std"] = statistics.stdev(gap.values)
                if name in in_bf16 and in_bf16[name].values:
                    line["bf16_gap"] = str(in_bf16[name])
            found.append(line)
    for line in found:  # a study of one setting does not name it
        others = [other["fields"] for other in found if other["layer"] == line["layer"]]
        mine = line["fields"]
        differing = [key for key in mine if any(other[key] != mine[key] for other in others)]
        if differing:
            line["setting"] = ", ".join(f"{key} {mine[key]}" for key in differing)
    return found


def gaps(contenders: Mapping[str, Sequence[Row]], key: str = "loss") -> dict[str, Difference]:
    """The differences of all contenders of one setting to their bases.

    Args:
        contenders: rows by name; each has one row of a seed.
        key: of the losses to compare; base and control have their ``loss``.
    """
    found: dict[str, Difference] = {}
    for base, control in CONTROLS.items():
        own = [name for name in contenders if base_of(name) == base]
        compared = [name for name in own if name not in (base, control)]
        together = [compared] if base == BASE else [[name] for name in compared]
        for names in together or [[]]:
            fitted = {name: contenders[name] for name in own if name in (base, control, *names)}
            found |= _gaps(fitted, base, control, key)
    return found


def _gaps(
    contenders: Mapping[str, Sequence[Row]], base: str, control: str, key: str
) -> dict[str, Difference]:
    """The differences of contenders of one base, by one fit."""
    both = [row for name in (base, control) for row in contenders.get(name, []) if "loss" in row]
    means = [  # geometric, of the losses of each seed
        {"run": own[0]["run"], "loss": statistics.geometric_mean(row["loss"] for row in own)}
        for own in settings(both, "contender").values()
    ]
    compared = contenders.keys() - {base, control}
    found = {
        name: difference(rows, means if name in compared else contenders.get(base, []), key)
        for name, rows in contenders.items()
        if name != base
    }
    if not any(row["run"]["contender"] == control for row in both):
        return found
    observed = {name: [row for row in contenders[name] if key in row] for name in compared}
    combined = fit(
        [({_seed(row): 1.0}, 100 * math.log(row["loss"])) for row in both]
        + [
            ({_seed(row): 1.0, name: 1.0}, 100 * math.log(row[key]))
            for name, own in observed.items()
            for row in own
        ]
    )
    if combined is None:
        return found
    known = [name for name in found if observed.get(name)]
    for name in known:
        found[name] = replace(found[name], fitted=_in_percent(combined({name: 1.0})))
    recipes = [name for name in known if name in RECIPES]
    if len({len(found[name].values) for name in recipes}) == 1 < len(recipes):
        each = zip(*(found[name].values for name in recipes), strict=True)
        together = _in_percent(combined(dict.fromkeys(recipes, 1 / len(recipes))))
        found[MEAN] = Difference(tuple(map(statistics.fmean, each)), fitted=together)
    return found


def _seed(row: Row) -> str:
    return f"seed {row['run']['seed']}"


def _in_percent(interval: Interval) -> Interval:
    """Mean and half width of a loss, given those of 100 times its logarithm."""
    grown = math.exp(interval[0] / 100)  # d exp(x) = exp(x) dx
    return 100 * (grown - 1), grown * interval[1]


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per contender, and whether their intervals lie within the limit."""
    found = lines(rows)
    targets = [
        {"layer": name, "mode": line.get("setting", "interval"), "against": base_of(name), **target}
        for line in found
        if (name := line["layer"]) and (target := line.get("target"))
    ]
    return found, targets


def draw(rows: Sequence[Row]) -> Figure:
    """A line per contender: its seeds pale, its mean and interval dark; grey is the control's.

    A contender whose interval is far wider than the others' leaves the picture, and its numbers
    are written there.
    """
    found = {n: gap for n, gap in gaps(by_contender(rows)).items() if len(gap.values) > 1}
    ends = [abs(gap.mean) + gap.half_width for gap in found.values()]
    reach = 3 * statistics.median(ends or [LIMIT])
    figure = picture.new(7, 5.6)
    axes = figure.subplots()
    picture.plain(axes, "bottom")
    for limit in (-LIMIT, 0.0, LIMIT):
        axes.axvline(limit, color=picture.GREY, linewidth=0.8, linestyle=":" if limit else "-")
    if NOISE in found:
        mean, half = found[NOISE].mean, found[NOISE].half_width
        axes.axvspan(mean - half, mean + half, color=picture.PALE, linewidth=0)
    for place, gap in enumerate(found.values()):
        style: Any = {"color": picture.BLUE}
        axes.plot(gap.values, [place] * len(gap.values), ".", color=picture.SKY, alpha=0.6)
        axes.errorbar(gap.mean, place, xerr=gap.half_width, fmt="o", linewidth=2, **style)
        if gap.mean + gap.half_width > reach:
            axes.text(reach, place - 0.15, str(gap), ha="right", va="bottom", size="small", **style)
    axes.set_xlim(-reach, reach)
    axes.set_yticks(range(len(found)), [name.replace("+", "+\n") for name in found])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("gap to the base at the end, % of its loss", color=picture.GREY)
    return figure


def runs_of(options: argparse.Namespace) -> list[Run]:
    """Every contender for every seed, a seed after the other; a head has a width of 64."""
    return [
        Run(
            contender=name, seed=seed, learning_rate=usual_rate(name, options.width),
            heads=max(1, options.width // 64), **STUDY.sizes(options),
        )
        for seed in options.seeds
        for name in options.contenders
    ]  # fmt: skip


NUMBERS = {
    "steps": (2000, "of a run"),
    "layers": (2, "transformer blocks"),
    "width": (128, "of the model"),
    "context": (64, "bytes of a window"),
    "batch": (16, "windows in a step"),
    "held_out": (2**20, "bytes of the last evaluation"),
}
QUICK = {"steps": 4, "width": 32, "layers": 1, "batch": 2, "context": 16, "held_out": 256}
STUDY = Study(
    "bench_quality", __doc__, COLUMNS, runs_of, train, summary, NUMBERS, QUICK, 5,
    {"contenders": CONTENDERS},
)  # fmt: skip
main = STUDY.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
