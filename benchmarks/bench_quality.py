"""How much worse than bf16 does a model end that was trained in float8?

A study is many small trainings (`quality/run.py`) in pairs: runs of one seed share weights, batches
and evaluation, and differ by their contender (`quality/contenders.py`). What counts is the paired
difference of held-out losses, in per cent of the base's, with its 95 % interval
(`quality/paired.py`). ``bf16 rounded`` says what differences rounding alone makes, and is a second
run of the base in the study of recipes.

    --study recipes    every recipe, and torchao's tensorwise and rowwise. Target: the interval
                       lies within 0.25 % of the base (`quality/recipes.py`)
    --study operands   which GEMM, operand or cast the gap comes from (`quality/operands.py`)
    --study rates      the best learning rate of every recipe, and the highest that it stands
                       (`quality/rates.py`)
    --study scaling    the gap against parameters and tokens (`quality/scaling.py`)

The file named by -o is written after every run, and a call with the same file makes only the runs
that it lacks: stop it at any time, and go on another night. `plots.py` draws the file.

    python benchmarks/bench_quality.py --jobs 2 -o quality.json
    python benchmarks/bench_quality.py --study operands --jobs 2 -o operands.json
    python benchmarks/bench_quality.py --quick
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import report
from benchmarks.measuring.harness import Row, positive
from benchmarks.quality import operands, rates, recipes, scaling, study
from benchmarks.quality.probe import Probe, probe
from benchmarks.quality.run import Run, train


class Study(NamedTuple):
    """One question.

    Attributes:
        runs: of the options, those first that are to be made first.
        summary: of rows: the lines of the table, and the targets.
        columns: of the table.
        contenders: by default.
        seeds: how many, by default.
        sizes: of runs, by default, where they differ from `SIZES`.
    """

    runs: Callable[[argparse.Namespace], list[Run]]
    summary: study.Summary
    columns: report.Columns
    contenders: Sequence[str]
    seeds: int
    sizes: dict[str, int]


SIZES = {"steps": 2000, "layers": 2, "width": 128, "context": 64, "batch": 16, "held_out": 2**20}
SMALL = {"steps": 300, "width": 64, "held_out": 2**18}
QUICK = {"steps": 4, "width": 32, "layers": 1, "batch": 2, "context": 16, "held_out": 256}
STUDIES = {
    "recipes": Study(recipes.runs, recipes.summary, recipes.COLUMNS, recipes.CONTENDERS, 5, {}),
    "operands": Study(
        operands.runs, operands.summary, operands.COLUMNS, operands.CONTENDERS, 2, SMALL
    ),
    "rates": Study(rates.runs, rates.summary, rates.COLUMNS, rates.CONTENDERS, 1, SMALL),
    "scaling": Study(
        *(scaling.runs, scaling.summary, scaling.COLUMNS, scaling.CONTENDERS, 2),
        SMALL | {"steps": 600},
    ),
}
ALL = tuple(dict.fromkeys(name for each in STUDIES.values() for name in each.contenders))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; ``sizes`` are those of a run, and what was not given is the study's."""
    parser = study.parser(__doc__, seeds=5)
    parser.add_argument("--study", choices=STUDIES, default="recipes")
    parser.add_argument("--contenders", nargs="+", choices=ALL, metavar="NAME")
    for name, text in (
        ("steps", "of a run"),
        ("layers", "transformer blocks"),
        ("width", "of the model"),
        ("context", "bytes of a window"),
        ("batch", "windows in a step"),
        ("held_out", "bytes of the last evaluation"),
    ):
        own = {each: STUDIES[each].sizes[name] for each in STUDIES if name in STUDIES[each].sizes}
        others = "".join(f", {value} ({each})" for each, value in own.items())
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=positive, help=f"{text}; {SIZES[name]}{others}")
    chosen = STUDIES[parser.parse_args(argv).study]
    usual = {"contenders": list(chosen.contenders), "seeds": list(range(chosen.seeds))}
    parser.set_defaults(**usual, **SIZES | chosen.sizes)
    options = study.parse(parser, argv, QUICK)
    options.sizes = {name: getattr(options, name) for name in SIZES}
    return options


def make_run(run: Run, data: Path | None, device: str) -> Row:
    """The row of a run of any study."""
    make: Callable[..., Row] = probe if isinstance(run, Probe) else train
    return make(run, data=data, device=device)


def main(argv: Sequence[str]) -> int:
    """Make the runs that lack, print the table; 1 if a contender misses the target."""
    options = parse(argv)
    chosen = STUDIES[options.study]
    make = partial(make_run, data=options.data, device=options.device)
    rows = study.make(
        "bench_quality", argv, options, chosen.runs(options), make, chosen.summary, chosen.columns
    )
    _, targets = chosen.summary(rows)
    return int(not all(target["met"] for target in targets))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
