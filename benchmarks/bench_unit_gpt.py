"""Does nanoGPT train in float8 without any scale, plain and unit-scaled?

The experiment that introduced unit scaling's library (Graphcore's "Out-of-the-box FP8 training":
https://github.com/graphcore-research/out-of-the-box-fp8-training), with float8 products instead of
simulated ones: nanoGPT at its published shape for characters, trained in

    bf16         the model as it is
    naive        its linear layers in float8 by ``.to(float8)`` alone: E4M3, gradients in E5M2
    unit_bf16    after `unit_scale`, in bf16: what unit scaling alone changes
    unit         after `unit_scale`, by the same casts as ``naive``

All see the same text in the same order (`quality/segments.py`). What counts is the held-out loss
after the last step, in per cent of bf16's and of the same model's in bf16. Target: ``unit`` ends at
most 1 % above each; of several seeds the end of the interval counts. nanoGPT's rate is that of its
config; the unit-scaled model has its own, as in that experiment.

Trainings are made in segments, in turns: the file named by -o has all curves so far, and
checkpoints lie in a folder beside it. Stopped at any time, the same command goes on from there.

    python benchmarks/bench_unit_gpt.py --steps 600 --jobs 2 -o unit_gpt.json --plot unit_gpt.png
    python benchmarks/bench_unit_gpt.py --quick -o /tmp/unit_gpt.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring.harness import Row
from benchmarks.models.nanogpt import CHARACTERS
from benchmarks.quality import study
from benchmarks.quality.contenders import BASE, UNIT_BASE, base_of
from benchmarks.quality.paired import by_contender, difference, ends_below
from benchmarks.quality.segments import Segment, train
from scripts.training import picture
from scripts.training.curves import COLOURS, smooth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "bench_unit_gpt"
CONTENDERS = (BASE, "naive", UNIT_BASE, "unit")
RATE = 1e-3  # nanoGPT's, config/train_shakespeare_char.py
UNIT_RATE = 2**-1  # of 2**-2 to 2**0 the best in bf16: width 128, 16 x 64 bytes, 200 steps, seed 0
LIMIT = 1.0  # per cent
SIZES = ("steps", "layers", "width", "heads", "context", "batch", "held_out")
QUICK = {
    **{"steps": 4, "every": 2, "layers": 1, "width": 32, "heads": 1, "context": 16, "batch": 2},
    "held_out": 256,
}
COLUMNS = {
    "layer": ("contender", ""),
    "steps": ("steps taken", ".0f"),
    "seeds": ("seeds", ".0f"),
    "loss": ("held-out loss", ".4f"),
    "gap": ("gap to its bf16", ""),
    "bf16_gap": ("gap to bf16", ""),
    "diverged": ("diverged", ".0f"),
}


def segments(options: argparse.Namespace, first: int, rows: Sequence[Row]) -> list[Segment]:
    """Those that begin after so many steps, of trainings that have not diverged."""
    diverged = {(r["run"]["contender"], r["run"]["seed"]) for r in rows if "error" in r}
    return [
        Segment(
            contender=name,
            seed=seed,
            learning_rate=options.unit_rate if base_of(name) == UNIT_BASE else RATE,
            first=first,
            until=min(first + options.every, options.steps),
            **options.sizes,
        )
        for seed in options.seeds
        for name in options.contenders
        if (name, seed) not in diverged
    ]


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line per contender: its last held-out loss, compared after equally many steps."""
    by_name = by_contender(rows)
    found: list[Row] = []
    for name, own in by_name.items():
        taken = max((row["run"]["until"] for row in own if "loss" in row), default=0)
        last = [row for row in own if "loss" in row and row["run"]["until"] == taken]
        line: Row = {"layer": name, "steps": taken, "seeds": len(last)}
        line["diverged"] = sum("error" in row for row in own)
        if last:
            line["loss"] = sum(row["loss"] for row in last) / len(last)
        for key, base in (("gap", base_of(name)), ("bf16_gap", BASE)):
            same = [row for row in by_name.get(base, []) if row["run"]["until"] == taken]
            if name != base:
                line |= difference(last, same).columns(key)
        found.append(line)
    return found


def targets(found: Sequence[Row]) -> list[Row]:
    """Whether the unit-scaled model in float8 ends at most `LIMIT` above the others."""
    return [
        {"layer": "unit", "mode": f"after {line['steps']} steps", **target}
        for line in found
        if line["layer"] == "unit"
        for column, base in (("gap", UNIT_BASE), ("bf16_gap", BASE))
        for target in ends_below(line, column, LIMIT, base)
    ]


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per contender, and the targets."""
    found = lines(rows)
    return found, targets(found)


def curves(rows: Sequence[Row], name: str) -> tuple[list[float], list[list[float]]]:
    """Of one seed: the training loss of every step, and [steps taken, held-out loss]."""
    own = [row for row in rows if row["run"]["contender"] == name and "loss" in row]
    seed = min((row["run"]["seed"] for row in own), default=0)
    own = sorted((r for r in own if r["run"]["seed"] == seed), key=lambda r: r["run"]["until"])
    return (
        [loss for row in own for loss in row["train_loss"]],
        [[row["run"]["until"], row["loss"]] for row in own],
    )


def draw(rows: Sequence[Row]) -> Figure:
    """Training loss, smoothed, and held-out loss as points, over the steps."""
    from matplotlib.figure import Figure  # needed for drawing only

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    picture.plain(axes, "left", "bottom")
    axes.grid(axis="y", color=picture.PALE, linewidth=0.8)
    ends: list[tuple[str, float]] = []
    for name in CONTENDERS:
        training, held_out = curves(rows, name)
        if held_out:
            style: Any = {"color": COLOURS[name], "linestyle": "-"}
            axes.plot(
                range(1, len(training) + 1), smooth(training), linewidth=1, alpha=0.5, **style
            )
            axes.plot(
                *zip(*held_out, strict=True), marker="o", markersize=4, linewidth=1.8, **style
            )
            ends.append((name, held_out[-1][1]))
    first = [curves(rows, name)[1][0][1] for name, _ in ends]
    low = min(loss for _, loss in ends) - 0.1
    high = max(first) + 0.3
    axes.set_ylim(low, high)
    places = picture.push_apart([loss for _, loss in ends], 0.055 * (high - low), low, high)
    for (name, loss), place in zip(ends, places, strict=True):
        colour = picture.SHADES.get(COLOURS[name], COLOURS[name])
        at: Any = {"xytext": (1.01, (place - low) / (high - low)), "textcoords": "axes fraction"}
        axes.annotate(
            f"{name} {loss:.3f}", (1.0, loss), xycoords=("axes fraction", "data"), **at,
            va="center", color=colour, fontweight="bold", annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_xlabel("step", color=picture.GREY)
    axes.set_title("nanoGPT: held-out (points) and training loss, nats per byte", loc="left")
    return figure


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = study.parser(__doc__, seeds=1)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture there")
    parser.add_argument(
        "--unit-rate", type=float, default=UNIT_RATE, help=f"of the unit-scaled model; {UNIT_RATE}"
    )
    study.add_numbers(
        parser,
        steps=(300, "of a training"),
        every=(100, "steps in a segment, and from one evaluation to the next"),
        layers=(CHARACTERS.layers, "transformer blocks"),
        width=(CHARACTERS.width, "of the model"),
        heads=(CHARACTERS.heads, "of attention"),
        context=(CHARACTERS.context, "bytes of a window"),
        batch=(4, "windows in a step"),
        held_out=(2**15, "bytes of an evaluation"),
    )
    options = study.parse(parser, argv, QUICK)
    if options.output is None:
        parser.error("-o FILE is needed: trainings are continued from it and the folder beside it")
    options.sizes = {name: getattr(options, name) for name in SIZES}
    return options


def main(argv: Sequence[str]) -> int:
    """Make the segments that lack, print the gaps; 1 if the unit-scaled model misses the target."""
    options = parse(argv)
    folder = options.output.with_suffix(".checkpoints")
    make = partial(train, folder=folder, data=options.data, device=options.device)
    rows = study.known_rows(options.output, NAME)
    for first in range(0, options.steps, options.every):
        todo = segments(options, first, rows)
        rows = study.make(NAME, argv, options, todo, make, summary, COLUMNS)
    if options.plot:
        picture.save(draw(rows), options.plot)
    return int(not all(target["met"] for target in targets(lines(rows))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
