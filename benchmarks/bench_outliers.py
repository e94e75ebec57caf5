"""At which size does an outlier of SwiGLU break a recipe, and where?

In long trainings the gate's and the up projection's rows of a channel align, and its values outgrow
all others of ``down``'s input (arXiv 2409.12517). A small GPT gets such a channel, and the weights
around it are changed so that the model still computes the same (`quality/outliers.py`): in bf16 the
size of the outlier makes no difference. Every contender starts from the same weights
(`quality/outlier_run.py`), is evaluated right after its conversion, and trained on beside bf16.

    --outliers often    a channel that answers to every line's end
                        Sizes from 1 to 2^20; trained on from some of them
    --outliers rare     a channel that answers to ``?`` and a few tokens that are like it: the
                        outlier is large in few batches. A delayed scale saturates when it comes,
                        and for as long as the history remembers it, the rest is flushed

The size of an outlier is its largest value by the largest of the rest of the tensor.

    python benchmarks/bench_outliers.py --jobs 2 -o outliers.json
    python benchmarks/bench_outliers.py --quick
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring.harness import Row
from benchmarks.quality import study
from benchmarks.quality.contenders import BASE, NOISE
from benchmarks.quality.outlier_run import OutlierRun, train
from benchmarks.quality.paired import difference, with_loss
from scripts.training import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EACH = (
    *(BASE, NOISE, "tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "down in bf16"),
    *("smooth tensorwise", "smooth delayed"),
)
OF_DELAYED = ("history 1", "history 1024", "margin 4")
CONTENDERS = (*EACH, *OF_DELAYED)


@dataclass(frozen=True)
class Outlier:
    """A kind of outlier: `OutlierRun`'s fields of these names, and what it is measured in."""

    byte: int
    exponents: tuple[int, ...]
    trained: tuple[int, ...]
    every: int
    contenders: tuple[str, ...]


OUTLIERS = {
    "often": Outlier(
        byte=ord("\n"),
        exponents=(0, 8, 10, 12, 14, 16, 18, 20),
        trained=(8, 12, 16),
        every=10,
        contenders=EACH,
    ),
    "rare": Outlier(
        byte=ord("?"),
        exponents=(12, 16),
        trained=(12, 16),
        every=5,
        contenders=(BASE, NOISE, "tensorwise", "delayed", *OF_DELAYED, "smooth delayed"),
    ),
}
COLOURS = {
    "tensorwise": picture.BLUE,
    "delayed": picture.ORANGE,
    "rowwise": picture.GREEN,
    "blockwise": picture.PURPLE,
    "mxfp8": picture.SKY,
    "down in bf16": picture.GREY,
}
LINEAR = 0.1  # per cent: the axis is linear below
PANELS = {"converted_gap": "right after conversion", "trained_gap": "trained on"}
QUICK = {"steps": 2, "base_steps": 2, "settling_steps": 2, "seeds": [0]}
QUICK_SIZES = {"width": 32, "layers": 1, "batch": 2, "context": 16, "held_out": 256}
LOSSES: dict[str, Callable[[Row], float | None]] = {
    "converted": lambda row: row["converted"],
    "trained": lambda row: row.get("loss"),
    "steps": lambda row: statistics.fmean(row["train_loss"]) if "loss" in row else None,
}
COLUMNS = {
    "outlier": ("outlier", ""),
    "layer": ("contender", ""),
    "size": ("size", ""),
    "seeds": ("seeds", ".0f"),
    "converted": ("right after conversion", ""),
    "trained": ("trained on", ""),
    "steps": ("mean of its steps", ""),
    "worst": ("worst step", "+.1f"),
    "flushed": ("input flushed", ".1%"),
    "saturates": ("steps that saturate", ".0%"),
    "sqnr": ("SQNR", ".1f"),
    "diverged": ("diverged", ".0f"),
}


def runs(options: argparse.Namespace) -> list[OutlierRun]:
    """Every contender for every kind of outlier and seed, a seed after the other."""
    return [
        OutlierRun(
            contender=name,
            seed=seed,
            byte=outlier.byte,
            exponents=outlier.exponents,
            trained=outlier.trained,
            every=outlier.every,
            steps=options.steps,
            base_steps=options.base_steps,
            settling_steps=options.settling_steps,
            **(QUICK_SIZES if options.quick else {}),
        )
        for seed in options.seeds
        for outlier in map(OUTLIERS.__getitem__, options.outliers)
        for name in outlier.contenders
        if name in options.contenders
    ]


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line per outlier, contender and size: paired differences to bf16, and the casts."""
    found: list[Row] = []
    for kind, outlier in OUTLIERS.items():
        of_kind = [row for row in rows if row["run"]["byte"] == outlier.byte]
        bases = [row for row in of_kind if row["run"]["contender"] == BASE]
        for name in outlier.contenders:
            own = [row for row in of_kind if row["run"]["contender"] == name]
            for exponent in own[0]["run"]["exponents"] if own and name != BASE else ():
                line = {"outlier": kind, "layer": name, "size": f"2^{exponent}"}
                found.append(line | _line(_at(own, exponent), _at(bases, exponent)))
    return found


def _at(rows: Sequence[Row], exponent: int) -> list[Row]:
    """The rows of runs at one size of the outlier."""
    return [
        {"run": row["run"]} | size
        for row in rows
        for size in row["sizes"]
        if size["exponent"] == exponent
    ]


def _line(own: Sequence[Row], bases: Sequence[Row]) -> Row:
    line: Row = {"seeds": len(own), "diverged": sum("error" in row for row in own)}
    for key, loss_of in LOSSES.items():
        gap = difference(with_loss(own, loss_of), with_loss(bases, loss_of))
        if gap.values:
            line |= {key: str(gap), f"{key}_gap": gap.mean}
    curves = {row["run"]["seed"]: row.get("train_loss", []) for row in bases}
    steps = [
        100 * (loss / base - 1)
        for row in own
        for loss, base in zip(
            row.get("train_loss", []), curves.get(row["run"]["seed"], []), strict=False
        )
    ]
    if steps:
        line["worst"] = max(steps)
    return line | _casts(own)


def _casts(own: Sequence[Row]) -> Row:
    """Means over seeds of what the inspections saw of the input of ``down``."""
    casts = [
        cast
        for row in own
        for cast in row.get("casts", [])
        if (cast["operand"], cast["gemm"]) == ("input", "output")
    ]
    if not casts:
        return {}
    found = {key: sum(cast[key] for cast in casts) / len(casts) for key in ("flushed", "sqnr")}
    share = sum(cast["saturates"] for cast in casts) / sum(cast["inspected"] for cast in casts)
    return found | {"saturates": share}


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


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The lines; there are no targets."""
    return lines(rows), []


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = study.parser(__doc__, seeds=3)
    parser.add_argument("--outliers", nargs="+", choices=OUTLIERS, default=list(OUTLIERS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    study.add_numbers(
        parser,
        steps=(100, "after the conversion"),
        base_steps=(400, "before the channel is planted"),
        settling_steps=(100, "between planting and conversion"),
    )
    return study.parse(parser, argv, QUICK)


def main(argv: Sequence[str]) -> int:
    """Make the runs that lack, and print the differences to bf16."""
    options = parse(argv)
    with tempfile.TemporaryDirectory() as bases:
        make = partial(train, bases=Path(bases), data=options.data, device=options.device)
        study.make("bench_outliers", argv, options, runs(options), make, summary, COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
