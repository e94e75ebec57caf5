"""Do alarms stay silent in healthy trainings, and start soon after a fault?

Small trainings under `float8.inspect_every` (`quality/watched.py`): each recipe healthy, and each
planted fault. Two targets: no alarm in a healthy training, nor before a fault; and after a fault
the alarm that is expected of it within as many looks as its rule asks for, or it is missed
(`float8.numerics.alarms`). Seeds 0 to 5 were used to choose the limits of the rules: report others.

The file named by -o is written after every run, and a call with the same file makes only the runs
that it lacks.

    python benchmarks/bench_alarms.py --seeds 6 7 8 9 10 11 --jobs 2 -o alarms.json
    python benchmarks/bench_alarms.py --quick
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring.harness import Row
from benchmarks.quality import study
from benchmarks.quality.paired import grouped
from benchmarks.quality.watched import FAULTS, HEALTHY, Watched, watch
from float8.numerics.alarms import ALARM_RULES

RECIPES = (
    "tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "unit",
)  # fmt: skip
LOOKS = {rule.name: rule.looks for rule in ALARM_RULES}
LOOKS_BEFORE = 3  # healthy ones before a fault: as many as a fall of the SQNR needs
QUICK = {"steps": 4, "width": 32, "layers": 2, "batch": 2, "context": 16, "every": 2}
COLUMNS = {
    "layer": ("fault", ""),
    "recipe": ("recipe", ""),
    "rule": ("alarm", ""),
    "runs": ("runs", ".0f"),
    "looks": ("looks", ".0f"),
    "false_alarms": ("false alarms", ".0f"),
    "missed": ("missed", ".0f"),
    "looks_until": ("looks until the alarm", ".0f"),
    "allowed": ("at most", ".0f"),
}


def runs_of(options: argparse.Namespace) -> list[Watched]:
    """Every recipe healthy, and every fault, for every seed."""
    sizes = {name: getattr(options, name) for name in ("width", "layers", "batch", "context")}
    every, found = options.every, []
    for seed in options.seeds:
        healthy = [(recipe, HEALTHY, options.steps) for recipe in options.recipes]
        faulty = [
            (fault.recipe, name, every * (LOOKS_BEFORE + LOOKS[fault.rule]))
            for name, fault in FAULTS.items()
            if name in options.faults
        ]
        found += [
            Watched(
                recipe=recipe, fault=fault, seed=seed, steps=steps, every=every,
                fault_step=LOOKS_BEFORE * every, **sizes,
            )
            for recipe, fault, steps in (*healthy, *faulty)
        ]  # fmt: skip
    return found


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line per recipe and fault; ``looks_until`` is of the latest alarm of its seeds."""
    groups = grouped(rows, lambda row: (row["run"]["fault"], row["run"]["recipe"]))
    found = []
    for (name, recipe), own in groups.items():
        line: Row = {"layer": name, "recipe": recipe, "runs": len(own)}
        line["looks"] = sum(row["looks"] for row in own)
        if name == HEALTHY:
            line["false_alarms"] = sum(row["alarms"] for row in own)
        else:
            rule = FAULTS[name].rule
            line |= {"rule": rule, "false_alarms": sum(row["early"] for row in own)}
            line["allowed"] = LOOKS[rule]
            until = [row["looks_until"] for row in own if "looks_until" in row]
            line["missed"] = len(own) - len(until)
            line |= {"looks_until": max(until)} if until else {}
        found.append(line)
    return found


def targets(found: Sequence[Row]) -> list[Row]:
    """No false alarm, and no run without the expected one."""
    result: list[Row] = []
    for line in found:
        for name in ("false_alarms", "missed"):
            if name in line:
                target: Row = {"layer": line["layer"], "mode": COLUMNS[name][0]}
                target |= {"against": line["recipe"], "target": 0, "measured": line[name]}
                result.append(target | {"met": line[name] == 0})
    return result


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per recipe and fault, and the targets."""
    found = lines(rows)
    return found, targets(found)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = study.parser(__doc__, seeds=1)
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    study.add_numbers(
        parser,
        steps=(300, "of a healthy training"),
        every=(10, "steps from look to look"),
        width=(64, "of the model"),
        layers=(2, "transformer blocks, 2 at least"),
        batch=(8, "windows in a step"),
        context=(64, "bytes of a window"),
    )
    return study.parse(parser, argv, QUICK)


def main(argv: Sequence[str]) -> int:
    """Make the runs that lack, print the table; 1 if a target is missed."""
    options = parse(argv)
    make = partial(watch, data=options.data, device=options.device)
    rows = study.make("bench_alarms", argv, options, runs_of(options), make, summary, COLUMNS)
    return int(not all(target["met"] for target in targets(lines(rows))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
