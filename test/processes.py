"""Claims that have to hold on every rank of a few gloo processes, which end with the test.

A claim is a function ``claim(rank, *arguments)`` of a module that spawned processes can import by
name (files of ``test/`` can be). Starting processes takes longer than most claims, so one set of
them takes all claims in turn. A claim that fails, or hangs, ends the set, and a new one goes on
behind it: one failure hides no other.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 120.0  # seconds for one claim
# Forked from a process that has imported torch and nothing else: ready in a moment, and clean.
# And they end at once: in Python's finalisation, by which a spawned process ends, a gloo thread
# that lets go of its last tensor aborts the process.
METHOD = "forkserver"
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._inductor.compile_fx",  # what compiling imports, with any backend
]


def forkserver() -> Any:
    """The context whose processes are forked from the one that has imported torch."""
    mp.set_forkserver_preload(PRELOAD)
    return mp.get_context(METHOD)


def meeting_place() -> dist.TCPStore:
    """Where processes find each other: a store of this one, at a port that nobody can take."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(port: int, rank: int, world: int, **options: Any) -> None:
    """Join the processes that meet at a port of `meeting_place`."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set(f"here {rank}", "")  # all are, before the timeouts of `options` begin to count
    store.wait([f"here {r}" for r in range(world)])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, **options)


def failures(
    module: str, claims: dict[str, tuple], world: int = 2, patience: float = PATIENCE
) -> dict[str, Exception]:
    """Which claims do not hold on ``world`` processes, and why.

    Args:
        module: what the functions are in, a file of ``test/`` without ``.py``.
        claims: name -> (function's name, *arguments).
        world: how many processes.
        patience: seconds that one claim may take before it counts as hanging.
    """
    found: dict[str, Exception] = {}
    left = list(claims)
    while left:
        held = forkserver().Value("i", 0)
        try:
            _run(module, [claims[name] for name in left], world, held, patience)
        except Exception as error:  # whatever it is, it belongs to this claim
            found[left[min(held.value, len(left) - 1)]] = error
        left = left[held.value + 1 :]
    return found


def _run(module: str, claims: list[tuple], world: int, held: Any, patience: float) -> None:
    place = meeting_place()
    arguments = (world, place.port, module, claims, held)
    context = mp.start_processes(_start, arguments, world, join=False, start_method=METHOD)
    before, waited = 0, 0.0
    while not context.join(timeout=1.0):
        waited = waited + 1 if held.value == before else 0.0
        before = held.value
        if waited > patience:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{claims[held.value]} hangs on {world} processes")


def _start(rank: int, world: int, port: int, module: str, claims: list[tuple], held: Any) -> None:
    functions = importlib.import_module(module)
    meet(port, rank, world)
    try:
        for name, *arguments in claims:
            getattr(functions, name)(rank, *arguments)
            dist.barrier()
            held.value += rank == 0
    finally:
        dist.destroy_process_group()
