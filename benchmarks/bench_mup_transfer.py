"""Is the best learning rate of a narrow model also the best of a wide one?

For every width and every power of two in a range, one model is trained from the same seed on the
same text (`training.py`), in each parametrisation of `decoders.py`. Its linear layers multiply in
float32, or in float8 by the recipe that suits the parametrisation: `unit`, which has no scales, for
unit-scaled models, and `tensorwise` for the standard one. The head keeps float32. The answer is
where the lowest held-out loss lies, by width; of several seeds, the lowest mean:

    optimum   the vertex of the parabola in log2(learning rate) through the best point of the grid
              and the two next to it; at an edge of the grid, the edge
    drift     the optimum of the widest model less that of the narrowest, in powers of two
    spread    the greatest distance between the optima of any two widths
    room      how many powers of two of the grid lose less than 3 % to the best

With u-muP the drift is about 0; with the standard parametrisation theory says -log2 of the ratio
of widths (arXiv 2203.03466). The target, a spread of at most one power of two, is not met by optima
at an edge of the grid: where they are is then not known.

`stability.py` reports the scale of every model's activations after training. The file named by -o
is written after every run, and a call with the same file makes only the runs that it lacks
(`quality/study.py`).

    python benchmarks/bench_mup_transfer.py -o mup_transfer.json --plot mup_transfer.png
    python benchmarks/bench_mup_transfer.py --formats float32 float8 -o mup_transfer.json
    python benchmarks/bench_mup_transfer.py --variant u-mup mus --widths 64 --octaves -3 6
    python benchmarks/bench_mup_transfer.py --quick
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import harness, stability
from benchmarks.measuring.harness import Row
from benchmarks.models import decoders, training
from benchmarks.models.decoders import FORMATS, PARAMETRISATIONS
from benchmarks.quality import study
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
    "loss": ("held-out loss", ".4f"),
    "seconds": ("s", ".0f"),
    "optimum": ("optimum", ".1f"),
    "room": ("room", ".0f"),
    "last_std": ("std of the stream", ".2f"),
    "operand_max": ("max |operand|", ".0f"),
    "error": ("not run", ".80"),
}
MAX_SPREAD = 1.0  # octaves
ROOM = 1.03  # a loss below that times the best one is near it
QUICK = {"widths": [32, 64], "steps": 2, "batch": 2, "context": 16, "layers": 1, "val_batches": 1}


@dataclass(frozen=True, kw_only=True)
class Run(training.Run):
    """What decides a training."""

    parametrisation: str
    format: str
    width: int
    log2_lr: int


def train(run: Run, data: Path | None, device: str) -> Row:
    """Train one model with one learning rate."""
    text = corpus.load(data)
    parametrisation = PARAMETRISATIONS[run.parametrisation]
    torch.manual_seed(run.seed)
    model = parametrisation.model(run.width, run.layers, run.context).to(device)
    model = parametrisation.in_format(model, run.format)
    loss_of = parametrisation.loss(model)
    result = training.train(
        loss_of,
        parametrisation.optimizer(model, 2.0**run.log2_lr),
        training.train_batches(text, run, device),
        run.steps,
        training.val_batches(text, run, device),
    )
    in_float8 = "" if run.format == "float32" else f" {parametrisation.recipe}"
    row: Row = {
        "layer": run.parametrisation + in_float8,
        "width": run.width,
        "parameters": sum(p.numel() for p in model.parameters()),
        "log2_lr": run.log2_lr,
        **result.row(),
    }
    if result.val_loss is not None:
        batch = next(iter(training.val_batches(text, run, device)))
        row |= stability.measure(loss_of, parametrisation.layers(model), batch)
        row["last_std"] = row["stream_std"][-1]
    return row


def runs(options: argparse.Namespace) -> list[Run]:
    """Every learning rate of every width, format and parametrisation, a seed after the other."""
    return [
        Run(parametrisation=name, format=fmt, width=width, log2_lr=octave, **sizes)
        for sizes in ({"seed": seed, **options.sizes} for seed in options.seeds)
        for name, fmt, width in itertools.product(options.variant, options.formats, options.widths)
        for octave in octaves_of(name, options)
    ]


def curve(rows: Sequence[Row], name: str, width: int) -> dict[int, float]:
    """log2(learning rate) -> mean held-out loss, of one model, less what diverged with any seed."""
    losses: dict[int, list[float | None]] = {}
    for row in rows:
        if (row["layer"], row["width"]) == (name, width):
            losses.setdefault(row["log2_lr"], []).append(training.held_out(row))
    known = {octave: [loss for loss in own if loss is not None] for octave, own in losses.items()}
    return {
        octave: statistics.fmean(own)
        for octave, own in sorted(known.items())
        if len(own) == len(losses[octave])
    }


def optimum(curve: dict[int, float]) -> float:
    """Where a curve, log2(learning rate) -> loss, is lowest."""
    best = min(curve, key=curve.__getitem__)
    if best - 1 not in curve or best + 1 not in curve:
        return float(best)
    left, middle, right = (curve[best + step] for step in (-1, 0, 1))
    bend = left - 2 * middle + right
    return best + (left - right) / (2 * bend) if bend > 0 else float(best)


def note_optima(rows: Sequence[Row]) -> None:
    """Write optimum, room and whether it is at an edge into a row of every model's best rate."""
    noted: set[tuple[str, int]] = set()
    for row in rows:
        for key in ("optimum", "at_edge", "room"):  # of earlier, when rows lacked
            row.pop(key, None)
        losses = curve(rows, row["layer"], row["width"])
        model = row["layer"], row["width"]
        best = min(losses, key=losses.__getitem__, default=None)
        if row["log2_lr"] == best and model not in noted:
            noted.add(model)
            tried = [r["log2_lr"] for r in rows if (r["layer"], r["width"]) == model]
            row["optimum"] = optimum(losses)
            row["at_edge"] = best in (min(tried), max(tried))
            row["room"] = sum(loss < ROOM * min(losses.values()) for loss in losses.values())


def drifts(rows: Sequence[Row]) -> list[Row]:
    """How far the optimum moves with the width; an octave at most, but for the standard model."""
    best = [row for row in rows if "optimum" in row]
    found: list[Row] = []
    for name in dict.fromkeys(row["layer"] for row in best):
        ordered = sorted((row for row in best if row["layer"] == name), key=lambda r: r["width"])
        optima = [row["optimum"] for row in ordered]
        drift, spread = optima[-1] - optima[0], max(optima) - min(optima)
        widths = f"width {ordered[0]['width']} -> {ordered[-1]['width']}"
        found.append({"layer": name, "mode": "drift", "against": widths, "measured": drift})
        row: Row = {"layer": name, "mode": "spread", "against": widths, "measured": spread}
        if not name.startswith("standard") and len(ordered) > 1:
            known = not any(row["at_edge"] for row in ordered)
            row |= {"target": MAX_SPREAD, "met": known and spread <= MAX_SPREAD}
        found.append(row)
    return found


def draw(rows: Sequence[Row]) -> Figure:
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


def draw_panel(axes: Axes, rows: Sequence[Row], name: str) -> None:
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
    parser = study.parser(__doc__, seeds=1)
    study.add_numbers(parser, **training.SIZES)
    parser.add_argument(
        "--variant", nargs="+", choices=list(PARAMETRISATIONS), default=["standard", "u-mup"]
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["float32"])
    parser.add_argument("--widths", nargs="+", type=harness.positive, default=[64, 128, 256])
    parser.add_argument(
        "--octaves", nargs=2, type=int, metavar=("LOW", "HIGH"), help="log2(learning rate), each"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture there")
    options = study.parse(parser, argv, QUICK)
    decoders.check_widths(parser, "--widths", options.widths)
    if options.octaves and options.octaves[0] > options.octaves[1]:
        parser.error(f"--octaves are LOW and HIGH, not {options.octaves}")
    if "float8" in options.formats and options.batch * options.context % 16:
        parser.error("--batch x --context must be a multiple of 16, which float8 products need")
    options.sizes = {name: getattr(options, name) for name in training.SIZES}
    return options


def octaves_of(name: str, options: argparse.Namespace) -> range:
    """The learning rates of a parametrisation, as powers of two."""
    if options.octaves is None:
        return PARAMETRISATIONS[name].octaves
    low, high = options.octaves
    return range(low, high + 1)


def summary(rows: Sequence[Row]) -> tuple[Sequence[Row], list[Row]]:
    """The rows with their optima, and how far these move."""
    note_optima(rows)
    return rows, drifts(rows)


def main(argv: Sequence[str]) -> int:
    """Make the runs that lack, report the optima; 1 if a model has no optimum."""
    options = parse(argv)
    training.load(options)  # ends the program where there is no text
    make = partial(train, data=options.data, device=options.device)
    rows = study.make("bench_mup_transfer", argv, options, runs(options), make, summary, COLUMNS)
    if options.plot:
        picture.save(draw(rows), options.plot)
    trained = {(row["layer"], row["width"]) for row in rows if "optimum" in row}
    tried = len(options.variant) * len(options.formats) * len(options.widths)
    return int(len(trained) < tried)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
