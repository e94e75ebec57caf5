"""The study of operands: what does each of a layer's six casts cost?

Two measures, for every part of a layer (`ablated.py`: a GEMM, an operand, a single cast):

* trainings with that part cast alone (``only``), and with all but it (``all but``). Each seed has
  also the runs with no cast and with all of them. Single differences drown in the noise of
  training, so ``effect`` is what all runs say together: least squares of

      100 ln(loss) = (a constant of the seed) + sum of the effects of the casts that are on

  which takes effects to add up; the effect of a part is the sum of its casts';
* `probe.py`, without noise: the error of the gradient and the change of the loss on the same
  weights, averaged over seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace

from benchmarks.measuring.harness import Row
from benchmarks.quality.ablated import ABLATIONS, ALL_BUT, CASTS, ONLY, PARTS, casts_in, casts_of
from benchmarks.quality.contenders import BASE, NOISE
from benchmarks.quality.least_squares import Fit, Observation, fit
from benchmarks.quality.paired import by_contender, difference, interval, settings
from benchmarks.quality.probe import ALL, FLOAT32, Probe
from benchmarks.quality.run import Run, usual_runs

CONTENDERS = (BASE, NOISE, ALL, *ABLATIONS)
BATCHES = 16  # of a probe
COLUMNS = {
    "layer": ("casts", ""),
    "only": ("gap, only these", ""),
    "all_but": ("all but these", ""),
    "effect": ("effect in the fit", ""),
    "error": ("gradient error %", ".2f"),
    "error_without": ("all but these", ".2f"),
    "mean_error": ("of the mean gradient", ".2f"),
    "loss_change": ("loss %", "+.4f"),
}


def runs(options: argparse.Namespace) -> list[Run]:
    """Of every seed, the probe and then the trainings."""
    found: list[Run] = []
    for seed in options.seeds:
        trainings = usual_runs(options, [seed])
        of_base = replace(trainings[0], contender=BASE)
        found += [Probe(**asdict(of_base), batches=BATCHES), *trainings]
    return found


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per part, one for all casts and one for the noise; no targets."""
    trained = [row for row in rows if "casts" not in row]
    probes = [row["casts"] for row in rows if "casts" in row]
    found: list[Row] = []
    several = list(settings(trained, "contender", "seed").values())
    for of_setting in several or [[]]:
        contenders = by_contender(of_setting)
        effects = fit(observations(of_setting))
        for part in PARTS:
            line: Row = {"layer": part} | _effect(effects, casts_of(part))
            line |= _gap("only", contenders, ONLY + part)
            line |= _gap("all_but", contenders, ALL_BUT + part)
            line |= _measures(probes, ONLY + part, ALL_BUT + part)
            found.append(line)
        whole = _gap("only", contenders, ALL) | _effect(effects, frozenset(CASTS))
        found.append({"layer": "all six", **whole, **_measures(probes, ALL, None)})
        noise = _gap("only", contenders, NOISE)
        found.append({"layer": "none: rounding of bf16", **noise, **_measures(probes, FLOAT32)})
    return found, []


def observations(rows: Sequence[Row]) -> list[Observation]:
    """What `fit` takes: the logarithms of losses by the casts that are on, in per cent."""
    found: list[Observation] = []
    for row in rows:
        if "loss" in row:
            on = casts_on(row["run"]["contender"])
            factors = {f"seed {row['run']['seed']}": 1.0} | dict.fromkeys(sorted(on), 1.0)
            found.append((factors, 100 * math.log(row["loss"])))
    return found


def casts_on(contender: str) -> frozenset[str]:
    """The casts of a contender of this study."""
    if contender in (BASE, NOISE):
        return frozenset()
    return frozenset(CASTS) if contender == ALL else casts_in(contender)


def _effect(effects: Fit | None, casts: frozenset[str]) -> Row:
    if effects is None or not casts <= effects.coefficients.keys():
        return {}
    mean, half_width = effects.combined(dict.fromkeys(casts, 1.0))
    text = f"{interval(mean, half_width)} %"
    return {"effect": text, "effect_percent": mean, "effect_half_width": half_width}


def _gap(column: str, contenders: dict[str, list[Row]], name: str) -> Row:
    gap = difference(contenders.get(name, []), contenders.get(BASE, []))
    return {column: str(gap)} if gap.values else {}


def _measures(probes: Sequence[Row], only: str, all_but: str | None = None) -> Row:
    """The means of the noise-free measures over seeds, in per cent."""
    if not probes:
        return {}

    def mean(name: str, measure: str) -> float:
        return statistics.fmean(casts[name][measure] for casts in probes)

    line: Row = {
        "error": 100 * mean(only, "error"),
        "mean_error": 100 * mean(only, "mean_error"),
        "loss_change": mean(only, "loss_change"),
    }
    return line if all_but is None else line | {"error_without": 100 * mean(all_but, "error")}
