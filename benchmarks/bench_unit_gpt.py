"""Does nanoGPT train in float8 without any scale, plain and unit-scaled?

The experiment that introduced unit scaling's library (Graphcore's "Out-of-the-box FP8 training":
https://github.com/graphcore-research/out-of-the-box-fp8-training), with float8 products instead of
simulated ones: nanoGPT at its published shape for characters, trained in

    bf16         the model as it is
    naive        its linear layers in float8 by ``.to(float8)`` alone: E4M3, gradients in E5M2
    unit_bf16    after `unit_scale`, in bf16: what unit scaling alone changes
    unit         after `unit_scale`, by the same casts as ``naive``

The vocabulary is the 256 bytes instead of Shakespeare's 65 characters, and there is no dropout.
All see the same text in the same order. What counts is the held-out loss after the last step, in
per cent of bf16's and of the same model's in bf16. Target: ``unit`` ends at most 1 % above each;
of several seeds the end of the interval counts. nanoGPT's rate is that of its config; the
unit-scaled model has its own, as in that experiment.

    python benchmarks/bench_unit_gpt.py --steps 600 --jobs 2 -o unit_gpt.json
    python benchmarks/bench_unit_gpt.py --quick -o /tmp/unit_gpt.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import report
from benchmarks.measuring.harness import Row
from benchmarks.quality import training
from benchmarks.quality.contenders import BASE, NAIVE, UNIT_BASE, base_of
from benchmarks.quality.intervals import by_contender, difference, grouped
from benchmarks.quality.study import Study

CONTENDERS = (BASE, NAIVE, UNIT_BASE, "unit")
RATE = 1e-3  # nanoGPT's, config/train_shakespeare_char.py
UNIT_RATE = 2**-1  # of 2**-2 to 2**0 the best in bf16: width 128, 16 x 64 bytes, 200 steps, seed 0
LIMIT = 1.0  # per cent
COLUMNS = report.columns(
    "layer steps seeds loss gap bf16_gap diverged",
    layer="contender", steps="steps taken", gap="gap to its bf16", bf16_gap="gap to bf16",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run(training.Run):
    """What decides a training.

    Args:
        every: steps from one evaluation to the next.
    """

    every: int


def train(run: Run, data: Path | None = None, device: str = "cpu") -> Row:
    """Train new weights and evaluate."""
    return training.train(run, data, device, gpt2=True, every=run.every)


def whole(rows: Sequence[Row]) -> list[Row]:
    """A row per training; files before 0.16 have a row for each segment of one."""
    found = []
    for own in grouped(rows, lambda row: (row["run"]["contender"], row["run"]["seed"])).values():
        parts = [row for row in own if "loss" in row]
        if parts and "until" in parts[0]["run"]:
            parts.sort(key=lambda row: row["run"]["until"])
            last = parts[-1] | {"train_loss": [x for row in parts for x in row["train_loss"]]}
            found.append(last | {"curve": [[row["run"]["until"], row["loss"]] for row in parts]})
        else:
            found += own
    return found


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line per contender: its last held-out loss, compared after equally many steps."""
    by_name = by_contender(whole(rows))
    found: list[Row] = []
    for name, own in by_name.items():
        losses = [row["loss"] for row in own if "loss" in row]
        steps = max((row["curve"][-1][0] for row in own if "loss" in row), default=0)
        line: Row = {"layer": name, "steps": steps, "seeds": len(losses)}
        line["diverged"] = len(own) - len(losses)
        if losses:
            line["loss"] = statistics.fmean(losses)
        for key, base in (("gap", base_of(name)), ("bf16_gap", BASE)):
            if name != base:
                line |= difference(own, by_name.get(base, [])).columns(key)
        found.append(line)
    return found


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per contender; whether the unit-scaled model in float8 ends near the others."""
    by_name = by_contender(whole(rows))
    targets: list[Row] = [
        {"layer": "unit", "mode": "the end", **target}
        for base in (UNIT_BASE, BASE)
        if "unit" in by_name
        for target in difference(by_name["unit"], by_name.get(base, [])).ends_below(LIMIT, base)
    ]
    return lines(rows), targets


def runs_of(options: argparse.Namespace) -> list[Run]:
    """Every contender for every seed."""
    return [
        Run(
            contender=name, seed=seed,
            learning_rate=UNIT_RATE if base_of(name) == UNIT_BASE else RATE,
            **STUDY.sizes(options),
        )
        for seed in options.seeds
        for name in options.contenders
    ]  # fmt: skip


NUMBERS = {  # those of nanoGPT's config/train_shakespeare_char.py
    "steps": (300, "of a training"),
    "every": (100, "steps from one evaluation to the next"),
    "layers": (6, "transformer blocks"),
    "width": (384, "of the model"),
    "heads": (6, "of attention"),
    "context": (256, "bytes of a window"),
    "batch": (4, "windows in a step"),
    "held_out": (2**15, "bytes of an evaluation"),
}
QUICK = {
    **{"steps": 4, "every": 2, "layers": 1, "width": 32, "heads": 1, "context": 16, "batch": 2},
    "held_out": 256,
}
STUDY = Study(
    "bench_unit_gpt", __doc__, COLUMNS, runs_of, train, summary, NUMBERS, QUICK, 1,
    {"contenders": CONTENDERS},
)  # fmt: skip
main = STUDY.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
