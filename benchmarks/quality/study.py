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
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import MISSING, asdict, fields
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from benchmarks.measuring import harness, report
from benchmarks.measuring.harness import Row, positive

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")  # frozen; its fields are all that decides a run
Summary = Callable[[Sequence[Row]], tuple[Sequence[Row], Sequence[Row]]]  # -> lines, targets


def parser(description: str | None, seeds: int) -> argparse.ArgumentParser:
    """The options that studies share; ``seeds`` is how many, by default."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default, jobs = "cuda" if torch.cuda.is_available() else "cpu", os.cpu_count() or 1
    options.add_argument("--device", type=harness.device, default=default)
    options.add_argument("--seeds", nargs="+", type=int, default=list(range(seeds)))
    options.add_argument("--jobs", type=positive, default=jobs, help=f"processes; here {jobs}")
    options.add_argument("--data", type=Path, help="a folder of text, not Python sources")
    options.add_argument("--quick", action="store_true", help="a few steps: does it run?")
    options.add_argument("-o", "--output", type=Path, metavar="FILE", help="JSON, continued")
    return options


def add_numbers(parser: argparse.ArgumentParser, **numbers: tuple[int, str]) -> None:
    """Add options of positive integers: name=(default, what it is)."""
    for name, (value, text) in numbers.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=positive, default=value, help=f"{text}; {value}")


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], quick: Mapping[str, Any]
) -> argparse.Namespace:
    """Parse; with ``--quick`` defaults are those of `quick`, and options that are given stay."""
    options = parser.parse_args(argv)
    if options.quick:
        parser.set_defaults(**quick)
        options = parser.parse_args(argv)
    return options


def make(
    name: str,
    argv: Sequence[str],
    options: argparse.Namespace,
    runs: Sequence[R],
    train: Callable[[R], Row],
    summary: Summary,
    columns: report.Columns,
) -> list[Row]:
    """Make the runs that the file lacks, write it after each, and print the summary.

    Args:
        name: of the benchmark, ``benchmarks/NAME.py``.
        argv: its arguments.
        options: of `parser`.
        runs: all of the study, those first that are to be made first.
        train: makes one run; a function that another process can import.
        summary: the lines to print about rows, and their targets.
        columns: of the lines.

    Returns:
        All rows: ``run`` with the fields of the run, ``commit``, ``device``, and what `train`
        returned.

    Raises:
        SystemExit: the file cannot be continued, or a run failed; with a message.
    """
    rows = known_rows(options.output, name)
    done = {_key(row["run"]) for row in rows}
    todo = [run for run in dict.fromkeys(runs) if _key(asdict(run)) not in done]
    order = {_key(asdict(run)): number for number, run in enumerate(runs)}

    def write() -> Row:
        rows.sort(key=lambda row: order.get(_key(row["run"]), -1))  # those of other calls first
        lines, targets = summary(rows)
        return report.write(name, argv, options, rows, columns, targets, lines)

    print(f"{len(runs) - len(todo)} of {len(runs)} runs are there, {len(todo)} to make", flush=True)
    failures = 0
    for count, (run, made) in enumerate(_made(todo, train, options.jobs), start=1):
        if isinstance(made, BaseException):
            failures += 1
            said = f"failed: {made!r}"
        else:
            made_by = {**report.commit(), "device": report.device_name(str(options.device))}
            rows.append({"run": asdict(run), **made_by, **made})
            said = made.get("error") or format(made["loss"], ".4f")
            write()
        print(f"{time.strftime('%H:%M:%S')} {count}/{len(todo)} {_named(run)}: {said}", flush=True)
    written = write()
    print("\n".join(written["table"]))
    if "targets" in written:
        print(report.table(written["targets"], report.TARGET_COLUMNS))
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
    todo: Iterable[R], train: Callable[[R], Row], jobs: int
) -> Iterator[tuple[R, Row | BaseException]]:
    """Runs and what they return or raise, as they end, `jobs` at a time."""
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as processes:
        running: dict[Future[Row], R] = {processes.submit(train, run): run for run in todo}
        while running:
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                error = ended.exception()
                yield running.pop(ended), ended.result() if error is None else error


def _named(run: Any) -> str:
    names = [field.name for field in fields(run) if field.default is MISSING]
    return ", ".join(f"{name} {getattr(run, name)}" for name in names[:4])


def save(state: object, path: Path) -> None:
    """Write a checkpoint atomically: a killed process leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")  # several processes may write the same
    torch.save(state, part)
    part.replace(path)
