"""The README's figure: what a recipe costs in loss, and what it brings in memory and speed.

Three aligned panels, a row per way of training. Every number is read from a file of
`benchmarks/results/` (`SOURCES`), none is typed here:

    loss     a small GPT's held-out loss, the mean gap to bf16 of paired runs with its 95 % interval
             (`quality/recipes.py`); CPU emulation
    memory   the peak of a training step of Llama-2-7B, traced without a GPU
    speed    the linear layers of a Llama-3-8B block, forward and backward, on an H100: a prediction
             of `float8.estimate`, drawn hatched, since nothing of it is measured

A way that a file does not have leaves its panel empty.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring.report import ROOT
from benchmarks.quality import recipes
from benchmarks.quality.contenders import SAVING, UNIT_DYNAMIC
from scripts.training.picture import BLUE, GREY, PALE, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS = ROOT / "benchmarks" / "results"
SOURCES = {
    "loss": "cpu_quality.json",
    "memory": "cpu_memory_recipes.json",
    "speed": "predicted_h100.json",
}
MODEL = "llama2-7b"
# run -> name of its row, and what stands below the name
WAYS = {
    "bf16": ("bf16", "the baseline, not in float8"),
    "tensorwise": ("tensorwise", "the default recipe"),
    "delayed": ("delayed", "scales of earlier steps"),
    "rowwise": ("rowwise", "a scale per row"),
    UNIT_DYNAMIC: ("unit-scaled", "against it in bf16"),
    SAVING: ("tensorwise + memory", "activations, Adam in float8"),
}
HEIGHT = 0.5  # of a bar


@dataclass(frozen=True)
class Row:
    """A way of training.

    Args:
        run: its name in the files.
        gap: to bf16 (of a unit-scaled model: to itself in bf16) in per cent, and half of its 95 %
            interval.
        seeds, steps: of the gap's runs.
        peak_gib: the most memory in a step.
        speedup: over bf16.
    """

    run: str
    gap: tuple[float, float] | None = None
    seeds: int = 0
    steps: int = 0
    peak_gib: float | None = None
    speedup: float | None = None


def rows(folder: Path = RESULTS) -> list[Row]:
    """The rows, top to bottom, as the files have them."""
    files = {
        name: json.loads((folder / file).read_text(encoding="utf-8"))
        for name, file in SOURCES.items()
    }
    losses = {line["layer"]: line for line in recipes.lines(files["loss"]["rows"])}
    return [
        Row(
            run,
            **_gap(losses.get(run, {})),
            peak_gib=_peak_gib(run, files["memory"]),
            speedup=_speedup(run, files["speed"]),
        )
        for run in WAYS
    ]


def _gap(line: dict[str, Any]) -> dict[str, Any]:
    """The fields of a gap; none without an interval, which takes two seeds."""
    if line.get("gap_half_width") is None:
        return {}
    gap = line["gap_percent"], line["gap_half_width"]
    return {"gap": gap, "seeds": line["seeds"], "steps": line["fields"]["steps"]}


def _peak_gib(run: str, memory: dict[str, Any]) -> float | None:
    for row in memory["rows"]:
        if (row["layer"], row["mode"]) == (run, MODEL):
            return float(row["peak_mib"] / 1024)
    return None


def _speedup(run: str, speed: dict[str, Any]) -> float | None:
    """Of all layers together."""
    if run == "bf16":
        return 1.0
    layers = speed["rows"]
    if any(run not in layer for layer in layers):
        return None
    ours = sum(layer[run]["gemms_s"] + layer[run]["casts_s"] for layer in layers)
    return float(sum(layer["bf16_s"] for layer in layers) / ours)


# --- drawing


def draw(found: Sequence[Row]) -> Figure:
    """Draw the rows."""
    from matplotlib.figure import Figure  # needed for drawing only

    figure = Figure(figsize=(8, 4))
    grid = figure.add_gridspec(
        1, 3, left=0.243, right=0.985, top=0.815, bottom=0.035, wspace=0.09,
        width_ratios=(1.25, 1, 1),
    )  # fmt: skip
    panels = [figure.add_subplot(grid[0, column]) for column in range(3)]
    for axes in panels:
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_xticks([])
        axes.set_yticks([])
        plain(axes)
        for edge in range(1, len(found)):
            axes.axhline(edge - 0.5, color=PALE, linewidth=0.8, zorder=0)
    runs = [row.run for row in found]
    draw_names(panels[0], found)
    draw_loss(panels[0], found)
    draw_bars(
        panels[1], runs, [row.peak_gib for row in found], "{:.0f} GiB", "Memory",
        "peak of a Llama-2-7B step,\ntraced without a GPU", "not traced",
    )  # fmt: skip
    draw_bars(
        panels[2], runs, [row.speedup for row in found], "{:.2f}x", "Speed, predicted",
        "not measured: H100,\nlinear layers of Llama-3-8B", "not predicted", hatch="////",
    )  # fmt: skip
    return figure


def colour_of(run: str) -> str:
    return GREY if run == "bf16" else BLUE


def draw_names(axes: Axes, found: Sequence[Row]) -> None:
    place = axes.get_yaxis_transform()
    for y, row in enumerate(found):
        name, below = WAYS[row.run]
        style: Any = {"transform": place, "ha": "right", "clip_on": False}
        axes.text(
            -0.04, y - 0.03, name, va="bottom", fontsize=10.5, fontweight="bold",
            color=colour_of(row.run), **style,
        )  # fmt: skip
        axes.text(-0.04, y + 0.05, below, va="top", fontsize=8, color=GREY, **style)


def title(axes: Axes, text: str, below: str) -> None:
    axes.set_title(text, loc="left", fontsize=11.5, fontweight="bold", pad=32)
    axes.text(
        0, 1.025, below, transform=axes.transAxes, va="bottom", fontsize=8.5, color=GREY,
        linespacing=1.15,
    )  # fmt: skip


def draw_loss(axes: Axes, found: Sequence[Row]) -> None:
    """Dots with their intervals; the band is the limit that an interval should lie in."""
    ends = [0.0, recipes.LIMIT] + [sum(row.gap) for row in found if row.gap]
    starts = [-recipes.LIMIT] + [row.gap[0] - row.gap[1] for row in found if row.gap]
    width = max(ends) - min(starts)
    axes.set_xlim(min(starts) - 0.04 * width, max(ends) + 0.5 * width)  # room for the numbers
    axes.axvspan(-recipes.LIMIT, recipes.LIMIT, color=PALE, linewidth=0, zorder=0)
    axes.axvline(0, color=GREY, linewidth=1)
    for y, row in enumerate(found):
        colour = colour_of(row.run)
        grey: Any = {"va": "center", "color": GREY, "fontsize": 8.5}
        beside = max(recipes.LIMIT, sum(row.gap or (0.0,))) + 0.04 * width
        if row.gap is not None:
            mean, half_width = row.gap
            axes.plot([mean - half_width, mean + half_width], [y, y], color=colour, linewidth=2)
            text = f"{mean:+.2f} %".replace("-", "\N{MINUS SIGN}")
            axes.text(beside, y, text, va="center", color=colour, fontsize=10.5)
        elif row.run == "bf16":
            mean = 0.0
            axes.text(beside, y, f"grey: within {recipes.LIMIT} %", **grey)
        else:
            axes.text(beside, y, "not in this study", **grey)
            continue
        axes.plot([mean], [y], "o", color=colour, markersize=7)
    compared = [row for row in found if row.gap]
    seeds = " to ".join(f"{count}" for count in sorted({row.seeds for row in compared}))
    steps = " to ".join(f"{count:,}" for count in sorted({row.steps for row in compared}))
    below = f"small GPT, {steps} steps, on a CPU,\n95 % interval from {seeds} seeds"
    title(axes, "Loss, against bf16", below)


def draw_bars(
    axes: Axes,
    runs: Sequence[str],
    values: Sequence[float | None],
    form: str,
    name: str,
    below: str,
    missing: str,
    hatch: str = "",
) -> None:
    """Bars from zero with their numbers; hatched bars are predictions."""
    top = max((value for value in values if value is not None), default=1.0)
    axes.set_xlim(0, top * 1.02)
    for y, (value, run) in enumerate(zip(values, runs, strict=True)):
        if value is None:
            axes.text(0.02 * top, y, missing, va="center", color=GREY, fontsize=8.5)
            continue
        colour = colour_of(run)
        axes.barh(
            y, value, HEIGHT, color="white" if hatch else colour, edgecolor=colour, hatch=hatch,
            linewidth=1.2 if hatch else 0,
        )  # fmt: skip
        axes.text(
            0.03 * top, y, form.format(value), va="center", fontsize=10.5, fontweight="bold",
            color=colour if hatch else "white",
            bbox={"facecolor": "white", "linewidth": 0, "pad": 1.5} if hatch else None,
        )  # fmt: skip
    title(axes, name, below)
