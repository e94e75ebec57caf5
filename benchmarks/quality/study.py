"""Many runs, in several processes, in one file that a later call continues.

The file is a result file like every benchmark's (`measuring/report.py`), written again after every
run: the same command with the same file makes the runs that it lacks. Each row names its run by all
of the run's fields, and the commit and the device that made it.

Runs are made in processes of one thread, as many beside each other as the machine has cores. A run
that raises an error has no row: the other runs are made, and the next call makes it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import harness, report
from benchmarks.measuring.harness import Row

Lines = tuple[Sequence[Row], Sequence[Row]]  # of the table, and targets


@dataclass(frozen=True)
class Study:
    """What a question adds to the runner.

    Args:
        name: of the benchmark, ``benchmarks/NAME.py``.
        description: its docstring.
        columns: of the table.
        runs: options -> all runs, dataclasses whose fields are all that decides one, those first
            that are to be made first.
        train: (run, data, device) -> what the row says of it; another process imports it.
        summary: rows -> lines of the table, targets.
        numbers: options of positive integers: name -> (default, what it is).
        quick: values of options with ``--quick``; those that are given stay.
        seeds: how many, by default.
        choices: options of several values: name -> all of them, which are the default.
    """

    name: str
    description: str | None
    columns: report.Columns
    runs: Callable[[argparse.Namespace], Sequence[Any]]
    train: Callable[[Any, Path | None, str], Row]
    summary: Callable[[Sequence[Row]], Lines]
    numbers: Mapping[str, tuple[int, str]]
    quick: Mapping[str, Any]
    seeds: int
    choices: Mapping[str, Iterable[str]]

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options of a call."""
        parser = harness.plain_parser(self.description)
        jobs = os.cpu_count() or 1
        parser.add_argument("--seeds", nargs="+", type=int, default=list(range(self.seeds)))
        parser.add_argument("--jobs", type=harness.positive, default=jobs, help="processes")
        parser.add_argument("--data", type=Path, help="a folder of text, not Python sources")
        parser.add_argument("--quick", action="store_true", help="a few steps: does it run?")
        for name, (value, text) in self.numbers.items():
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, type=harness.positive, default=value, help=f"{text}; {value}")
        for name, known in self.choices.items():
            parser.add_argument(
                f"--{name}", nargs="*", choices=list(known), default=list(known), metavar="NAME"
            )
        self.more_options(parser)
        options = parser.parse_args(argv)
        if options.quick:
            parser.set_defaults(**self.quick)
            options = parser.parse_args(argv)
        return options

    def more_options(self, parser: argparse.ArgumentParser) -> None:
        """Nothing; a study may have others."""

    def sizes(self, options: argparse.Namespace) -> dict[str, int]:
        """The values of the options of `numbers`."""
        return {name: getattr(options, name) for name in self.numbers}

    def main(self, argv: Sequence[str]) -> int:
        """Make the runs that the file lacks, and print the table; 1 if a target is missed.

        Raises:
            SystemExit: the file cannot be continued, or a run failed; with a message.
        """
        options = self.parse(argv)
        _, targets = self.summary(make(self, argv, options, self.runs(options)))
        return int(not all(target.get("met", True) for target in targets))


def make(
    study: Study, argv: Sequence[str], options: argparse.Namespace, runs: Sequence[Any]
) -> list[Row]:
    """All rows: ``run`` with the fields of the run, ``commit``, ``device``, and its results."""
    rows = known_rows(options.output, study.name)
    done = {_key(row["run"]) for row in rows}
    todo = [run for run in dict.fromkeys(runs) if _key(asdict(run)) not in done]
    order = {_key(asdict(run)): number for number, run in enumerate(runs)}

    def write() -> Row:
        rows.sort(key=lambda row: order.get(_key(row["run"]), -1))  # those of other calls first
        lines, targets = study.summary(rows)
        return report.write(study.name, argv, options, rows, study.columns, targets, lines)

    print(f"{len(runs) - len(todo)} of {len(runs)} runs are there, {len(todo)} to make", flush=True)
    failures = 0
    train = partial(study.train, data=options.data, device=options.device)  # type: ignore[call-arg]
    for count, (run, made) in enumerate(_made(todo, train, options.jobs), start=1):
        if isinstance(made, BaseException):
            failures += 1
            said = f"failed: {made!r}"
        else:
            made_by = {**report.commit(), "device": report.device_name(str(options.device))}
            rows.append({"run": asdict(run), **made_by, **made})
            said = format(made["loss"], ".4f") if "loss" in made else made.get("error", "measured")
            write()
        print(f"{time.strftime('%H:%M:%S')} {count}/{len(todo)} {run}: {said}", flush=True)
    report.show(write())
    if failures:
        sys.exit(f"error: {failures} runs failed, see above; the same command makes them again")
    return rows


def known_rows(path: Path | None, name: str) -> list[Row]:
    """The rows of a study's file; none where there is no file yet.

    Raises:
        SystemExit: the file is another benchmark's.
    """
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if (owner := found.get("benchmark")) != name:
        sys.exit(f"error: {path} is a file of {owner}, not of {name}: give -o another name")
    rows: list[Row] = found["rows"]
    return rows


def _key(run: Row) -> str:
    return json.dumps(run, sort_keys=True)


def _made(
    todo: Sequence[Any], train: Callable[[Any], Row], jobs: int
) -> Iterator[tuple[Any, Row | BaseException]]:
    """Runs and what they return or raise, as they end, `jobs` at a time."""
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as processes:
        running = {processes.submit(train, run): run for run in todo}
        for ended in as_completed(running):
            yield running[ended], ended.exception() or ended.result()
