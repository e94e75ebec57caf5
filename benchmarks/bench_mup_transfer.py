"""Is the best learning rate of a narrow model also the best of a wide one?

For every width and every power of two in a range, one model is trained from the same seed on the
same text (`training.py`), in each parametrisation of `decoders.py`. The answer is where the lowest
held-out loss lies, by width:

    optimum   the vertex of the parabola in log2(learning rate) through the best point of the grid
              and the two next to it; at an edge of the grid, the edge
    drift     the optimum of the widest model less that of the narrowest, in powers of two
    spread    the greatest distance between the optima of any two widths
    room      how many powers of two of the grid lose less than 3 % to the best

With u-muP the drift is about 0; with the standard parametrisation theory says -log2 of the ratio
of widths (arXiv 2203.03466). The target, a spread of at most one power of two, is not met by optima
at an edge of the grid: where they are is then not known.

`stability.py` reports the scale of every model's activations after training.

    python benchmarks/bench_mup_transfer.py -o mup_transfer.json --plot mup_transfer.png
    python benchmarks/bench_mup_transfer.py --variant u-mup mus --widths 64 --octaves -3 6
    python benchmarks/bench_mup_transfer.py --quick
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import harness, report, stability
from benchmarks.measuring.optimum import ROOM, optimum
from benchmarks.models import decoders, training
from benchmarks.models.decoders import PARAMETRISATIONS
from scripts.training import corpus, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (picture.ORANGE, picture.BLUE, picture.BLACK, picture.GREEN, picture.PURPLE)
COLUMNS = {
    "layer": ("parametrisation", ""),
    "width": ("width", ".0f"),
    "parameters": ("parameters", ",.0f"),
    "log2_lr": ("log2(lr)", ".0f"),
    "val_loss": ("val. loss", ".4f"),
    "seconds": ("s", ".0f"),
    "optimum": ("optimum", ".1f"),
    "room": ("room", ".0f"),
    "last_std": ("std of the stream", ".2f"),
    "operand_max": ("max |operand|", ".0f"),
    "error": ("not run", ".80"),
}
MAX_SPREAD = 1.0  # octaves
QUICK = {"widths": [32, 64], "steps": 2, "batch": 2, "context": 16, "layers": 1, "val_batches": 1}


def run(
    name: str, width: int, octave: int, text: corpus.Corpus, options: argparse.Namespace
) -> harness.Row:
    """Train one model with one learning rate."""
    parametrisation = PARAMETRISATIONS[name]
    torch.manual_seed(options.seed)
    model = parametrisation.model(width, options.layers, options.context).to(options.device)
    loss_of = parametrisation.loss(model)
    result = training.train(
        loss_of,
        parametrisation.optimizer(model, 2.0**octave),
        training.train_batches(text, options),
        options.steps,
        training.val_batches(text, options),
    )
    row: harness.Row = {
        "layer": name,
        "width": width,
        "parameters": sum(p.numel() for p in model.parameters()),
        "log2_lr": octave,
        **result.row(),
    }
    if result.val_loss is not None:
        batch = next(iter(training.val_batches(text, options)))
        row |= stability.measure(loss_of, parametrisation.layers(model), batch)
        row["last_std"] = row["stream_std"][-1]
    return row


def curve(rows: Sequence[harness.Row], name: str, width: int) -> dict[int, float]:
    """log2(learning rate) -> held-out loss, of one model, less what diverged."""
    mine = (row for row in rows if (row["layer"], row["width"]) == (name, width))
    return {row["log2_lr"]: row["val_loss"] for row in mine if "val_loss" in row}


def note_optima(rows: Sequence[harness.Row]) -> None:
    """Write optimum, room and whether it is at an edge into the best row of every model."""
    for row in rows:
        losses = curve(rows, row["layer"], row["width"])
        if losses and row["log2_lr"] == min(losses, key=losses.__getitem__):
            same = ("layer", "width")
            tried = [r["log2_lr"] for r in rows if all(r[key] == row[key] for key in same)]
            row["optimum"] = optimum(losses)
            row["at_edge"] = row["log2_lr"] in (min(tried), max(tried))
            row["room"] = sum(loss < ROOM * min(losses.values()) for loss in losses.values())


def drifts(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """How far the optimum moves with the width; by an octave at most, except in `standard`."""
    best = [row for row in rows if "optimum" in row]
    found: list[harness.Row] = []
    for name in dict.fromkeys(row["layer"] for row in best):
        ordered = sorted((row for row in best if row["layer"] == name), key=lambda r: r["width"])
        optima = [row["optimum"] for row in ordered]
        drift, spread = optima[-1] - optima[0], max(optima) - min(optima)
        widths = f"width {ordered[0]['width']} -> {ordered[-1]['width']}"
        found.append({"layer": name, "mode": "drift", "against": widths, "measured": drift})
        row: harness.Row = {"layer": name, "mode": "spread", "against": widths, "measured": spread}
        if name != "standard" and len(ordered) > 1:
            known = not any(row["at_edge"] for row in ordered)
            row |= {"target": MAX_SPREAD, "met": known and spread <= MAX_SPREAD}
        found.append(row)
    return found


def draw(rows: Sequence[harness.Row]) -> Figure:
    """Held-out loss against learning rate: a panel per parametrisation, a line per width."""
    from matplotlib.figure import Figure  # needed for drawing only

    names = list(dict.fromkeys(row["layer"] for row in rows))
    figure = Figure(figsize=(max(4, 2.7 * len(names)), 3.4), layout="constrained")
    grid = figure.subplots(1, max(1, len(names)), sharey=True, squeeze=False)
    for axes, name in zip(grid[0], names, strict=False):
        draw_panel(axes, rows, name)
    grid[0][0].set_ylabel("held-out loss", color=picture.GREY)
    grid[0][0].legend(frameon=False)
    return figure


def draw_panel(axes: Axes, rows: Sequence[harness.Row], name: str) -> None:
    """Dotted lines mark the optima."""
    picture.plain(axes, "left", "bottom")
    widths = sorted({row["width"] for row in rows if row["layer"] == name})
    for width, colour in zip(widths, itertools.cycle(COLOURS)):
        losses = curve(rows, name, width)
        if not losses:
            continue
        style: Any = {"marker": "o", "markersize": 5, "linewidth": 1.8, "color": colour}
        axes.plot(list(losses), list(losses.values()), label=f"width {width}", **style)
        axes.axvline(optimum(losses), color=colour, linewidth=1.2, linestyle=":")
    axes.set_title(name, loc="left", fontweight="bold", pad=10)
    axes.set_xlabel("log2(learning rate)", color=picture.GREY)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = training.parser(__doc__)
    parser.add_argument(
        "--variant", nargs="+", choices=list(PARAMETRISATIONS), default=["standard", "u-mup"]
    )
    parser.add_argument("--widths", nargs="+", type=harness.positive, default=[64, 128, 256])
    parser.add_argument(
        "--octaves", nargs=2, type=int, metavar=("LOW", "HIGH"), help="log2(learning rate), each"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture there")
    parser.add_argument("--quick", action="store_true", help="two steps: does it run?")
    options = parser.parse_args(argv)
    decoders.check_widths(parser, "--widths", options.widths)
    if options.octaves and options.octaves[0] > options.octaves[1]:
        parser.error(f"--octaves are LOW and HIGH, not {options.octaves}")
    for key, value in QUICK.items() if options.quick else ():
        setattr(options, key, value)
    return options


def octaves_of(name: str, options: argparse.Namespace) -> range:
    """The learning rates of a parametrisation, as powers of two."""
    if options.octaves is None:
        return PARAMETRISATIONS[name].octaves
    low, high = options.octaves
    return range(low, high + 1)


def main(argv: Sequence[str]) -> int:
    """Train all, report the optima; 1 if a model has no optimum."""
    options = parse(argv)
    text = training.load(options)
    jobs = [
        (name, width, octave)
        for name, width in itertools.product(options.variant, options.widths)
        for octave in octaves_of(name, options)
    ]
    rows: list[harness.Row] = []
    try:
        for job in harness.in_time(jobs, options.stop_after):
            rows.append(run(*job, text, options))
    finally:  # an interrupted run keeps what it measured
        note_optima(rows)
        report.publish("bench_mup_transfer", argv, options, rows, COLUMNS, drifts(rows))
        if options.plot:
            picture.save(draw(rows), options.plot)
    trained = {(row["layer"], row["width"]) for row in rows if "optimum" in row}
    return int(len(trained) < len(options.variant) * len(options.widths))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
