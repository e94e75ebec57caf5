"""Draws speed-ups, from a run (`--plot FILE`) or from the JSON that it wrote (`plots.py`).

One panel per mode; sizes along x in the order of measurement, one line per contender, and a line
at 1, where float8 gains nothing. Speed-up is 1 / ratio: above 1 is faster. A recipe has one colour;
torchao's line of it is dashed, and the lower bound of emulation is dotted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.measuring.shapes import Shape
from scripts.training import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks.measuring.harness import Row


class Lines(NamedTuple):
    """How a benchmark's rows become lines: the field that names a line, and the baseline's name."""

    field: str
    baseline: str


STYLES = {"torchao": "--", "floor": ":"}
LINES = {
    "bench_linear": Lines("layer", "nn.Linear"),
    "bench_matmul": Lines("granularity", "bf16"),
}


def panels(report: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Mode -> contender -> size -> speed-up, from the rows that were measured."""
    lines = LINES[report["benchmark"]]
    drawn: dict[str, dict[str, dict[str, float]]] = {}
    for row in report["rows"]:
        if "ratio" not in row or row[lines.field] == lines.baseline:
            continue
        panel = drawn.setdefault(row.get("mode", ""), {})
        panel.setdefault(row[lines.field], {})[size(row)] = 1 / row["ratio"]
    return drawn


def size(row: Row) -> str:
    """What stands under the x axis for a row: `70b.ffn.w2`, `4096` or `2048,1024,4096`."""
    name, _, numbers = row["shape"].rpartition(" ")
    M, K, N = (int(number) for number in numbers.strip("()").split(","))
    return Shape(M, K, N, name).label


def draw(report: dict[str, Any]) -> Figure:
    from matplotlib.figure import Figure  # needed for drawing only

    drawn = panels(report)
    sizes = list(dict.fromkeys(size(row) for row in report["rows"]))
    figure = Figure(figsize=(2 + max(4, len(sizes)) * max(1, len(drawn)), 5), layout="constrained")
    baseline = LINES[report["benchmark"]].baseline
    figure.suptitle(f"{report['benchmark']}: {report['environment']['device']}")
    grid = figure.subplots(1, max(1, len(drawn)), sharey=True, squeeze=False)
    for axes, (mode, panel) in zip(grid[0], drawn.items(), strict=False):
        draw_panel(axes, panel, sizes)
        axes.set_title(mode)
        axes.set_ylabel(f"speed-up over {baseline}")
    return figure


def draw_panel(axes: Axes, panel: dict[str, dict[str, float]], sizes: list[str]) -> None:
    axes.axhline(1, color="black", linewidth=0.8)
    recipes = list(dict.fromkeys(name.split()[-1] for name in panel))
    for name, speedups in panel.items():
        *kind, recipe = name.split()
        axes.plot(
            [sizes.index(each) for each in speedups],
            list(speedups.values()),
            STYLES[kind[0]] if kind else "-",
            color=f"C{recipes.index(recipe)}",
            marker="o",
            label=name,
        )
    axes.set_xticks(range(len(sizes)), sizes, rotation=45, ha="right")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def save(report: dict[str, Any], file: Path) -> None:
    """Draw a report as `report.publish` returns it, in the format of the file's suffix."""
    picture.save(draw(report), file)
