"""The demo's picture: loss curves, and how far each recipe is from its base.

    left    training loss, smoothed, over the steps
    right   held-out loss over that of the base, in per cent: bf16, for `unit` unit_bf16

A line is the mean over the seeds; the band around it reaches from the best seed to the worst. A run
that ends far above the others, as the naive cast does, leaves the panel. `draw` takes the ``runs``
of a demo.json.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = dict[str, Any]
Seeds = list[list[float]]  # a list of values of each seed
Lines = dict[str, tuple[list[int], Seeds]]  # name of a run -> steps, values

SMOOTHING = 0.8  # of the training losses in the picture; the JSON has them as they are
COLOURS = {
    "bf16": picture.BLACK,
    "bf16_rounded": "#8c8c8c",
    "tensorwise": picture.BLUE,
    "delayed": picture.ORANGE,
    "rowwise": picture.GREEN,
    "naive": picture.VERMILLION,
    "unit_bf16": picture.GREY,
    "unit": picture.PURPLE,
}
FAR = 1.1  # a final loss of more than this times the least leaves the panels
SETTLED = 0.25  # the part of the training after which losses are to be seen


def base_of(recipe: str) -> str:
    """The run in bf16 that a run is compared with."""
    return "unit_bf16" if recipe.partition("+")[0] in ("unit", "unit_bf16") else "bf16"


def name_of(run: Run) -> str:
    """The recipe, and of several processes their number."""
    return f"{run['recipe']} x{run.get('processes', 1)}".removesuffix(" x1")


def smooth(losses: Sequence[float]) -> list[float]:
    """An exponential average, unbiased at its start as Adam's are."""
    averages, average = [], 0.0
    for step, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        averages.append(average / (1 - SMOOTHING**step))
    return averages


def losses_of(runs: Sequence[Run]) -> Lines:
    """The smoothed training loss of each recipe."""
    found: Lines = {}
    for run in runs:
        steps = list(range(1, len(run["train_loss"]) + 1))
        found.setdefault(name_of(run), (steps, []))[1].append(smooth(run["train_loss"]))
    return found


def gaps_of(runs: Sequence[Run]) -> Lines:
    """Held-out loss over the base's of the same seed, in per cent; of runs that have a base."""
    by_key = {(run["recipe"], run.get("processes", 1), run["seed"]): run for run in runs}
    found: Lines = {}
    for run in runs:
        base = by_key.get((base_of(run["recipe"]), run.get("processes", 1), run["seed"]))
        if base is not None and base is not run:
            pairs = zip(run["val_loss"], base["val_loss"], strict=True)
            gaps = [100 * (loss / other - 1) for (_, loss), (_, other) in pairs]
            steps = [step for step, _ in run["val_loss"]]
            found.setdefault(name_of(run), (steps, []))[1].append(gaps)
    return found


def draw(runs: Sequence[Run]) -> Figure:
    """The picture of the runs of one demo.json."""
    best = min((loss for run in runs if math.isfinite(loss := run["final_val_loss"])), default=0.0)
    near = {name_of(run) for run in runs if run["final_val_loss"] <= FAR * best}
    losses, gaps = losses_of(runs), gaps_of(runs)
    figure = picture.new(8.0 if gaps else 4.5, 3.9)
    panels = figure.subplots(1, 2 if gaps else 1, squeeze=False)[0]
    _panel(panels[0], losses, near, "Training loss, nats per byte, smoothed", SETTLED)
    if gaps:
        _panel(panels[1], gaps, near, "Held-out loss against the base, per cent", 0.0)
        panels[1].axhline(0, color=picture.GREY, linewidth=1)
    return figure


def _panel(axes: Axes, lines: Lines, near: set[str], title: str, settled: float) -> None:
    """Draw lines; the axis shows those in ``near``, from the part ``settled`` of the steps on."""
    free = [c for c in (picture.SKY, *COLOURS.values()) if c not in {COLOURS.get(n) for n in lines}]
    shown: list[float] = []
    for name, (steps, seeds) in lines.items():
        recipe, _, processes = name.partition(" ")
        colour = COLOURS.get(recipe) or free[list(lines).index(name) % len(free)]
        columns = list(zip(*seeds, strict=True))
        mean = [statistics.fmean(column) for column in columns]
        axes.plot(steps, mean, "--" if processes else "-", color=colour, label=name, linewidth=1.8)
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
        if name in near:
            shown += low + high[int(settled * len(high)) :]
    if shown:
        margin = 0.05 * (max(shown) - min(shown)) or 0.05
        axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("step", color=picture.GREY)
    axes.grid(axis="y", color=picture.PALE, linewidth=0.8)
    axes.legend(fontsize=8, frameon=False)
    picture.plain(axes, "left", "bottom")
