"""Is the best learning rate of a narrow model also the best of a wide one?

For every width and every power of two in a range, one model is trained from the same seed on the
same text, in each parametrisation. The architecture is one: byte embedding, pre-norm layers of
rotary causal attention and SwiGLU of four times the width, a norm, a readout; heads have 32
features at every width. Three ways to scale and to train it:

    standard   weights from N(0, 0.02), residual branches added without factors, logits / sqrt(d),
               AdamW with one learning rate for all
    u-mup      `float8.unit_scaling`'s modules and AdamW (arXiv 2407.17465, tables 2 and 3)
    mus        the same with norms at the ends of branches and square-root softmax attention, as
               muS has them (arXiv 2502.05967); learning rates and residual weights stay u-muP's

Linear layers multiply in float32, or in float8 by the recipe that suits the parametrisation:
`unit`, which has no scales, for unit-scaled models, and `tensorwise` for the standard one. The
head keeps float32. The answer is where the lowest held-out loss lies, by width; of several seeds,
the lowest mean:

    optimum   the vertex of the parabola in log2(learning rate) through the best point of the grid
              and the two next to it; at an edge of the grid, the edge
    drift     the optimum of the widest model less that of the narrowest, in powers of two
    spread    the greatest distance between the optima of any two widths
    room      how many powers of two of the grid lose less than 3 % to the best

With u-muP the drift is about 0; with the standard parametrisation theory says -log2 of the ratio
of widths (arXiv 2203.03466). The target, a spread of at most one power of two, is not met by optima
at an edge of the grid: where they are is then not known.

After training, one batch tells how stable a model is: ``stream_std`` is the standard deviation of
the residual stream behind every layer, ``operand_max`` the largest magnitude that a linear layer
reads (E4M3, without a scale, ends at 448), ``operand_std`` the least and the greatest of their
deviations.

    python benchmarks/bench_mup_transfer.py -o mup_transfer.json
    python benchmarks/bench_mup_transfer.py --variant u-mup mus --widths 64 --octaves -3 6
    python benchmarks/bench_mup_transfer.py --quick
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

import float8.unit_scaling as uu
from benchmarks.measuring import harness, picture, report
from benchmarks.measuring.harness import Row
from benchmarks.models import text as texts
from benchmarks.models.transformer import GPT, Sizes, UnitGPT
from benchmarks.quality.contenders import convert
from benchmarks.quality.intervals import grouped
from benchmarks.quality.study import Study
from benchmarks.quality.training import BETAS, steps_of
from float8.config import RECIPES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (picture.ORANGE, picture.BLUE, picture.BLACK, picture.GREEN, picture.PURPLE)
COLUMNS = report.columns(
    "layer width parameters log2_lr loss seconds optimum room last_std operand_max error",
    layer="parametrisation", log2_lr="log2(lr)", seconds="s", last_std="std of the stream",
    operand_max="max |operand|",
)  # fmt: skip
MAX_SPREAD = 1.0  # octaves
HEAD = 32  # features of a head
ROOM = 1.03  # a loss below that times the best one is near it


class Parametrisation(NamedTuple):
    """A model, its recipe of float8, and where to look for its learning rate."""

    model: Callable[[Sizes], nn.Module]
    recipe: str
    octaves: range  # powers of two


PARAMETRISATIONS = {
    "standard": Parametrisation(GPT, "tensorwise", range(-11, -5)),
    "u-mup": Parametrisation(UnitGPT, "unit", range(-3, 3)),
    "mus": Parametrisation(
        partial(UnitGPT, norm="res-post", attention="sqrt_softmax"), "unit", range(-3, 3)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What decides a training.

    Args:
        parametrisation: of the model.
        log2_lr: of the peak learning rate.
        format: of the products.
        width: of the model, whose feed-forward part is four times as wide.
        val_batches: held-out batches that the final loss is the mean of.
    """

    parametrisation: str
    log2_lr: int
    format: str
    width: int
    seed: int
    steps: int
    batch: int
    context: int
    layers: int
    val_batches: int

    def new_model(self) -> nn.Module:
        """The model before the first step.

        Raises:
            ValueError: the width is no multiple of `HEAD`, or a batch none of 16.
        """
        if self.width % HEAD or self.batch * self.context % 16:
            raise ValueError(
                f"a width must be a multiple of {HEAD}, the size of a head, and batch x context of "
                f"16, which float8 products need: {self.width}, {self.batch}, {self.context}"
            )
        torch.manual_seed(self.seed)
        heads, wide = self.width // HEAD, 4 * self.width
        sizes = Sizes(self.layers, self.width, heads, self.context, feed_forward=wide)
        return PARAMETRISATIONS[self.parametrisation].model(sizes)


def train(run: Run, data: Path | None, device: str) -> Row:
    """Train one model with one learning rate; one whose loss is not a number stops at once."""
    recipe, name = PARAMETRISATIONS[run.parametrisation].recipe, run.parametrisation
    model = run.new_model().to(device)
    if run.format == "float8":
        convert(model, RECIPES[recipe])
        name += f" {recipe}"
    row: Row = {"layer": name, "width": run.width, "log2_lr": run.log2_lr}
    row["parameters"] = sum(p.numel() for p in model.parameters())
    text = texts.load(data, standard_library=True)
    size = {"batch": run.batch, "context": run.context}
    batches = (text.batch(step, seed=run.seed, **size) for step in range(run.steps))
    moved = ((tokens.to(device), targets.to(device)) for tokens, targets in batches)
    start = time.perf_counter()
    made = steps_of(model, adamw(model, 2.0**run.log2_lr), warm_up_and_cosine(run.steps), moved)
    losses = list(itertools.takewhile(math.isfinite, map(float, made)))
    row |= {"seconds": time.perf_counter() - start, "steps_taken": len(losses)}
    held_out = [
        (tokens.to(device), targets.to(device))
        for tokens, targets in text.held_out_batches(run.val_batches, **size)
    ]
    with torch.no_grad():
        loss = statistics.fmean(model(*pair).item() for pair in held_out)
    if len(losses) < run.steps or not math.isfinite(loss):
        return {**row, "error": "diverged: the loss is not a number", "refused": False}
    return {**row, "loss": loss, "train_loss": losses, **scales(model, *held_out[0])}


def warm_up_and_cosine(steps: int) -> Iterator[float]:
    """A linear rise in a tenth of the steps, half a cosine to a tenth (arXiv 2302.13971, 2.3)."""
    warm_up = max(1, round(steps * 0.1))
    for step in range(steps):
        progress = max(0, step - warm_up) / max(1, steps - warm_up)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        yield min(1.0, (step + 1) / warm_up) * (0.1 + 0.9 * cosine)


def adamw(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW without decay; for a unit-scaled model with u-muP's learning rates."""
    if isinstance(model, UnitGPT):
        return uu.optim.AdamW(model.parameters(), learning_rate, BETAS)
    return torch.optim.AdamW(model.parameters(), learning_rate, BETAS, weight_decay=0.0)


@torch.no_grad()
def scales(model: nn.Module, tokens: Tensor, targets: Tensor) -> Row:
    """The scales of activations in one forward pass."""
    stream: list[float] = []
    operands: list[Tensor] = []
    layers = model.get_submodule("layers" if isinstance(model, UnitGPT) else "blocks")
    handles = [
        layer.register_forward_hook(lambda _, __, out: stream.append(out.float().std().item()))
        for layer in layers.children()
    ]
    handles += [
        linear.register_forward_pre_hook(lambda _, args: operands.append(args[0].float()))
        for linear in layers.modules()
        if isinstance(linear, nn.Linear)
    ]
    model(tokens, targets)
    for handle in handles:
        handle.remove()
    stds = [operand.std().item() for operand in operands]
    return {
        "stream_std": stream,
        "operand_max": max(operand.abs().max().item() for operand in operands),
        "operand_std": [min(stds), max(stds)],
        "last_std": stream[-1],
    }


def model_of(row: Row) -> tuple[str, int]:
    return row["layer"], row["width"]


def curve(rows: Sequence[Row]) -> dict[int, float]:
    """log2(learning rate) -> mean held-out loss, of one model, less what diverged with any seed."""
    losses = {
        octave: [row.get("loss") for row in own]
        for octave, own in sorted(grouped(rows, lambda row: int(row["log2_lr"])).items())
    }
    return {
        octave: statistics.fmean(loss for loss in own if loss is not None)
        for octave, own in losses.items()
        if None not in own
    }


def optimum(curve: dict[int, float]) -> float:
    """Where a curve, log2(learning rate) -> loss, is lowest."""
    best = min(curve, key=curve.__getitem__)
    if best - 1 not in curve or best + 1 not in curve:
        return float(best)
    left, middle, right = (curve[best + step] for step in (-1, 0, 1))
    bend = left - 2 * middle + right
    return best + (left - right) / (2 * bend) if bend > 0 else float(best)


def summary(rows: Sequence[Row]) -> tuple[Sequence[Row], list[Row]]:
    """The rows, the best of every model with its optimum, and how far optima move with the width.

    They may move by an octave, but for the standard model.
    """
    best: list[Row] = []
    for own in grouped(rows, model_of).values():
        for row in own:
            for key in ("optimum", "at_edge", "room"):  # of earlier, when rows lacked
                row.pop(key, None)
        if losses := curve(own):
            lowest = min(losses, key=losses.__getitem__)
            tried = [row["log2_lr"] for row in own]
            row = next(row for row in own if row["log2_lr"] == lowest)
            row["optimum"] = optimum(losses)
            row["at_edge"] = lowest in (min(tried), max(tried))
            row["room"] = sum(loss < ROOM * min(losses.values()) for loss in losses.values())
            best.append(row)
    targets: list[Row] = []
    for name, own in grouped(best, lambda row: str(row["layer"])).items():
        own.sort(key=lambda row: row["width"])
        optima = [row["optimum"] for row in own]
        widths = f"width {own[0]['width']} -> {own[-1]['width']}"
        target: Row = {"layer": name, "against": widths}
        targets.append({**target, "mode": "drift", "measured": optima[-1] - optima[0]})
        target |= {"mode": "spread", "measured": (spread := max(optima) - min(optima))}
        if not name.startswith("standard") and len(own) > 1:
            known = not any(row["at_edge"] for row in own)
            target |= {"target": MAX_SPREAD, "met": known and spread <= MAX_SPREAD}
        targets.append(target)
    return rows, targets


def draw(rows: Sequence[Row]) -> Figure:
    """Held-out loss against learning rate: a panel per parametrisation, a line per width.

    Dotted lines mark the optima.
    """
    by_name = grouped(rows, lambda row: str(row["layer"]))
    figure = picture.new(max(4, 2.7 * len(by_name)), 3.4)
    grid = figure.subplots(1, len(by_name), sharey=True, squeeze=False)
    for axes, (name, of_name) in zip(grid[0], by_name.items(), strict=True):
        picture.plain(axes, "left", "bottom")
        by_width = sorted(grouped(of_name, lambda row: int(row["width"])).items())
        for (width, own), colour in zip(by_width, itertools.cycle(COLOURS)):
            if losses := curve(own):
                style: Any = {"marker": "o", "markersize": 5, "linewidth": 1.8, "color": colour}
                axes.plot(list(losses), list(losses.values()), label=f"width {width}", **style)
                axes.axvline(optimum(losses), color=colour, linewidth=1.2, linestyle=":")
        axes.set_title(name, loc="left", fontweight="bold", pad=10)
        axes.set_xlabel("log2(learning rate)", color=picture.GREY)
    grid[0][0].set_ylabel("held-out loss", color=picture.GREY)
    grid[0][0].legend(frameon=False)
    return figure


def runs_of(options: argparse.Namespace) -> list[Run]:
    """Every learning rate of every width, format and parametrisation, a seed after the other."""
    low, high = options.octaves or (0, 0)
    return [
        Run(
            parametrisation=name, format=fmt, width=width, log2_lr=octave, seed=seed,
            **STUDY.sizes(options),
        )
        for seed, name, fmt, width in itertools.product(
            options.seeds, options.variant, options.formats, options.widths
        )
        for octave in (
            range(low, high + 1) if options.octaves else PARAMETRISATIONS[name].octaves
        )
    ]  # fmt: skip


class _Study(Study):
    def more_options(self, parser: argparse.ArgumentParser) -> None:
        known, default = list(PARAMETRISATIONS), ["standard", "u-mup"]
        parser.add_argument("--variant", nargs="+", choices=known, default=default)
        known = ["float32", "float8"]
        parser.add_argument("--formats", nargs="+", choices=known, default=known[:1])
        parser.add_argument("--widths", nargs="+", type=harness.positive, default=[64, 128, 256])
        text = "log2(learning rate), each"
        parser.add_argument("--octaves", nargs=2, type=int, metavar=("LOW", "HIGH"), help=text)


NUMBERS = {
    "steps": (150, "of a run"),
    "batch": (8, "windows of text in a step"),
    "context": (64, "bytes of a window"),
    "layers": (2, "transformer layers"),
    "val_batches": (32, "held-out batches that the final loss is the mean of"),
}
QUICK = {
    "widths": [32, 64], "steps": 2, "batch": 2, "context": 16, "layers": 1, "val_batches": 1,
}  # fmt: skip
STUDY = _Study(
    "bench_mup_transfer", __doc__, COLUMNS, runs_of, train, summary, NUMBERS, QUICK, 1,
    {},
)  # fmt: skip
main = STUDY.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
