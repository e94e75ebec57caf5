"""Many runs, one process each, in one file that a later call continues.

The file is a result file like every benchmark's (`measuring/report.py`). It is written again after
every run, so that a study that is killed keeps the runs that ended, and the same command with the
same file makes those that lack. Each row names its run by all of the run's fields, and the commit
that made it; runs that the file has are not made again.

Processes take one thread each, so that as many run beside each other as the machine has cores: the
result of a run does not depend on what runs beside it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.measuring import report
from benchmarks.measuring.harness import Row, countdown
from benchmarks.quality.run import Run, train
from scripts.training import corpus

Finish = Callable[[Sequence[Row]], object]


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


def missing(runs: Iterable[Run], rows: Sequence[Row]) -> list[Run]:
    """Those runs that have no row, each once, in their order."""
    done = {json.dumps(row["run"], sort_keys=True) for row in rows}
    return [
        run for run in dict.fromkeys(runs) if json.dumps(asdict(run), sort_keys=True) not in done
    ]


def complete(
    runs: Sequence[Run],
    rows: list[Row],
    finish: Finish,
    *,
    jobs: int,
    device: str = "cpu",
    data: Path | None = None,
    stop_after: float | None = None,
) -> list[Row]:
    """Make the runs that lack, `jobs` at a time.

    Args:
        runs: all of the study, those first that are to be made first.
        rows: those that exist; each new one is added.
        finish: called with all rows after each run; writes the file.
        jobs: processes beside each other.
        device: on which runs train.
        data: a folder of text, or None for the standard library's sources.
        stop_after: begin no run after so many seconds.

    Returns:
        ``rows``.
    """
    todo, late = missing(runs, rows), countdown(stop_after)
    print(f"{len(runs) - len(todo)} of {len(runs)} runs are there, {len(todo)} to make", flush=True)
    # A process per run: none inherits the memory, the caches or the threads of another.
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        queue, open_ = iter(todo), {}
        try:
            while True:
                while len(open_) < jobs and not late() and (run := next(queue, None)):
                    open_[pool.submit(_train, run, device, data)] = run
                if not open_:
                    return rows
                for future in wait(open_, return_when=FIRST_COMPLETED).done:
                    run = open_.pop(future)
                    rows.append({"run": asdict(run), **report.commit(), **future.result()})
                    finish(rows)
                    print(
                        _line(rows[-1], len(todo) - len(missing(todo, rows)), len(todo)), flush=True
                    )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _line(row: Row, count: int, total: int) -> str:
    run, result = row["run"], row.get("error") or f"loss {row['loss']:.4f}"
    where = f"{run['contender']}, seed {run['seed']}, lr {run['learning_rate']:g}"
    return f"{time.strftime('%H:%M:%S')} {count}/{total} {where}: {result}"


def _train(run: Run, device: str, data: Path | None) -> Row:
    torch.set_num_threads(1)
    return train(run, corpus.load(data), device)
