"""Run checks on a few gloo processes, which end with the test.

A *multiprocess program* is a file of ``test/multiprocess/``, which started processes import by
name. It contains checks: functions ``check(rank, *arguments)`` that raise where something is wrong.
Starting processes takes longer than most checks, so one set of processes runs all checks in turn. A
check that fails or hangs ends its set, and a new set continues with the next check: one failure
hides no other.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Check = tuple[Any, ...]
PATIENCE = 120.0  # seconds for one check
# Processes are forked from one that has imported torch and nothing else, which is fast. They end
# at once: a spawned process ends by Python's finalisation, where a gloo thread that frees its last
# tensor aborts the process.
METHOD = "forkserver"
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._inductor.compile_fx",  # what compiling imports, with any backend
]


def forkserver() -> Any:
    """The context that forks processes from one that has imported torch."""
    mp.set_forkserver_preload(PRELOAD)
    return mp.get_context(METHOD)


def new_store() -> dist.TCPStore:
    """A store in this process, through which others find each other, at a free port."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def shorten_the_dynamic_start() -> int:
    """Let a delayed cast have its first scale after one sync: tests train for a few steps only.

    Returns:
        the number of syncs before, by default that of users.
    """
    delayed = importlib.import_module("float8.linear.delayed")
    before, delayed.DYNAMIC_STEPS = delayed.DYNAMIC_STEPS, 1
    return int(before)


def join_group(port: int, rank: int, world: int, **options: Any) -> None:
    """Make the process group of all processes that use the store at a port."""
    torch.set_num_threads(1)
    shorten_the_dynamic_start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set(f"here {rank}", "")  # all are, before the timeouts of `options` begin to count
    store.wait([f"here {r}" for r in range(world)])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, **options)


def failures(
    program: str,
    checks: Sequence[Check] | dict[str, Check],
    world: int = 2,
    patience: float = PATIENCE,
) -> dict[str, Exception]:
    """Run checks on ``world`` processes; the errors of those that fail, by name.

    Args:
        program: a file of ``test/multiprocess/``, without ``.py``.
        checks: (function's name, *arguments) of each check, perhaps by a name of its own.
        world: the number of processes.
        patience: seconds after which a check counts as hanging.
    """
    if not isinstance(checks, dict):
        checks = {" ".join(map(str, check)): check for check in checks}
    found: dict[str, Exception] = {}
    left = list(checks)
    while left:
        passed = forkserver().Value("i", 0)
        try:
            _run(program, [checks[name] for name in left], world, passed, patience)
        except Exception as error:  # of any kind: it belongs to this check
            found[left[min(passed.value, len(left) - 1)]] = error
        left = left[passed.value + 1 :]
    return found


def _run(program: str, checks: list[Check], world: int, passed: Any, patience: float) -> None:
    store = new_store()
    arguments = (world, store.port, program, checks, passed)
    context = mp.start_processes(_start, arguments, world, join=False, start_method=METHOD)
    before, waited = 0, 0.0
    while not context.join(timeout=1.0):
        waited = waited + 1 if passed.value == before else 0.0
        before = passed.value
        if waited > patience:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{checks[passed.value]} hangs on {world} processes")


def _start(
    rank: int, world: int, port: int, program: str, checks: list[Check], passed: Any
) -> None:
    functions = importlib.import_module(program)
    join_group(port, rank, world)
    try:
        for name, *arguments in checks:
            getattr(functions, name)(rank, *arguments)
            dist.barrier()
            passed.value += rank == 0
    finally:
        dist.destroy_process_group()
