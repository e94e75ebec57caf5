"""The README's figure: what a recipe costs in loss, and what it brings in memory and speed.

Three aligned panels, a row per way of training. Every number is read from a file of
`benchmarks/results/` (`SOURCES`), none is typed here:

    loss     the demo GPT's held-out loss against bf16, mean and range over the seeds; CPU emulation
    memory   the peak of a training step of Llama-2-7B, traced without a GPU
    speed    the linear layers of a Llama-3-8B block, forward and backward, on an H100: a prediction
             of `float8.estimate`, drawn hatched, since nothing of it is measured

A way that a file does not have leaves its panel empty.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring.report import ROOT
from scripts.training.picture import BLUE, GREY, PALE, VERMILLION, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS = ROOT / "benchmarks" / "results"
SOURCES = {
    "demo": "cpu_noamx_demo.json",
    "quality": "cpu_memory_quality.json",
    "memory": "cpu_memory_recipes.json",
    "speed": "predicted_h100.json",
}
MODEL = "llama2-7b"
ALL = "tensorwise+saved_activations+float8_adamw"
# run -> name of its row, and what stands below the name
WAYS = {
    "bf16": ("bf16", "the baseline, not in float8"),
    "tensorwise": ("tensorwise", "the default recipe"),
    "delayed": ("delayed", "scales of earlier steps"),
    "rowwise": ("rowwise", "a scale per row"),
    "unit": ("unit", "unit-scaled, against it in bf16"),
    ALL: ("tensorwise + memory", "activations, Adam in float8"),
    "naive": ("naive cast", "without scales"),
}
LOSS_RANGE = (-1.6, 4.4)  # per cent; beyond it a row is cut off, and its number says so
HEIGHT = 0.5  # of a bar


@dataclass(frozen=True)
class Row:
    """A way of training.

    Args:
        run: its name in the files.
        gaps: to bf16 (`unit`: to the unit-scaled model in bf16), per cent, one per seed.
        peak_gib: the most memory in a step.
        speedup: over bf16.
    """

    run: str
    gaps: Sequence[float] = field(default_factory=tuple)
    peak_gib: float | None = None
    speedup: float | None = None


def rows(folder: Path = RESULTS) -> list[Row]:
    """The rows, top to bottom, as the files have them."""
    files = {
        name: json.loads((folder / file).read_text(encoding="utf-8"))
        for name, file in SOURCES.items()
    }
    return [
        Row(
            run,
            _gaps(run, files["demo"], files["quality"]),
            _peak_gib(run, files["memory"]),
            _speedup(run, files["speed"]),
        )
        for run in WAYS
    ]


def seeds_of_bf16(folder: Path = RESULTS) -> list[float]:
    """How far bf16's own seeds end from their mean, per cent."""
    demo = json.loads((folder / SOURCES["demo"]).read_text(encoding="utf-8"))
    losses = [run["final_val_loss"] for run in demo["runs"] if run["recipe"] == "bf16"]
    return [100 * (loss / statistics.fmean(losses) - 1) for loss in losses]


def _gaps(run: str, demo: dict[str, Any], quality: dict[str, Any]) -> list[float]:
    if run == "bf16":
        return []
    found = [r["gap_to_base_percent"] for r in demo["runs"] if r["recipe"] == run]
    return found or [r["gap_percent"] for r in quality["rows"] if r["layer"] == run]


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


def draw(found: Sequence[Row], seeds: Sequence[float]) -> Figure:
    """Draw the rows; `seeds` are `seeds_of_bf16`."""
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
    draw_loss(panels[0], found, seeds)
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
    return {"bf16": GREY, "naive": VERMILLION}.get(run, BLUE)


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


def draw_loss(axes: Axes, found: Sequence[Row], seeds: Sequence[float]) -> None:
    """Dots, with lines from the best to the worst seed; the band is what bf16's seeds cover."""
    low, high = LOSS_RANGE
    axes.set_xlim(low, high)
    if len(seeds) > 1:
        axes.axvspan(min(seeds), max(seeds), color=PALE, linewidth=0, zorder=0)
    axes.axvline(0, color=GREY, linewidth=1)
    for y, row in enumerate(found):
        colour = colour_of(row.run)
        if not row.gaps:
            axes.plot([0], [y], "o", color=colour, markersize=7)
            place = max([0.0, *seeds]) + 0.22
            axes.text(place, y, "grey: its seeds", va="center", fontsize=8.5, color=GREY)
            continue
        mean = statistics.fmean(row.gaps)
        text = f"{mean:+.1f} %".replace("-", "\N{MINUS SIGN}")
        if mean > high:
            axes.annotate(
                "", (high, y), (high - 1.3, y),
                arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 2},
            )  # fmt: skip
            axes.text(high - 1.5, y, text, ha="right", va="center", color=colour,
                      fontsize=10.5, fontweight="bold")  # fmt: skip
            continue
        axes.plot([min(row.gaps), max(row.gaps)], [y, y], color=colour, linewidth=2)
        axes.plot([mean], [y], "o", color=colour, markersize=7)
        axes.text(max(row.gaps) + 0.22, y, text, va="center", color=colour, fontsize=10.5)
    title(axes, "Loss, against bf16", f"measured: small GPT on a CPU,\n{_over_seeds(found)}")


def _over_seeds(found: Sequence[Row]) -> str:
    count = max((len(row.gaps) for row in found), default=1)
    return "one seed" if count == 1 else f"mean and range of {count} seeds"


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
