"""Many runs, one process each, in one file that a later call continues.

The file is a result file like every benchmark's (`measuring/report.py`). It is written again after
every run, so that a study that is killed keeps the runs that ended, and the same command with the
same file makes those that lack. Each row names its run by all of the run's fields, and the commit
and the device that made it; runs that the file has are not made again. The rows of a call stand in
the order of its runs, whichever ended first, after those of other calls.

Processes take one thread each, so that as many run beside each other as the machine has cores: the
result of a run does not depend on what runs beside it. Ctrl-C ends them. A run that fails with an
error has no row: the other runs are made, and the next call makes it again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from multiprocessing import connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from benchmarks.measuring import harness, report
from benchmarks.measuring.harness import Row, positive

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")  # frozen; its fields are all that decides a run
Summary = Callable[[Sequence[Row]], tuple[Sequence[Row], Sequence[Row]]]  # -> lines, targets
FAILED = "failed"  # the only field of what a process returns whose run raised an error
SAME = ("study", "data", "device")  # options that decide results and are no fields of a run


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
        SystemExit: the file cannot be continued, a run failed, or Ctrl-C; with a message.
    """
    try:
        rows = known_rows(options.output, name, options, runs)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    todo = missing(runs, rows)

    order = {_key(asdict(run)): number for number, run in enumerate(runs)}

    def write() -> Row:
        rows.sort(key=lambda row: order.get(_key(row["run"]), -1))  # those of other calls first
        lines, targets = summary(rows)
        return report.write(name, argv, options, rows, columns, targets, lines)

    print(f"{len(runs) - len(todo)} of {len(runs)} runs are there, {len(todo)} to make", flush=True)
    late = harness.countdown(options.stop_after)
    failures = 0
    try:
        for count, (run, row) in enumerate(_made(todo, train, options.jobs, late), start=1):
            if FAILED in row:
                failures += 1
            else:
                made_by = {**report.commit(), "device": report.device_name(str(options.device))}
                rows.append({"run": asdict(run), **made_by, **row})
                write()
            print(f"{time.strftime('%H:%M:%S')} {count}/{len(todo)} {_line(run, row)}", flush=True)
    except KeyboardInterrupt:
        where = "" if options.output is None else f"; {options.output} has {len(rows)} runs"
        sys.exit(f"interrupted{where}")
    written = write()
    print("\n".join(written["table"]))
    if "targets" in written:
        print(report.table(written["targets"], report.TARGET_COLUMNS))
    if failures:
        sys.exit(f"error: {failures} runs failed, see above; the same command makes them again")
    return rows


def known_rows(
    path: Path | None,
    name: str,
    options: argparse.Namespace | None = None,
    runs: Iterable[DataclassInstance] = (),
) -> list[Row]:
    """The rows of a study's file; none where there is no file yet.

    Args:
        path: of the file.
        name: of the benchmark.
        options: those of `SAME` must be the file's.
        runs: the runs of the study, if rows are to have the fields of one of them.

    Raises:
        ValueError: the file is another benchmark's, or of other options, or not as `make` wrote it,
            or the fields of a row's run are those of no run, as of another version: a summary
            would compare what differs.
    """
    if path is None or not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): give -o another name") from error
    if (owner := found.get("benchmark") if isinstance(found, dict) else None) != name:
        raise ValueError(
            f"{path} is a file of {owner}, which {name} would overwrite: give -o another name"
        )
    for key in SAME:
        mine, of_file = str(getattr(options, key, "")), found.get("options", {}).get(key)
        if options is not None and of_file is not None and mine != of_file:
            raise ValueError(
                f"{path} was written with --{key} {of_file}, not {mine}, and its runs do not "
                "compare with others: give -o another name"
            )
    if not isinstance(found.get("rows"), list):
        raise ValueError(f"{path} has no list of rows: give -o another name")
    rows: list[Row] = found["rows"]
    kinds = {frozenset(asdict(run)) for run in runs}
    for number, row in enumerate(rows):
        whole = isinstance(row, dict) and isinstance(row.get("run"), dict)
        if not (whole and ("loss" in row or "error" in row)):
            raise ValueError(
                f"rows[{number}] of {path} lacks its run, or both loss and error: delete that row, "
                "so that the run is made again, or give -o another name"
            )
        if kinds and frozenset(row["run"]) not in kinds:
            raise ValueError(
                f"rows[{number}] of {path} has the run {row['run']}, whose fields are not those of "
                "this version's runs: give -o another name, or delete that row"
            )
    return rows


def missing(runs: Iterable[R], rows: Sequence[Row]) -> list[R]:
    """Those runs that have no row, each once, in their order."""
    done = {_key(row["run"]) for row in rows}
    return [run for run in dict.fromkeys(runs) if _key(asdict(run)) not in done]


def _key(run: Row) -> str:
    return json.dumps(run, sort_keys=True)


def _made(
    todo: Sequence[R], train: Callable[[R], Row], jobs: int, late: harness.Late
) -> Iterator[tuple[R, Row]]:
    """Runs and what they return, as they end, `jobs` at a time.

    Each has a new process: it inherits no memory, no caches and no threads of another.
    """
    context, queue = get_context("spawn"), iter(todo)
    running: dict[Any, tuple[R, Any]] = {}  # where the row will come from -> run, process
    try:
        while True:
            while len(running) < jobs and not late() and (run := next(queue, None)) is not None:
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_in_one_thread, args=(train, run, there))
                process.start()
                there.close()  # the process has its own: if it dies, `here` ends
                running[here] = (run, process)
            if not running:
                return
            for ended in connection.wait(list(running)):
                run, process = running.pop(ended)
                yield run, _answer(ended, process)
    finally:
        for _, process in running.values():
            process.terminate()


def _answer(here: Any, process: Any) -> Row:
    try:
        row: Row = here.recv()
    except EOFError:
        row = {FAILED: "its process died"}
    here.close()
    process.join()
    return row


def _in_one_thread(train: Callable[[R], Row], run: R, there: Any) -> None:
    """What a process does; Ctrl-C is the parent's to handle, which then ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        row = train(run)
        json.dumps(row, allow_nan=False)  # the file refuses what is not finite
    except Exception:  # of any kind: it belongs to this run, and the parent reports it
        row = {FAILED: traceback.format_exc()}
    there.send(row)


def _line(run: Any, row: Row) -> str:
    names = [field.name for field in fields(run) if field.default is MISSING]
    said = ", ".join(f"{name} {getattr(run, name)}" for name in names[:4])
    if FAILED in row:
        return f"{said}: failed\n{row[FAILED]}"
    return f"{said}: {row.get('error') or format(row['loss'], '.4f')}"
