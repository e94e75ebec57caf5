"""Do models that are no causal language model in bf16 train in float8 as they do without it?

    --study vit        a vision transformer on drawn digits: biases, LayerNorm, GELU, a class token,
                       1221 rows a batch, no multiple of 16; base: bf16
    --study encoder    a bidirectional encoder on masked bytes of texts with padding, 1037 rows a
                       batch; base: bf16
    --study fp16       the same encoder under float16 autocast with `torch.amp.GradScaler`, and once
                       more with the scaler's scale set to 2^32 before the first step and in the
                       middle (``+ overflow``); base: float16

Runs (`quality/other_models.py`) of one seed share weights and batches. What counts is the paired
difference of held-out losses, in per cent of the base's, and of accuracies, in points, with their
95 % intervals (`quality/paired.py`). ``rounded`` is the base with initial weights rounded to bf16:
what rounding alone does. A run with overflows is compared with the same run without. Target: the
interval of the accuracy lies within 1.5 points of the base's. The loss is reported beside it.

The file named by -o is written after every run, and a call with the same file makes only the runs
that it lacks.

    python benchmarks/bench_other_models.py --study vit -o vit.json
    python benchmarks/bench_other_models.py --study fp16 --quick
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring.harness import Row
from benchmarks.quality import study
from benchmarks.quality.other_models import PLAIN, ROUNDED, Run, train
from benchmarks.quality.paired import Difference, difference, grouped, interval, pairs

RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
CONTENDERS = (PLAIN, ROUNDED, *RECIPES)
VIT = {"task": "vit", "steps": 500, "learning_rate": 2e-3, "batch": 33, "held_out": 4096}
ENCODER = {"task": "encoder", "steps": 300, "learning_rate": 4e-3, "batch": 17, "held_out": 2048}
STUDIES = {
    "vit": VIT | {"half": "bf16"},
    "encoder": ENCODER | {"half": "bf16"},
    "fp16": ENCODER | {"half": "fp16"},
}
QUICK = {"steps": 4, "layers": 1, "width": 32, "batch": 3, "held_out": 5}
LIMIT = 1.5  # points of accuracy
OVERFLOW = " + overflow"
COLUMNS = {
    "layer": ("contender", ""),
    "seeds": ("seeds", ".0f"),
    "loss": ("held-out loss", ".4f"),
    "accuracy": ("accuracy, %", ".2f"),
    "gap": ("difference of loss", ""),
    "points": ("of accuracy", ""),
    "skipped": ("steps skipped", ".1f"),
    "errors": ("errors", ".0f"),
}


def runs(options: argparse.Namespace) -> list[Run]:
    """Every contender for every seed, a seed after the other."""
    sizes = STUDIES[options.study] | options.quick_sizes
    overflows = (False, True) if options.study == "fp16" else (False,)
    return [
        Run(contender=name, seed=seed, overflow=overflow, **sizes)
        for seed in options.seeds
        for overflow in overflows
        for name in options.contenders
        if not (overflow and name == ROUNDED)
    ]


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per contender, with and without overflow, and the targets."""
    by_name = grouped(rows, lambda row: _name(row["run"]))
    lines = [_line(name, own, by_name) for name, own in by_name.items()]
    mode = "interval of accuracy, points"
    return lines, [
        {"layer": name, "mode": mode, "against": base_of(name), **target}
        for line in lines
        if (name := line["layer"]) and (target := line.get("target"))
    ]


def base_of(name: str) -> str:
    """What a line is compared with; the base itself has itself."""
    return name.removesuffix(OVERFLOW) if name.endswith(OVERFLOW) else name.partition(" ")[0]


def _name(run: Row) -> str:
    """``bf16`` for the base, else such as ``bf16 tensorwise``."""
    contender = "" if run["contender"] == PLAIN else f" {run['contender']}"
    return f"{run['half']}{contender}{OVERFLOW if run['overflow'] else ''}"


def _line(name: str, own: Sequence[Row], by_name: dict[str, list[Row]]) -> Row:
    ended = [row for row in own if "loss" in row]
    line: Row = {"layer": name, "seeds": len(ended), "errors": len(own) - len(ended)}
    for key in ("loss", "accuracy", "skipped", "loss_scale"):
        if values := [row[key] for row in ended if key in row]:
            line[key] = statistics.fmean(values)
    if name == base_of(name):
        return line
    bases = by_name.get(base_of(name), [])
    gap, points = difference(own, bases), accuracy_points(own, bases)
    if gap.values:
        line |= {"gap": str(gap), "points": interval(points.mean, points.half_width)}
    line["target"] = points.target(LIMIT)
    return line


def accuracy_points(rows: Sequence[Row], bases: Sequence[Row]) -> Difference:
    """The paired differences of accuracies, in points."""
    values = [own - base for own, base in pairs(rows, bases, "accuracy", "accuracy")]
    return Difference(tuple(values), sum("error" in row for row in rows))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = study.parser(__doc__, seeds=5)
    parser.add_argument("--study", choices=STUDIES, required=True)
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME"
    )
    options = parser.parse_args(argv)
    if options.data is not None:
        parser.error("--data has no effect here: the studies draw digits or read torch's sources")
    options.quick_sizes = QUICK if options.quick else {}
    return options


def main(argv: Sequence[str]) -> int:
    """Make the runs that lack, print the differences; 1 if a contender misses the target."""
    options = parse(argv)
    make = partial(train, device=options.device)
    rows = study.make("bench_other_models", argv, options, runs(options), make, summary, COLUMNS)
    return int(not all(target["met"] for target in summary(rows)[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
