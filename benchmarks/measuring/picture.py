"""What figures share: colours, plain axes, and small PNG files.

The colours are Okabe and Ito's, which readers with any form of colour blindness can tell apart
(https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, GREY, PALE = "#000000", "#5f6368", "#e3e5e8"
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE = "#56B4E9", "#CC79A7"
DPI = 200  # of a figure 8 inches wide: 1600 pixels, shown at 900 and sharp on a dense screen
PALETTE = 96  # colours of a PNG; a third of the bytes of full colour, with no visible difference


def new(width: float, height: float) -> Figure:
    """An empty figure, of inches."""
    from matplotlib.figure import Figure  # needed for drawing only

    return Figure(figsize=(width, height), layout="constrained")


def plain(axes: Axes, *sides: str) -> None:
    """Leave only these sides of the frame, thin and grey, and text in grey."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in sides)
        spine.set_color(GREY)
    axes.tick_params(color=GREY, labelcolor=GREY)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG with a palette."""
    path.parent.mkdir(parents=True, exist_ok=True)
    from PIL import Image  # comes with matplotlib

    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=DPI, facecolor="white")
    few = Image.open(whole).convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)
    few.save(path, format="PNG", optimize=True)
