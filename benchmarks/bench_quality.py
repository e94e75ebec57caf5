"""How much worse than bf16 does a model end that was trained in float8?

A study is many small trainings (`quality/run.py`) in pairs: runs of one seed share weights, batches
and evaluation, and differ by their contender (`quality/contenders.py`). What counts is the paired
difference of held-out losses, in per cent of the base's, with its 95 % interval
(`quality/paired.py`). Target: the interval lies within 0.25 % of the base. ``bf16 rounded`` says
what differences rounding alone makes.

    --study recipes    every recipe, and torchao's tensorwise and rowwise, over all seeds

The file named by -o is written after every run, and a call with the same file makes only the runs
that it lacks: stop it at any time, and go on another night.

    python benchmarks/bench_quality.py --jobs 2 -o quality.json
    python benchmarks/bench_quality.py --quick
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring.harness import Row, positive
from benchmarks.quality import study
from benchmarks.quality.contenders import BASE, NOISE, PEER, UNIT_BASE, base_of
from benchmarks.quality.paired import difference
from benchmarks.quality.run import Run, train

LIMIT = 0.25  # per cent of the base's loss
RECIPES = (
    *(BASE, NOISE, "tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"),
    *(UNIT_BASE, "unit", PEER + "tensorwise", PEER + "rowwise"),
)
RATE, UNIT_RATE = 2e-3, 2**-2  # the best of scripts/training/options.py for this size
QUICK = {"steps": 4, "width": 32, "layers": 1, "batch": 2, "context": 16, "held_out": 256}
COLUMNS = {
    "layer": ("contender", ""),
    "seeds": ("seeds", ".0f"),
    "loss": ("held-out loss", ".4f"),
    "gap": ("gap to base", ""),
    "bf16_gap": ("evaluated in bf16", ""),
    "diverged": ("diverged", ".0f"),
}


def recipes(options: argparse.Namespace) -> list[Run]:
    """Every contender for every seed, a seed after the other."""
    return [
        Run(
            contender=name,
            seed=seed,
            learning_rate=UNIT_RATE if base_of(name) == UNIT_BASE else RATE,
            **options.sizes,
        )
        for seed in options.seeds
        for name in options.contenders
    ]


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line per contender: its mean loss and the paired difference to its base."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["run"]["contender"], []).append(row)
    found: list[Row] = []
    for name, own in by_name.items():
        bases = by_name.get(base_of(name), [])
        losses = [row["loss"] for row in own if "loss" in row]
        line: Row = {"layer": name, "seeds": len(losses), "diverged": len(own) - len(losses)}
        if losses:
            line["loss"] = sum(losses) / len(losses)
        if name != base_of(name) and (gap := difference(own, bases)).values:
            line |= {"gap": str(gap), "gap_percent": gap.mean, "half_width": gap.half_width}
            line["met"] = gap.within(LIMIT)
            if (in_bf16 := difference(own, bases, "bf16_loss")).values:
                line["bf16_gap"] = str(in_bf16)
        found.append(line)
    return found


def targets(found: Sequence[Row]) -> list[Row]:
    """Which contenders' intervals lie within the limit; ``measured`` is their farther end."""
    return [
        {
            "layer": line["layer"],
            "mode": "interval",
            "against": base_of(line["layer"]),
            "target": LIMIT,
            "measured": abs(line["gap_percent"]) + line["half_width"],
            "met": line["met"],
        }
        for line in found
        if math.isfinite(line.get("half_width", math.inf))
    ]


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per contender, and the targets."""
    found = lines(rows)
    return found, targets(found)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = study.parser(__doc__, seeds=5)
    parser.add_argument("--contenders", nargs="+", choices=RECIPES, default=list(RECIPES))
    for name, value, text in (
        ("--steps", 2000, "of a run"),
        ("--layers", 2, "transformer blocks"),
        ("--width", 128, "of the model"),
        ("--heads", 2, "of attention"),
        ("--context", 64, "bytes of a window"),
        ("--batch", 16, "windows in a step"),
        ("--held-out", 2**20, "bytes of the last evaluation"),
    ):
        parser.add_argument(name, type=positive, default=value, help=f"{text}; {value}")
    options = parser.parse_args(argv)
    for key, value in QUICK.items() if options.quick else ():
        setattr(options, key, value)
    names = ("steps", "layers", "width", "heads", "context", "batch", "held_out")
    options.sizes = {name: getattr(options, name) for name in names}
    return options


def main(argv: Sequence[str]) -> int:
    """Make the runs that lack, print the differences; 1 if a contender misses the target."""
    options = parse(argv)
    make = partial(train, data=options.data, device=options.device)
    rows = study.make("bench_quality", argv, options, recipes(options), make, summary, COLUMNS)
    return int(not all(target["met"] for target in targets(lines(rows))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
