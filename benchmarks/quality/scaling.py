"""The study of scaling: does the gap change with the model's size and the number of tokens?

Three widths and three numbers of steps, the middle ones of which are the options'. With N the
parameters of the blocks (without embedding and head, as in the papers) and D the tokens:

* the gap of a contender, in per cent of the base's loss, is fitted over all runs by least squares:

      gap = mean + per doubling of N * log2(N / N0) + per doubling of D * log2(D / D0)

  where N0 and D0 are the geometric means of the grid, so that ``mean`` is the gap in its middle;
* "Scaling Laws for Precision" (arXiv 2411.04330, equations 3 and 4) says that a model of N
  parameters in low precision ends as one of N_eff = f N parameters in high precision,

      L = A (f N)^-alpha + B D^-beta + E,    f = (1 - exp(-P_w / 2.6745)) (1 - exp(-P_a / 2.2102))

  for weights of P_w bits and activations of P_a. Its A and alpha are those of another text and
  tokeniser, and of N from 30 to 220 million. Here the slope s = -dL / d ln N is that of our own
  bf16 runs: L at one D, as a parabola in ln N through the three sizes. Then

      predicted gap = -s ln f,      measured ln f = -(loss - base's loss) / s

  the latter by least squares over all runs. f of 8 bits is 0.924; with the offsets that Appendix K
  adds to the exponents (read as exp(n - P / gamma), the sign by which the cache of keys and values
  is the one most sensitive at few bits, as the paper has it) it is 0.830.

What this can show: whether gaps of 0.2 % and more exist at these sizes, whether they grow or shrink
by more than that over a factor of 13 in N and of 4 in D, and whether a loss as large as the paper's
form predicts is there. What it cannot: the paper fits N from 30 million on, D / N from 7 to 870,
integers, and quantises the forward pass alone. Here N is at most 0.43 million and D / N is 0.7 to
37, tokens are bytes, and the backward pass is cast too. No exponent follows from three sizes.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.measuring.harness import Row
from benchmarks.quality.contenders import BASE, NOISE, base_of
from benchmarks.quality.least_squares import Observation, fit
from benchmarks.quality.paired import by_contender, difference, interval, pairs, settings
from benchmarks.quality.run import Run, usual_runs
from scripts.training.gpt import VOCABULARY

CONTENDERS = (BASE, NOISE, "tensorwise", "rowwise")
FACTORS = (0.5, 1, 2)  # of the options' width, and of their steps
BITS = 8
GAMMA = {"weights": 2.6745, "activations": 2.2102}  # arXiv 2411.04330, table 2
OFFSET = {"weights": 0.3037, "activations": 1.4072}
PREDICTED = math.prod(1 - math.exp(-BITS / gamma) for gamma in GAMMA.values())
PREDICTED_LOW = math.prod(1 - math.exp(OFFSET[k] - BITS / GAMMA[k]) for k in GAMMA)
COLUMNS = {
    "layer": ("contender", ""),
    "N": ("N", ",.0f"),
    "D": ("D", ",.0f"),
    "seeds": ("seeds", ".0f"),
    "loss": ("held-out loss", ".4f"),
    "gap": ("gap to base", ""),
    "predicted": ("predicted %", ".2f"),
    "mean": ("gap in the middle", ""),
    "per_N": ("per doubling of N", ""),
    "per_D": ("per doubling of D", ""),
    "kept": ("N_eff / N", ""),
}
Sizes = tuple[int, int]  # N and D


def runs(options: argparse.Namespace) -> list[Run]:
    """All sizes of a seed, the smallest first, then the next seed."""
    width, steps = options.sizes["width"], options.sizes["steps"]
    return [
        run
        for seed in options.seeds
        for cost in sorted((a, b) for a in FACTORS for b in FACTORS)
        for run in usual_runs(
            options, [seed], width=round(width * cost[0]), steps=round(steps * cost[1])
        )
    ]


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per contender and sizes, and one for all sizes of each contender; no targets."""
    cells = grid(rows)
    slopes = slopes_of(cells)
    found: list[Row] = []
    for (N, D), contenders in cells.items():
        bases = contenders.get(BASE, [])
        for name, own in contenders.items():
            losses = [row["loss"] for row in own if "loss" in row]
            line: Row = {"layer": name, "N": N, "D": D, "seeds": len(losses)}
            if losses:
                line["loss"] = statistics.fmean(losses)
            if name != base_of(name) and (gap := difference(own, bases)).values:
                line |= {"gap": str(gap), "gap_percent": gap.mean, "gaps": gap.values}
                if name != NOISE and (N, D) in slopes:
                    base = statistics.fmean(row["loss"] for row in bases if "loss" in row)
                    line["predicted"] = -100 * slopes[N, D] * math.log(PREDICTED) / base
            found.append(line)
    names = dict.fromkeys(name for contenders in cells.values() for name in contenders)
    return found + [trend(cells, slopes, name) for name in names if name != base_of(name)], []


def trend(
    cells: Mapping[Sizes, dict[str, list[Row]]], slopes: Mapping[Sizes, float], name: str
) -> Row:
    """One contender over all sizes: how its gap changes, and the N_eff / N that it measures."""
    middle = [math.prod(size) ** (1 / len(cells)) for size in zip(*cells, strict=True)]
    gaps: list[Observation] = []
    losses: list[Observation] = []
    for sizes, contenders in cells.items():
        doublings = [math.log2(size / m) for size, m in zip(sizes, middle, strict=True)]
        for loss, base in pairs(contenders.get(name, ()), contenders.get(BASE, ())):
            factors = {"mean": 1.0, "per_N": doublings[0], "per_D": doublings[1]}
            gaps.append((factors, 100 * (loss / base - 1)))
            if sizes in slopes:
                losses.append(({"log": -slopes[sizes]}, loss - base))
    line: Row = {"layer": f"{name}, all sizes"}
    if (of_gaps := fit(gaps)) is not None:
        for key in of_gaps.coefficients:
            mean, half_width = of_gaps.combined({key: 1.0})
            line |= {key: interval(mean, half_width) + " %", f"{key}_percent": [mean, half_width]}
    if name != NOISE and (of_losses := fit(losses)) is not None:
        log, half_width = of_losses.combined({"log": 1.0})
        ends = [math.exp(log + sign * half_width) for sign in (0, -1, 1)]
        line |= {"kept": "{:.3f} ({:.3f} to {:.3f})".format(*ends), "kept_ends": ends}
    return line


def grid(rows: Sequence[Row]) -> dict[Sizes, dict[str, list[Row]]]:
    """(N, D) -> contender -> rows."""
    found: dict[Sizes, dict[str, list[Row]]] = {}
    for own in settings(rows, "contender", "seed").values():
        known = [row for row in own if "parameters" in row]
        run = known[0]["run"]
        N = known[0]["parameters"] - 2 * VOCABULARY * run["width"]
        D = run["steps"] * run["batch"] * run["context"]
        found.setdefault((N, D), {}).update(by_contender(own))
    return dict(sorted(found.items()))


def slopes_of(cells: Mapping[Sizes, dict[str, list[Row]]]) -> dict[Sizes, float]:
    """-dL / d ln N of the base, where three sizes have the same D."""
    losses: dict[int, dict[int, float]] = {}
    for (N, D), contenders in cells.items():
        own = [row["loss"] for row in contenders.get(BASE, ()) if "loss" in row]
        if own:
            losses.setdefault(D, {})[N] = statistics.fmean(own)
    return {
        (N, D): -slope([math.log(each) for each in of_D], list(of_D.values()), math.log(N))
        for D, of_D in losses.items()
        if len(of_D) == len(FACTORS)
        for N in of_D
    }


def slope(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """The derivative of the parabola through three points (Lagrange)."""
    total = 0.0
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        total += y[i] * (2 * at - x[j] - x[k]) / ((x[i] - x[j]) * (x[i] - x[k]))
    return total
