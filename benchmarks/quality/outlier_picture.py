"""Draws the losses of `bench_outliers` by the size of the outlier that is often there.

Two panels: right after the conversion, and trained on. The y axis is linear up to 0.1 per cent and
logarithmic above it: differences of rounding and of a lost model have a place each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.measuring.harness import Row
from scripts.training import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "tensorwise": picture.BLUE,
    "delayed": picture.ORANGE,
    "rowwise": picture.GREEN,
    "blockwise": picture.PURPLE,
    "mxfp8": picture.SKY,
    "down in bf16": picture.GREY,
}
LINEAR = 0.1  # per cent
PANELS = {"converted_gap": "right after conversion", "trained_gap": "trained on"}


def draw(lines: Sequence[Row]) -> Figure:
    """A panel per moment, a line per contender; Smooth-SwiGLU has its recipe's colour, dashed."""
    from matplotlib.figure import Figure  # needed for drawing only

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
        picture.plain(axes, "left", "bottom")
        axes.axhline(0, color=picture.PALE, linewidth=1)
        for name, gaps in curves(lines, key).items():
            recipe = name.removeprefix("smooth ")
            axes.plot(
                list(gaps),
                list(gaps.values()),
                color=COLOURS.get(recipe, picture.BLACK),
                linestyle="-" if recipe == name else "--",
                marker="o",
                markersize=4,
                linewidth=1.8,
                label=name,
            )
        axes.set_yscale("symlog", linthresh=LINEAR)
        axes.set_title(title, loc="left", fontweight="bold", pad=10)
        axes.set_xlabel("log2(outlier / rest of the tensor)", color=picture.GREY)
    figure.axes[0].set_ylabel("loss above bf16, %", color=picture.GREY)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    return figure


def curves(lines: Sequence[Row], key: str) -> dict[str, dict[int, float]]:
    """Contender -> exponent -> difference to bf16 in per cent, of the outlier that is often there.

    Args:
        lines: of `bench_outliers`.
        key: of `PANELS`.
    """
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        if line["outlier"] == "often" and key in line:
            exponent = int(line["size"].removeprefix("2^"))
            found.setdefault(line["layer"], {})[exponent] = line[key]
    return found
