"""Run a Python file as ``python`` or ``torchrun`` does, without the seconds that torch takes.

A process is forked from one that has imported torch and nothing else (`processes.py`). It runs the
file as its main program, in a folder of its own. ``torchrun`` starts as many of them as it is asked
for, and sets the variables by which they find each other; the real one runs in
`test_interruptions.py`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fresh import ROOT
from processes import forkserver


class Done(NamedTuple):
    """How a program ended: the exit status of the first process that failed, and what was said."""

    returncode: int
    stdout: str
    stderr: str


def python(arguments: Sequence[str], folder: Path, timeout: float = 180.0) -> Done:
    """``python FILE ...`` or ``python -m MODULE ...``."""
    return _run([{}], arguments, folder, timeout)


def torchrun(arguments: Sequence[str], folder: Path, timeout: float = 180.0) -> Done:
    """``torchrun --nproc-per-node N FILE ...``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    world = options.nproc_per_node
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0}
    common |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    ranks = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]
    return _run(ranks, options.program, folder, timeout)


def _run(
    environments: Sequence[Mapping[str, object]],
    arguments: Sequence[str],
    folder: Path,
    timeout: float,
) -> Done:
    outputs = [folder / ".stdout", folder / ".stderr"]
    for path in outputs:
        path.write_text("")
    processes = [
        forkserver().Process(target=_main, args=(each, list(arguments), folder, outputs))
        for each in environments
    ]
    for process in processes:
        process.start()
    try:
        end = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and not _status(processes):
            if time.monotonic() > end:
                raise TimeoutError(f"{' '.join(arguments)} takes more than {timeout} seconds")
            for process in processes:
                process.join(0.02)
    finally:
        for process in processes:
            process.kill()
            process.join()
    status = _status(processes)
    stdout, stderr = (path.read_text(encoding="utf-8") for path in outputs)
    return Done(status, stdout, stderr)


def _status(processes: Sequence[Any]) -> int:
    return next((p.exitcode for p in processes if p.exitcode), 0)


def _main(
    environment: Mapping[str, object],
    arguments: list[str],
    folder: Path,
    outputs: Sequence[Path],
) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ["PYTHONPATH"] = str(ROOT)
    os.chdir(folder)
    torch.set_num_threads(1)
    tests = (str(ROOT), str(ROOT / "test"), str(ROOT / "test" / "multiprocess"))
    sys.path[:] = [str(folder), str(ROOT), *(path for path in sys.path if path not in tests)]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
