"""Draws the file of a study of quality.

recipes   the gaps to bf16 with their intervals, one below the other, in front of the interval
          of the control; and the gaps against the steps of the runs
rates     held-out loss against the learning rate
scaling   the gap against parameters, one line per number of tokens, and the prediction
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.measuring.harness import Row
from benchmarks.quality import rates, recipes, scaling
from benchmarks.quality.contenders import BASE, NOISE, base_of
from benchmarks.quality.paired import Difference, by_contender, difference
from scripts.training import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    *(picture.BLUE, picture.VERMILLION, picture.GREEN, picture.PURPLE, picture.ORANGE),
    *(picture.SKY, picture.BLACK),
)


def draw(report: dict[str, Any]) -> Figure:
    """The figure of a file of ``bench_quality``.

    Raises:
        ValueError: the study has no figure.
    """
    study = report["options"].get("study", "recipes")
    if study not in DRAWN:
        raise ValueError(f"the study of {study} has no figure; these have: {', '.join(DRAWN)}")
    figure: Figure = DRAWN[study](report["rows"])
    return figure


def draw_recipes(rows: Sequence[Row]) -> Figure:
    """Final gaps on the left, gaps against steps on the right."""
    figure, (left, right) = _panels(2, width=4.6)
    contenders = by_contender(rows)
    gaps = {name: _gap(contenders, name) for name in contenders if name != base_of(name)}
    gaps = {name: gap for name, gap in gaps.items() if len(gap.values) > 1}
    draw_forest(left, gaps)
    draw_curves(right, contenders, [name for name in gaps if name != NOISE])
    return figure


def draw_forest(axes: Axes, gaps: dict[str, Difference]) -> None:
    """A line per contender: its seeds pale, its mean and interval dark; grey is the control's."""
    picture.plain(axes, "bottom")
    axes.axvline(0, color=picture.GREY, linewidth=0.8)
    if NOISE in gaps:
        mean, half = gaps[NOISE].mean, gaps[NOISE].half_width
        axes.axvspan(mean - half, mean + half, color=picture.PALE, linewidth=0)
    for place, gap in enumerate(gaps.values()):
        style: Any = {"color": picture.BLUE, "clip_on": False}
        axes.plot(gap.values, [place] * len(gap.values), ".", color=picture.SKY, alpha=0.6)
        ends = [gap.mean - gap.half_width, gap.mean + gap.half_width]
        axes.plot(ends, [place, place], "-", linewidth=2, **style)
        axes.plot([gap.mean], [place], "o", markersize=6, **style)
    for limit in (-recipes.LIMIT, recipes.LIMIT):
        axes.axvline(limit, color=picture.GREY, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(gaps)), list(gaps), color=picture.BLACK)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("gap to bf16 at the end, % of its loss", color=picture.GREY)


def draw_curves(axes: Axes, contenders: dict[str, list[Row]], names: Sequence[str]) -> None:
    """Mean gaps after 1/16, 1/8, ... of the steps, with the last one's interval."""
    picture.plain(axes, "left", "bottom")
    axes.axhline(0, color=picture.GREY, linewidth=0.8)
    steps = _steps(contenders)
    noise = [_gap(contenders, NOISE, step) for step in steps]
    if all(len(gap.values) > 1 for gap in noise):
        low = [gap.mean - gap.half_width for gap in noise]
        high = [gap.mean + gap.half_width for gap in noise]
        axes.fill_between(steps, low, high, color=picture.PALE, linewidth=0, label=NOISE)
    for place, (name, colour) in enumerate(zip(names, itertools.cycle(COLOURS), strict=False)):
        gaps = [_gap(contenders, name, step) for step in steps]
        shifted = [step * 1.02 ** (place - len(names) / 2) for step in steps]
        style: Any = {"color": colour, "linewidth": 1.4, "elinewidth": 0.7, "markersize": 4}
        style["linestyle"] = "-" if place < len(COLOURS) else "--"
        half = [gap.half_width for gap in gaps]
        axes.errorbar(shifted, [gap.mean for gap in gaps], half, marker="o", label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, [f"{step:,}" for step in steps])
    axes.minorticks_off()
    axes.set_xlabel("steps", color=picture.GREY)
    axes.set_ylabel("gap to bf16, % of its loss", color=picture.GREY)
    _legend(axes)


def _gap(contenders: dict[str, list[Row]], name: str, step: int | None = None) -> Difference:
    """At the end, or after a number of steps."""
    own, bases = contenders.get(name, []), contenders.get(base_of(name), [])
    return difference(_after(own, step), _after(bases, step))


def _after(rows: Sequence[Row], step: int | None) -> Sequence[Row]:
    if step is None:
        return rows
    pairs = ((row, dict(row["curve"]).get(step)) for row in rows if "loss" in row)
    return [{"run": row["run"], "loss": loss} for row, loss in pairs if loss is not None]


def _steps(contenders: dict[str, list[Row]]) -> list[int]:
    rows = [row for own in contenders.values() for row in own if "loss" in row]
    return sorted({step for row in rows for step, _ in row["curve"]})


def draw_rates(rows: Sequence[Row]) -> Figure:
    """A line per contender; a dot where the loss is least."""
    figure, (axes,) = _panels(1, width=6)
    picture.plain(axes, "left", "bottom")
    contenders = by_contender(rows)
    for (name, own), colour in zip(contenders.items(), itertools.cycle(COLOURS), strict=False):
        losses = rates.curve(rates.octaves(own))
        if losses:
            style = ":" if base_of(name) != BASE else "-"
            axes.plot(list(losses), list(losses.values()), style, color=colour, label=name)
            best = rates.best(losses)
            axes.plot([best], [losses[best]], "o", color=colour)
    axes.set_xticks(list(rates.OCTAVES), [f"x{2.0**octave:g}" for octave in rates.OCTAVES])
    axes.set_xlabel("learning rate, of the usual one", color=picture.GREY)
    axes.set_ylabel("held-out loss", color=picture.GREY)
    _legend(axes)
    return figure


def draw_scaling(rows: Sequence[Row]) -> Figure:
    """A panel per contender; dashed is what the scaling law predicts."""
    lines, _ = scaling.summary(rows)
    names = list(dict.fromkeys(line["layer"] for line in lines if "gap_percent" in line))
    figure, panels = _panels(max(1, len(names)), width=3.2)
    for axes, name in zip(panels, names, strict=False):
        picture.plain(axes, "left", "bottom")
        axes.axhline(0, color=picture.GREY, linewidth=0.8)
        own = [line for line in lines if line["layer"] == name and "gap_percent" in line]
        for D, colour in zip(sorted({line["D"] for line in own}), COLOURS, strict=False):
            _draw_budget(axes, [line for line in own if line["D"] == D], colour)
        axes.set_xscale("log")
        axes.set_title(name, loc="left", fontweight="bold", pad=10)
        axes.set_xlabel("parameters of the blocks", color=picture.GREY)
    panels[0].set_ylabel("gap to bf16, % of its loss", color=picture.GREY)
    _legend(panels[0])
    return figure


def _draw_budget(axes: Axes, lines: Sequence[Row], colour: str) -> None:
    """The gaps of one number of tokens."""
    label = f"{lines[0]['D'] / 1e6:.2g} million tokens"
    half = [line["half_width"] if math.isfinite(line["half_width"]) else 0.0 for line in lines]
    sizes, gaps = [line["N"] for line in lines], [line["gap_percent"] for line in lines]
    style: Any = {"color": colour, "linewidth": 1.4, "elinewidth": 0.7, "marker": "o"}
    axes.errorbar(sizes, gaps, half, label=label, **style)
    predicted = [(line["N"], line["predicted"]) for line in lines if "predicted" in line]
    axes.plot(*zip(*predicted, strict=True), "--", color=colour) if predicted else None


def _legend(axes: Axes) -> None:
    """None where a file has nothing to draw yet."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small")


def _panels(count: int, width: float) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure  # needed for drawing only

    figure = Figure(figsize=(width * count, 4.2), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False, sharey="none")[0]


DRAWN = {"recipes": draw_recipes, "rates": draw_rates, "scaling": draw_scaling}
