"""The study of recipes: a line per contender, its mean loss and its paired gap to its base.

A base has a control, as ``bf16 rounded``, which has no reason to be better or worse. Both are then
the base, and a least-squares fit (`paired.py`) over all runs of a setting,

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
to a base that has no control, are Student's (`paired.py`). Each interval holds alone: of 8
contenders that equal their base, about one in 4 studies has one whose interval lacks 0.

`MEAN` is what they cost together: the mean coefficient of all recipes of base bf16, whose interval
the errors of the base decide.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.measuring.harness import Row
from benchmarks.quality.contenders import (
    BASE,
    CONTROLS,
    NOISE,
    PEER,
    SAVING,
    UNIT_BASE,
    UNIT_DYNAMIC,
    UNIT_NOISE,
    base_of,
)
from benchmarks.quality.paired import (
    Difference,
    Observation,
    by_contender,
    difference,
    fit,
    settings,
)
from float8.config import RECIPES

LIMIT = 0.25  # per cent of the base's loss
MEAN = "mean of the recipes"  # of `float8.config.RECIPES`
CONTENDERS = (
    *(BASE, NOISE, "tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"),
    *(SAVING, UNIT_BASE, UNIT_NOISE, "unit", UNIT_DYNAMIC, PEER + "tensorwise", PEER + "rowwise"),
)
COLUMNS = {
    "layer": ("contender", ""),
    "setting": ("setting", ""),
    "seeds": ("seeds", ".0f"),
    "loss": ("held-out loss", ".4f"),
    "gap": ("gap to base", ""),
    "std": ("std of its pairs", ".2f"),
    "bf16_gap": ("evaluated in bf16", ""),
    "alarmed": ("runs with an alarm", ""),
    "diverged": ("diverged", ".0f"),
}


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line per contender and setting: the mean loss, and the paired difference to the base."""
    found: list[Row] = []
    for setting, of_setting in settings(rows, "contender", "seed").items():
        contenders = by_contender(of_setting)
        at_end, in_bf16 = gaps(contenders), gaps(contenders, "bf16_loss")
        for name, own in contenders.items():
            losses = [row["loss"] for row in own if "loss" in row]
            line: Row = {"layer": name, "seeds": len(losses), "diverged": len(own) - len(losses)}
            line["fields"] = json.loads(setting)
            if losses:
                line["loss"] = statistics.fmean(losses)
            if watched := [row["alarms"] for row in own if "alarms" in row]:
                line["alarmed"] = f"{sum(map(bool, watched))} of {len(watched)}"
            if name in at_end:
                line |= _columns(at_end[name], in_bf16[name])
            found.append(line)
        if MEAN in at_end:
            line = {"layer": MEAN, "seeds": len(at_end[MEAN].values), "fields": found[-1]["fields"]}
            found.append(line | _columns(at_end[MEAN], in_bf16.get(MEAN, Difference(()))))
    _name_settings(found)
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
    compared = contenders.keys() - {base, control}
    found = {
        name: difference(rows, _means(both) if name in compared else contenders.get(base, []), key)
        for name, rows in contenders.items()
        if name != base
    }
    if not any(row["run"]["contender"] == control for row in both):
        return found
    observations = [_observation(row, "loss") for row in both]
    for name in compared:
        observations += [_observation(row, key, name) for row in contenders[name] if key in row]
    if (fitted := fit(observations)) is not None:
        for name in fitted.coefficients.keys() & compared:
            found[name] = replace(found[name], fitted=_in_percent(*fitted.combined({name: 1.0})))
        recipes = [name for name in found if name in fitted.coefficients and name in RECIPES]
        if len({len(found[name].values) for name in recipes}) == 1 < len(recipes):
            each = zip(*(found[name].values for name in recipes), strict=True)
            together = _in_percent(*fitted.combined(dict.fromkeys(recipes, 1 / len(recipes))))
            found[MEAN] = Difference(tuple(map(statistics.fmean, each)), fitted=together)
    return found


def _in_percent(mean: float, half_width: float) -> tuple[float, float]:
    """Both of a loss, given those of 100 times its logarithm."""
    grown = math.exp(mean / 100)  # d exp(x) = exp(x) dx
    return 100 * (grown - 1), grown * half_width


def _means(rows: Sequence[Row]) -> list[Row]:
    """The geometric mean of the losses of each seed."""
    return [
        {"run": own[0]["run"], "loss": statistics.geometric_mean(row["loss"] for row in own)}
        for own in settings(rows, "contender").values()
    ]


def _observation(row: Row, key: str, *contender: str) -> Observation:
    factors = dict.fromkeys((f"seed {row['run']['seed']}", *contender), 1.0)
    return factors, 100 * math.log(row[key])


def _columns(gap: Difference, in_bf16: Difference) -> Row:
    """The columns of the differences, and the target."""
    line: Row = {"target": gap.target(LIMIT), **gap.columns("gap")}
    if len(gap.values) > 1:
        line["std"] = statistics.stdev(gap.values)
    if in_bf16.values:
        line["bf16_gap"] = str(in_bf16)
    return line


def _name_settings(found: Sequence[Row]) -> None:
    """Name the fields by which lines of one contender differ; a study of one setting has none."""
    for line in found:
        others = [other["fields"] for other in found if other["layer"] == line["layer"]]
        mine = line["fields"]
        differing = [key for key in mine if any(other[key] != mine[key] for other in others)]
        if differing:
            line["setting"] = ", ".join(f"{key} {mine[key]}" for key in differing)


def targets(found: Sequence[Row]) -> list[Row]:
    """Which contenders' intervals lie within the limit."""
    return [
        {"layer": name, "mode": line.get("setting", "interval"), "against": base_of(name), **target}
        for line in found
        if (name := line["layer"]) and (target := line.get("target"))
    ]


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per contender, and the targets."""
    found = lines(rows)
    return found, targets(found)
