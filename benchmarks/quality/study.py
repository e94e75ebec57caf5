"""Many runs, one process each, in one file that a later call continues.

The file is a result file like every benchmark's (`measuring/report.py`). It is written again after
every run, so that a study that is killed keeps the runs that ended, and the same command with the
same file makes those that lack. Each row names its run by all of the run's fields, and the commit
that made it; runs that the file has are not made again.

Processes take one thread each, so that as many run beside each other as the machine has cores: the
result of a run does not depend on what runs beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.measuring import harness, report
from benchmarks.measuring.harness import Row, positive

Rows = Iterator[Row]
R = TypeVar("R")  # a frozen dataclass whose fields are all that decides a run
Summary = Callable[[Sequence[Row]], tuple[Sequence[Row], Sequence[Row]]]  # -> lines, targets


def parser(description: str | None, seeds: int) -> argparse.ArgumentParser:
    """The options that studies share.

    Args:
        description: of the command.
        seeds: how many, by default.
    """
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default, jobs = "cuda" if torch.cuda.is_available() else "cpu", os.cpu_count() or 1
    options.add_argument("--device", type=harness.device, default=default)
    options.add_argument("--seeds", nargs="+", type=int, default=list(range(seeds)))
    options.add_argument("--jobs", type=positive, default=jobs, help=f"processes; here {jobs}")
    options.add_argument("--data", type=Path, help="a folder of text, not Python sources")
    options.add_argument("--quick", action="store_true", help="a few steps: does it run?")
    options.add_argument(
        "--stop-after", type=positive, metavar="SECONDS", help="begin no new run after that"
    )
    options.add_argument("-o", "--output", type=Path, metavar="FILE", help="JSON, continued")
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
        All rows: ``run`` with the fields of the run, ``commit``, and what `train` returned.
    """
    try:
        rows = known_rows(options.output, name)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    todo = missing(runs, rows)
    print(f"{len(runs) - len(todo)} of {len(runs)} runs are there, {len(todo)} to make", flush=True)
    late = harness.countdown(options.stop_after)
    for count, row in enumerate(_made(todo, train, options.jobs, late), start=1):
        rows.append(row)
        _write(name, argv, options, rows, summary, columns)
        print(f"{time.strftime('%H:%M:%S')} {count}/{len(todo)} {_line(row)}", flush=True)
    written = _write(name, argv, options, rows, summary, columns)
    print("\n".join(written["table"]))
    if "targets" in written:
        print(report.table(written["targets"], report.TARGET_COLUMNS))
    return rows


def known_rows(path: Path | None, name: str) -> list[Row]:
    """The rows of a study's file; none where there is no file yet.

    Raises:
        ValueError: the file is another benchmark's.
    """
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text())
    if found.get("benchmark") != name:
        raise ValueError(
            f"{path} is a file of {found.get('benchmark')}, which {name} would overwrite: give -o "
            "another name"
        )
    rows: list[Row] = found["rows"]
    return rows


def missing(runs: Iterable[R], rows: Sequence[Row]) -> list[R]:
    """Those runs that have no row, each once, in their order."""
    done = {_key(row["run"]) for row in rows}
    return [run for run in dict.fromkeys(runs) if _key(_fields(run)) not in done]


def _fields(run: Any) -> Row:
    return asdict(run)


def _key(fields: Row) -> str:
    return json.dumps(fields, sort_keys=True)


def _made(todo: Sequence[R], train: Callable[[R], Row], jobs: int, late: harness.Late) -> Rows:
    """The rows of runs as they end, `jobs` at a time."""
    queue = iter(todo)
    running: dict[Future[Row], R] = {}
    with ThreadPoolExecutor(jobs) as threads:
        while True:
            while len(running) < jobs and not late() and (run := next(queue, None)) is not None:
                running[threads.submit(_in_own_process, train, run)] = run
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                row = future.result()
                yield {"run": _fields(running.pop(future)), **report.commit(), **row}


def _in_own_process(train: Callable[[R], Row], run: R) -> Row:
    """A run inherits no memory, no caches and no threads of another."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_in_one_thread, train, run).result()


def _in_one_thread(train: Callable[[R], Row], run: R) -> Row:
    torch.set_num_threads(1)
    return train(run)


def _write(
    name: str,
    argv: Sequence[str],
    options: argparse.Namespace,
    rows: Sequence[Row],
    summary: Summary,
    columns: report.Columns,
) -> Row:
    lines, targets = summary(rows)
    written = report.write(name, argv, options, rows, columns, targets, lines)
    return written


def _line(row: Row) -> str:
    fields = ", ".join(f"{key} {value}" for key, value in row["run"].items())
    return f"{fields}: {row.get('error') or format(row['loss'], '.4f')}"
