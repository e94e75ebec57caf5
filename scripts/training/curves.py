"""The demo's picture: loss curves, and how far each recipe is from its base.

    left    training loss, smoothed, over the steps
    right   held-out loss over that of the base, in per cent: bf16, for `unit` unit_bf16

A line is the mean over the seeds; the band around it reaches from the best seed to the worst. Names
stand at the ends of the lines. A run that ends far above the others, as the naive cast does, would
press the rest into one line: it is cut off, and its final number stands at the edge. Without any
base among the runs there is no right panel.

`draw` takes the ``runs`` of a demo.json; `python benchmarks/plots.py demo.json -o demo.png` draws a
file again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scripts.training.picture import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PURPLE,
    SHADES,
    SKY,
    VERMILLION,
    plain,
    push_apart,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = dict[str, Any]

SMOOTHING = 0.8  # of the training losses in the picture; the JSON has them as they are
COLOURS = {
    "bf16": BLACK,
    "tensorwise": BLUE,
    "delayed": ORANGE,
    "rowwise": GREEN,
    "naive": VERMILLION,
    "unit_bf16": GREY,
    "unit": PURPLE,
}
FAR = 1.1  # a final loss of more than this times the least is cut off
SETTLED = 0.25  # the part of the training after which losses are to be seen
FONT = 9.5
FEW = 20  # points that are marked, one by one
LINE = 0.065  # the height of a name, of the panel's
WIDTH, PANEL = 8.0, 3.9  # of the picture and of a row of panels, inches
LEFT, BELOW, ABOVE = 0.5, 0.5, 0.72  # of a panel, for its axes and its title
BESIDE, CHARACTER = 0.1, 0.083  # from a panel to the names, and of each character, bold
LONG = 16  # a longer name needs the panels below one another


@dataclass(frozen=True)
class Curve:
    """A line: x, then mean, least and greatest over the seeds at each x."""

    name: str
    recipe: str
    processes: int
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    @property
    def end(self) -> float:
        return self.mean[-1]


def base_of(recipe: str) -> str:
    """The run in bf16 that a run is compared with."""
    return "unit_bf16" if recipe.partition("+")[0] in ("unit", "unit_bf16") else "bf16"


def times(processes: int) -> str:
    """What names of runs end with: nothing for one process, x2 for two."""
    return "" if processes == 1 else f"x{processes}"


def smooth(losses: Sequence[float]) -> list[float]:
    """An exponential average, unbiased at its start as Adam's are."""
    averages, average = [], 0.0
    for step, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        averages.append(average / (1 - SMOOTHING**step))
    return averages


# --- what is drawn


def training_curves(runs: Sequence[Run]) -> list[Curve]:
    """The smoothed training loss of each recipe."""
    curves = []
    for (recipe, processes), own in _grouped(runs).items():
        lines = [smooth(run["train_loss"]) for run in own]
        curves.append(_curve(recipe, processes, range(1, len(lines[0]) + 1), lines))
    return curves


def gap_curves(runs: Sequence[Run]) -> list[Curve]:
    """Held-out loss over the base's of the same seed, in per cent; of runs that have a base."""
    by_key = {(run["recipe"], _processes(run), run["seed"]): run for run in runs}
    curves = []
    for (recipe, processes), own in _grouped(runs).items():
        base = base_of(recipe)
        pairs = [(run, by_key.get((base, processes, run["seed"]))) for run in own]
        lines = [_gaps(run, other) for run, other in pairs if other is not None]
        if recipe != base and lines:
            steps = [step for step, _ in own[0]["val_loss"]]
            curves.append(_curve(recipe, processes, steps, lines))
    return curves


def cut_off(runs: Sequence[Run]) -> set[str]:
    """Names of the runs that end far above the best, or not at a number."""
    ends = {
        _name(*key): statistics.fmean(_number(run["final_val_loss"]) for run in own)
        for key, own in _grouped(runs).items()
    }
    finite = [end for end in ends.values() if math.isfinite(end)]
    best = min(finite, default=math.inf)
    return {name for name, end in ends.items() if not end <= FAR * best or end == math.inf}


def _grouped(runs: Sequence[Run]) -> dict[tuple[str, int], list[Run]]:
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["recipe"], _processes(run)), []).append(run)
    return groups


def _processes(run: Run) -> int:
    return int(run.get("processes", 1))  # two committed results do not say it


def _name(recipe: str, processes: int) -> str:
    return f"{recipe} {times(processes)}".strip()


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _gaps(run: Run, base: Run) -> list[float]:
    pairs = zip(run["val_loss"], base["val_loss"], strict=True)
    return [100 * (_number(loss) / _number(other) - 1) for (_, loss), (_, other) in pairs]


def _curve(
    recipe: str, processes: int, x: Sequence[float], lines: Sequence[Sequence[float]]
) -> Curve:
    columns = [[_number(value) for value in column] for column in zip(*lines, strict=True)]
    is_nan = [any(map(math.isnan, column)) for column in columns]
    low, high = (
        [math.nan if bad else reach(column) for bad, column in zip(is_nan, columns, strict=True)]
        for reach in (min, max)
    )
    mean = [statistics.fmean(column) for column in columns]
    return Curve(_name(recipe, processes), recipe, processes, list(x), mean, low, high)


# --- drawing


def draw(runs: Sequence[Run]) -> Figure:
    """The picture of the runs of one demo.json."""
    from matplotlib.figure import Figure  # not pyplot, which may need a display

    far = cut_off(runs)
    losses, gaps = training_curves(runs), gap_curves(runs)
    longest = max(len(curve.name) for curve in losses)
    is_column = longest > LONG or not gaps
    beside = [longest + 7 * (name in far) for name in (curve.name for curve in losses)]
    characters = [max(beside), longest + 7][: 1 + bool(gaps)]
    margins = [BESIDE + CHARACTER * (count + 1) for count in characters]
    figure = Figure(figsize=(WIDTH, PANEL * (len(margins) if is_column else 1)))
    boxes = _stacked(margins) if is_column else _side_by_side(margins)
    panels = [figure.add_axes(box) for box in boxes]
    colours = colours_of(losses)
    seeds = len({run["seed"] for run in runs})
    over = f"\nmean and range of {seeds} seeds" if seeds > 1 else ""
    _draw_losses(panels[0], losses, far, colours)
    _title(panels[0], "Training loss", f"nats per byte, smoothed{over}")
    if gaps:
        _draw_gaps(panels[1], gaps, far, colours)
        first, *others = dict.fromkeys(base_of(curve.recipe) for curve in gaps)
        rest = f"; unit against {others[0]}" if others else ""
        _title(panels[1], f"Held-out loss against {first}", f"per cent{rest}{over}")
    return figure


def _side_by_side(margins: Sequence[float]) -> list[tuple[float, float, float, float]]:
    """Boxes of panels, as `Figure.add_axes` takes them; `margins` are inches right of each."""
    width = (WIDTH - LEFT * len(margins) - sum(margins)) / len(margins)
    boxes, left = [], LEFT
    for margin in margins:
        boxes.append((left / WIDTH, BELOW / PANEL, width / WIDTH, 1 - (BELOW + ABOVE) / PANEL))
        left += width + margin + LEFT
    return boxes


def _stacked(margins: Sequence[float]) -> list[tuple[float, float, float, float]]:
    """The same, the first panel on top."""
    count, width = len(margins), WIDTH - LEFT - max(margins)
    return [
        (
            LEFT / WIDTH,
            (count - 1 - row + BELOW / PANEL) / count,
            width / WIDTH,
            (1 - (BELOW + ABOVE) / PANEL) / count,
        )
        for row in range(count)
    ]


def _title(axes: Axes, text: str, below: str) -> None:
    lines = 1 + below.count("\n")
    axes.set_title(text, loc="left", fontsize=11.5, fontweight="bold", pad=8 + 12 * lines)
    axes.text(
        0, 1.03, below, transform=axes.transAxes, fontsize=9, color=GREY, va="bottom",
        linespacing=1.15,
    )  # fmt: skip


def _draw_losses(
    axes: Axes, curves: Sequence[Curve], far: set[str], colours: dict[str, str]
) -> None:
    near = [curve for curve in curves if curve.name not in far] or curves
    start = math.ceil(SETTLED * len(near[0].x)) - 1
    low = min((v for c in near for v in c.low if math.isfinite(v)), default=0.0)
    high = max((v for c in near for v in c.high[start:] if math.isfinite(v)), default=1.0)
    margin = 0.05 * (high - low) or 0.05
    _draw_panel(axes, curves, far, colours, (low - margin, high + margin))
    _draw_names(axes, curves, far, colours, "{0}", " {1:.2f}")


def _draw_gaps(axes: Axes, curves: Sequence[Curve], far: set[str], colours: dict[str, str]) -> None:
    near = [curve for curve in curves if curve.name not in far]
    shown = [v for c in near for v in (*c.low, *c.high) if math.isfinite(v)]
    low, high = min([0.0, *shown]), max([0.0, *shown])
    margin = 0.08 * (high - low) or 1.0
    axes.axhline(0, color=GREY, linewidth=1)
    _draw_panel(axes, curves, far, colours, (low - margin, high + margin))
    _draw_names(axes, curves, far, colours, "{0} {1:+.1f} %", "")


def _draw_panel(
    axes: Axes,
    curves: Sequence[Curve],
    far: set[str],
    colours: dict[str, str],
    limits: tuple[float, float],
) -> None:
    plain(axes, "left", "bottom")
    axes.set_xlabel("step", color=GREY, fontsize=FONT)
    axes.tick_params(labelsize=FONT)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(0, 1.02 * max(curve.x[-1] for curve in curves))
    axes.set_ylim(*limits)
    axes.locator_params(axis="x", nbins=5, integer=True)
    for curve in curves:
        colour = colours[curve.name]
        if curve.name not in far:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.12, linewidth=0)
        axes.plot(
            curve.x, curve.mean, color=colour, linewidth=1.8, label=curve.name,
            linestyle="-" if curve.processes == 1 else (0, (3, 1.5)),
            marker="o" if len(curve.x) < FEW else "", markersize=4,
        )  # fmt: skip


def colours_of(curves: Sequence[Curve]) -> dict[str, str]:
    """A colour for each name: the recipe's own, of others one that is free."""
    recipes = list(dict.fromkeys(curve.recipe for curve in curves))
    free = [c for c in (*COLOURS.values(), SKY) if c not in {COLOURS.get(r) for r in recipes}]
    free = free or list(COLOURS.values())
    others = [recipe for recipe in recipes if recipe not in COLOURS]
    chosen = COLOURS | {recipe: free[i % len(free)] for i, recipe in enumerate(others)}
    return {curve.name: chosen[curve.recipe] for curve in curves}


def _draw_names(
    axes: Axes,
    curves: Sequence[Curve],
    far: set[str],
    colours: dict[str, str],
    form: str,
    more: str,
) -> None:
    """Write names, with numbers, right of the ends of the lines; of cut off ones at the top.

    `form` is of the name and the final number, `more` is added where the line is cut off.
    """
    low, high = axes.get_ylim()
    end = max(curve.x[-1] for curve in curves) / axes.get_xlim()[1]
    beside = 1 + BESIDE / (WIDTH * axes.get_position().width)
    is_far = [curve.name in far or not curve.end <= high for curve in curves]
    heights = [
        1.0 if cut else max(0.0, (curve.end - low) / (high - low))
        for curve, cut in zip(curves, is_far, strict=True)
    ]
    places = push_apart(heights, LINE, 0.0, 1.0)
    for curve, cut, height, place in zip(curves, is_far, heights, places, strict=True):
        text = (form + more * cut).format(curve.name, curve.end) + " \N{UPWARDS ARROW}" * cut
        text = text.replace(" -", " \N{MINUS SIGN}")
        if not math.isfinite(curve.end):
            text = f"{curve.name} {curve.end}"
        colour = colours[curve.name]
        leader = {
            "arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 1,
            "relpos": (0, 0.5),
        }  # fmt: skip
        axes.annotate(
            text, (end, height), (beside, place), xycoords="axes fraction",
            textcoords="axes fraction", va="center", fontsize=FONT,
            color=SHADES.get(colour, colour),
            fontweight="bold", annotation_clip=False, arrowprops=None if cut else leader,
        )  # fmt: skip
