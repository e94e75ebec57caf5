"""How much worse than bf16 does a model end that was trained in float8?

Many small trainings (`quality/run.py`) in pairs: runs of one seed share weights, batches and
evaluation, and differ by their contender (`quality/contenders.py`). What counts is the paired
difference of held-out losses, in per cent of the base's, with its 95 % interval
(`quality/recipes.py`). ``bf16 rounded`` says what differences rounding alone makes, and is a second
run of the base. Target: the interval lies within 0.25 % of the base.

The file named by -o is written after every run, and a call with the same file makes only the runs
that it lacks: stop it at any time, and go on another night. `plots.py` draws the file.

    python benchmarks/bench_quality.py --jobs 2 -o quality.json
    python benchmarks/bench_quality.py --quick
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.quality import study
from benchmarks.quality.recipes import COLUMNS, CONTENDERS, summary
from benchmarks.quality.run import Run, train, usual_rate

QUICK = {"steps": 4, "width": 32, "layers": 1, "batch": 2, "context": 16, "held_out": 256}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = study.parser(__doc__, seeds=5)
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME"
    )
    study.add_numbers(
        parser,
        steps=(2000, "of a run"),
        layers=(2, "transformer blocks"),
        width=(128, "of the model"),
        context=(64, "bytes of a window"),
        batch=(16, "windows in a step"),
        held_out=(2**20, "bytes of the last evaluation"),
    )
    return study.parse(parser, argv, QUICK)


def runs_of(options: argparse.Namespace) -> list[Run]:
    """Every contender for every seed, a seed after the other; a head has a width of 64."""
    sizes = {name: getattr(options, name) for name in QUICK}
    heads = max(1, options.width // 64)
    return [
        Run(
            contender=name, seed=seed, learning_rate=usual_rate(name, options.width),
            heads=heads, **sizes,
        )
        for seed in options.seeds
        for name in options.contenders
    ]  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Make the runs that lack, print the table; 1 if a contender misses the target."""
    options = parse(argv)
    make = partial(train, data=options.data, device=options.device)
    rows = study.make("bench_quality", argv, options, runs_of(options), make, summary, COLUMNS)
    return int(not all(target["met"] for target in summary(rows)[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
