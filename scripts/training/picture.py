"""What all pictures share: colours, labels that do not overlap, and small PNG files.

The colours are Okabe and Ito's, which readers with any form of colour blindness can tell apart
(https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

BLACK, GREY, PALE = "#000000", "#5f6368", "#e3e5e8"
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE = "#56B4E9", "#CC79A7"
# Text in a pale colour is drawn in a darker shade of it, which has the contrast that text needs.
SHADES = {ORANGE: "#A06A00", GREEN: "#007A5A", SKY: "#1F6F9E", PURPLE: "#A8507F"}
DPI = 200  # of a figure 8 inches wide: 1600 pixels, shown at 900 and sharp on a dense screen
PALETTE = 96  # colours of a PNG; a third of the bytes of full colour, with no visible difference


def push_apart(wanted: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Positions in the order of `wanted`, at least `distance` apart, as near to it as possible.

    All lie between `low` and `high`; too many for that distance are spread over this range.
    """
    if not wanted:
        return []
    distance = min(distance, (high - low) / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # Least squares under "next >= this + distance": subtract i * distance, then merge whatever
    # decreases into blocks at their mean.
    blocks: list[list[float]] = []
    for rank, index in enumerate(order):
        blocks.append([wanted[index] - rank * distance])
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            merged = blocks.pop()
            blocks[-1] += merged
    flat = [_mean(block) for block in blocks for _ in block]
    top = high - (len(wanted) - 1) * distance
    placed = [0.0] * len(wanted)
    for rank, index in enumerate(order):
        placed[index] = min(max(flat[rank], low), top) + rank * distance
    return placed


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def plain(axes: Axes, *sides: str) -> None:
    """Leave only these sides of the frame, thin and grey, and text in grey."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in sides)
        spine.set_color(GREY)
    axes.tick_params(color=GREY, labelcolor=GREY)


def save(figure: Figure, path: Path) -> None:
    """Write a figure; a PNG with a palette, another suffix as matplotlib writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() != ".png":
        figure.savefig(path, facecolor="white")
        return
    from PIL import Image

    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=DPI, facecolor="white")
    shrink(Image.open(whole), path)  # Pillow comes with matplotlib


def shrink(image: Image, path: Path, colours: int = PALETTE) -> None:
    """Write a picture as a PNG with a palette."""
    from PIL import Image

    few = image.convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    few.save(path, format="PNG", optimize=True)
