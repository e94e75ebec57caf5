"""Draws the file of `bench_quality`.

The gaps to bf16 with their intervals, one below the other, in front of the interval of the control;
and the gaps against the steps of the runs. A contender whose interval is far wider than the others'
leaves the picture, and its numbers are written there.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.measuring.harness import Row
from benchmarks.quality import recipes
from benchmarks.quality.contenders import CONTROLS, NOISE
from benchmarks.quality.paired import Difference, by_contender, with_loss
from scripts.training import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3  # panels in a row


def draw(rows: Sequence[Row]) -> Figure:
    """Final gaps on the left, gaps against steps on the right."""
    from matplotlib.figure import Figure  # needed for drawing only

    contenders = by_contender(rows)
    gaps = {n: gap for n, gap in recipes.gaps(contenders).items() if len(gap.values) > 1}
    names = [name for name in gaps if name in contenders and name not in CONTROLS.values()]
    figure = Figure(figsize=(10.5, 5), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=(1, 1.4))
    left, right = halves
    ends = [abs(gap.mean) + gap.half_width for gap in gaps.values()]
    reach = 3 * statistics.median(ends or [recipes.LIMIT])
    draw_forest(left.subplots(), gaps, reach)
    if names:
        height = -(-len(names) // ACROSS)
        grid = right.subplots(height, ACROSS, sharex=True, sharey=True, squeeze=False)
        grid[0, 0].set_ylim(-reach, reach)
        draw_curves(list(grid.flat), contenders, names)
        right.supxlabel("steps", color=picture.GREY, fontsize="medium")
    return figure


def draw_forest(axes: Axes, gaps: dict[str, Difference], reach: float) -> None:
    """A line per contender: its seeds pale, its mean and interval dark; grey is the control's."""
    picture.plain(axes, "bottom")
    axes.axvline(0, color=picture.GREY, linewidth=0.8)
    if NOISE in gaps:
        mean, half = gaps[NOISE].mean, gaps[NOISE].half_width
        axes.axvspan(mean - half, mean + half, color=picture.PALE, linewidth=0)
    for place, gap in enumerate(gaps.values()):
        style: Any = {"color": picture.BLUE}
        axes.plot(gap.values, [place] * len(gap.values), ".", color=picture.SKY, alpha=0.6)
        ends = [gap.mean - gap.half_width, gap.mean + gap.half_width]
        axes.plot(ends, [place, place], "-", linewidth=2, **style)
        axes.plot([gap.mean], [place], "o", markersize=6, **style)
        if gap.mean + gap.half_width > reach:
            axes.text(reach, place - 0.15, str(gap), ha="right", va="bottom", size="small", **style)
    axes.set_xlim(-reach, reach)
    for limit in (-recipes.LIMIT, recipes.LIMIT):
        axes.axvline(limit, color=picture.GREY, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(gaps)), list(map(_broken, gaps)), color=picture.BLACK)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("gap to the base at the end, % of its loss", color=picture.GREY)


def _broken(name: str) -> str:
    """A name of several parts, in lines."""
    return name.replace("+", "+\n")


def draw_curves(
    panels: Sequence[Axes], contenders: dict[str, list[Row]], names: Sequence[str]
) -> None:
    """A panel per contender: the gap after 1/16, 1/8, ... of the steps; grey is the control's."""
    steps = _steps(contenders)
    gaps = [recipes.gaps(_after(contenders, step)) for step in steps]
    for axes, name in zip(panels, names, strict=False):
        picture.plain(axes, "left", "bottom")
        axes.axhline(0, color=picture.GREY, linewidth=0.8)
        if NOISE in contenders:
            _band(axes, steps, [of_step[NOISE] for of_step in gaps], color=picture.PALE)
        own = [of_step[name] for of_step in gaps]
        _band(axes, steps, own, color=picture.BLUE, alpha=0.25)
        axes.plot(steps, [gap.mean for gap in own], "o-", color=picture.BLUE, markersize=4)
        axes.set_title(_broken(name), loc="left", fontsize="medium")
        axes.set_xscale("log", base=2)
        axes.set_xticks(steps, [f"{step:,}" for step in steps], rotation=45)
        axes.minorticks_off()
    for axes in panels[len(names) :]:
        axes.set_visible(False)


def _band(axes: Axes, steps: Sequence[int], gaps: Sequence[Difference], **style: Any) -> None:
    """The intervals of gaps; none where a step has fewer than two seeds."""
    if all(len(gap.values) > 1 for gap in gaps):
        low = [gap.mean - gap.half_width for gap in gaps]
        high = [gap.mean + gap.half_width for gap in gaps]
        axes.fill_between(steps, low, high, linewidth=0, **style)


def _after(contenders: dict[str, list[Row]], step: int) -> dict[str, list[Row]]:
    """Rows whose loss is that after a number of steps."""
    return {
        name: with_loss(
            rows, lambda row: dict(row.get("curve", ())).get(step) if "loss" in row else None
        )
        for name, rows in contenders.items()
    }


def _steps(contenders: dict[str, list[Row]]) -> list[int]:
    rows = [row for own in contenders.values() for row in own if "loss" in row]
    return sorted({step for row in rows for step, _ in row["curve"]})
