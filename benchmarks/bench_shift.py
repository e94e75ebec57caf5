"""What does a sudden change in a training do to delayed scaling, whose scales are of past steps?

Four changes are planted in trainings of a small GPT (`quality/shifts.py`): the first steps, a
restart of the learning rate, a text in another alphabet, and activations that grow. Delayed scaling
with histories of 1, 16 and 1024 steps and margins of 0, 1 and 2 (`quality/configs.py`) is compared
with bf16 and with dynamic scales (``tensorwise``). Of every step from the change on
(`quality/shifted_run.py`):

    saturated   in how many steps `float8.inspect` names a cast that saturates (more than 1 element
                in 1,000), the last of them, and the largest fraction of an operand
    loss error  the largest, against bf16 with the same weights; so is the gradient error, whose
                geometric means are those of the first 8 steps and of the rest
    bump        the paired difference of training losses to bf16 (`quality/paired.py`) in the first
                8 steps, and in the rest. ``bf16 rounded`` has what rounding alone makes of it

The change ``none`` answers another question: which part of delayed scaling costs quality where
nothing is planted? Its runs end with a learning rate of zero, and with held-out losses.

    python benchmarks/bench_shift.py --jobs 2 -o shift.json
    python benchmarks/bench_shift.py --shifts none --seeds 0 1 2 3 4 5 6 7 --jobs 2 -o ends.json
    python benchmarks/bench_shift.py --quick
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
from benchmarks.quality import shifts, study
from benchmarks.quality.configs import DEFAULT, GRADIENTS, GRID, LATER, name_of
from benchmarks.quality.contenders import BASE, NOISE
from benchmarks.quality.paired import difference, grouped
from benchmarks.quality.shifted_run import ShiftedRun, train

DYNAMIC = "tensorwise"
AROUND = (BASE, NOISE, DYNAMIC, *GRID, GRADIENTS)
ENDS = (
    *(BASE, NOISE, DYNAMIC, DEFAULT, name_of(1), name_of(1024), name_of(16, 2)),
    *(GRADIENTS, LATER),
)
FIRST = 8  # steps from a change on
QUICK = {"layers": 1, "width": 32, "heads": 1, "context": 16, "batch": 2, "held_out": 256}
QUICK_STEPS = {"before": 5, "after": 10, "steps": 4}
COLUMNS = {
    "shift": ("change", ""),
    "layer": ("contender", ""),
    "seeds": ("seeds", ".0f"),
    "saturated_steps": ("saturated steps", ".1f"),
    "last_saturated": ("the last", ".0f"),
    "worst": ("worst operand", ""),
    "problems": ("problems", ""),
    "loss_error": ("loss error %", "+.2f"),
    "gradient_error": ("gradient error %", ".1f"),
    "later_error": ("later", ".1f"),
    "bump": ("bump", ""),
    "later": ("later", ""),
    "loss": ("loss", ".4f"),
    "gap": ("gap to bf16", ""),
    "bf16_gap": ("evaluated in bf16", ""),
    "diverged": ("diverged", ".0f"),
}


def runs_of(options: argparse.Namespace) -> list[ShiftedRun]:
    """Every change and contender for every seed, a seed after the other."""
    return [
        ShiftedRun(
            contender=name,
            shift=shift,
            seed=seed,
            before=0 if shift in (shifts.START, shifts.NONE) else options.before,
            after=options.steps if shift == shifts.NONE else options.after,
            **options.sizes,
        )
        for seed in options.seeds
        for shift in options.shifts
        for name in (ENDS if shift == shifts.NONE else AROUND)
        if options.contenders is None or name in options.contenders
    ]


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line per change and contender."""
    groups = grouped(rows, lambda row: (row["run"]["shift"], row["run"]["contender"]))
    found: list[Row] = []
    for (shift, name), own in groups.items():
        whole = [row for row in own if "loss" in row]
        line: Row = {"shift": shift, "layer": name, "seeds": len(whole)}
        line["diverged"] = len(own) - len(whole)
        bases = groups.get((shift, BASE), [])
        if whole and shift == shifts.NONE:
            line |= _ending(whole, bases if name != BASE else [])
        elif whole:
            line |= _casts(whole) | (_bumps(whole, bases) if name != BASE else {})
        found.append(line)
    return found


def _ending(rows: Sequence[Row], bases: Sequence[Row]) -> Row:
    line: Row = {"loss": statistics.fmean(row["loss"] for row in rows)}
    for key, column in (("loss", "gap"), ("bf16_loss", "bf16_gap")):
        line |= difference(rows, bases, key).columns(column)
    return line


def _casts(rows: Sequence[Row]) -> Row:
    """What the steps from the change on say of the casts, as means over seeds."""
    runs = [[step for step in row["steps"] if step["step"] >= 0] for row in rows]
    if "saturated" not in runs[0][0]:  # bf16
        return {}
    saturated = [[s["step"] for s in steps if "saturates" in s["problems"]] for steps in runs]
    operands = runs[0][0]["saturated"]
    worst = {
        o: statistics.fmean(max(s["saturated"][o] for s in run) for run in runs) for o in operands
    }
    operand = max(worst, key=worst.__getitem__)
    names = dict.fromkeys(name for run in runs for step in run for name in step["problems"])

    def mean(key: str, first: int, last: int | None) -> float:
        values = [step[key] for run in runs for step in run[first:last] if step[key] > 0]
        return statistics.geometric_mean(values) if values else 0.0

    return {
        "saturated_steps": statistics.fmean(map(len, saturated)),
        **_last(saturated),
        "worst": f"{operand} {100 * worst[operand]:.2g} %" if worst[operand] else "",
        "worst_percent": {o: 100 * fraction for o, fraction in worst.items()},
        "problems": ", ".join(names),
        "loss_error": statistics.fmean(max(step["loss_error"] for step in run) for run in runs),
        "gradient_error": mean("gradient_error", 0, FIRST),
        "later_error": mean("gradient_error", FIRST, None),
    }


def _last(saturated: Sequence[Sequence[int]]) -> Row:
    """The last saturated step of any seed, if there is one."""
    steps = [step for steps in saturated for step in steps]
    return {"last_saturated": max(steps)} if steps else {}


def _bumps(rows: Sequence[Row], bases: Sequence[Row]) -> Row:
    """Paired differences of the mean training losses of the first steps, and of the others."""
    found: Row = {}
    for column, first, last in (("bump", 0, FIRST), ("later", FIRST, None)):
        mine, theirs = ([_mean_loss(row, first, last) for row in part] for part in (rows, bases))
        found |= difference(mine, theirs).columns(column)
    return found


def _mean_loss(row: Row, first: int, last: int | None) -> Row:
    losses = [step["loss"] for step in row["steps"] if step["step"] >= 0][first:last]
    return {"run": row["run"], "loss": statistics.fmean(losses)} if losses else {"run": row["run"]}


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per change and contender; no targets."""
    return lines(rows), []


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; ``sizes`` are those fields of a run that are the same for all."""
    parser = study.parser(__doc__, seeds=3)
    every = (*shifts.SHIFTS, shifts.NONE)
    parser.add_argument("--shifts", nargs="+", choices=every, default=list(shifts.SHIFTS))
    names = tuple(dict.fromkeys((*AROUND, *ENDS)))
    parser.add_argument("--contenders", nargs="+", choices=names, help="by default all")
    study.add_numbers(
        parser,
        before=(48, "steps before the change"),
        after=(20, "steps from the change on"),
        steps=(160, "of a run without change"),
    )
    options = study.parse(parser, argv, QUICK_STEPS)
    options.sizes = QUICK if options.quick else {}
    return options


def main(argv: Sequence[str]) -> int:
    """Make the runs that lack, and print the differences."""
    options = parse(argv)
    make = partial(train, data=options.data, device=options.device)
    study.make("bench_shift", argv, options, runs_of(options), make, summary, COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
