"""The demo's picture: loss curves, and how far each recipe is from its base.

    left    training loss, smoothed, over the steps
    right   held-out loss over that of the base, in per cent: bf16, for `unit` unit_bf16

A line is the mean over the seeds; the band around it reaches from the best seed to the worst. A run
that ends far above the others, as the naive cast does, leaves the panel. `draw` takes the ``runs``
of a demo.json. From the command line, it draws a file again:

    python -m scripts.training.curves out/demo/demo.json -o demo.png

The colours are Okabe and Ito's, which readers with any form of colour blindness can tell apart
(https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = dict[str, Any]
Seeds = list[list[float]]  # a list of values of each seed
Lines = dict[str, tuple[list[int], Seeds]]  # name of a run -> steps, values

SMOOTHING = 0.8  # of the training losses in the picture; the JSON has them as they are
GREY, PALE, SKY = "#5f6368", "#e3e5e8", "#56B4E9"
COLOURS = {
    "bf16": "#000000", "bf16_rounded": "#8c8c8c", "tensorwise": "#0072B2",
    "delayed": "#E69F00", "rowwise": "#009E73", "naive": "#D55E00",
    "unit_bf16": GREY, "unit": "#CC79A7",
}  # fmt: skip
PALETTE = 96  # colours of the PNG; a third of the bytes of full colour, with no visible difference
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
    from matplotlib.figure import Figure  # not pyplot, which may need a display

    best = min((loss for run in runs if math.isfinite(loss := run["final_val_loss"])), default=0.0)
    near = {name_of(run) for run in runs if run["final_val_loss"] <= FAR * best}
    losses, gaps = losses_of(runs), gaps_of(runs)
    figure = Figure(figsize=(8.0 if gaps else 4.5, 3.9), layout="constrained")
    panels = figure.subplots(1, 2 if gaps else 1, squeeze=False)[0]
    _panel(panels[0], losses, near, "Training loss, nats per byte, smoothed", SETTLED)
    if gaps:
        _panel(panels[1], gaps, near, "Held-out loss against the base, per cent", 0.0)
        panels[1].axhline(0, color=GREY, linewidth=1)
    return figure


def _panel(axes: Axes, lines: Lines, near: set[str], title: str, settled: float) -> None:
    """Draw lines; the axis shows those in ``near``, from the part ``settled`` of the steps on."""
    free = [c for c in (SKY, *COLOURS.values()) if c not in {COLOURS.get(n) for n in lines}]
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
    axes.set_xlabel("step", color=GREY)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.legend(fontsize=8, frameon=False)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
    axes.tick_params(color=GREY, labelcolor=GREY)


def save(runs: Sequence[Run], path: Path) -> None:
    """Draw runs into a PNG; 8 inches are 1600 pixels, shown at 900 and sharp on a dense screen."""
    from PIL import Image  # comes with matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    whole = io.BytesIO()
    draw(runs).savefig(whole, format="png", dpi=200, facecolor="white")
    few = Image.open(whole).convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)
    few.save(path, format="PNG", optimize=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="a demo.json")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the picture, a PNG")
    options = parser.parse_args(argv)
    save(json.loads(options.file.read_text(encoding="utf-8"))["runs"], options.output)


if __name__ == "__main__":
    main()
