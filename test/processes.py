"""Functions that run on several gloo processes, as the ranks of a process group.

A test marked ``ranks(2, 4)`` runs on two processes and on four: its first argument is the rank, and
its other arguments, those of ``parametrize`` and of fixtures, are sent to every process ::

    @pytest.mark.ranks(2, 4)
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_all_ranks_agree(rank, recipe):
        assert ...

Starting a process takes longer than most tests. So the processes live as long as the session of
pytest: they start at first use, and a test on N of them uses the first N. Each test has a process
group of its own, and ends with a traceback of each rank that failed. Processes that fail, die or
hang are ended; the next test starts new ones.

`failures` runs functions of a file in ``test/multiprocess/`` in the same way.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import sys
import time
import traceback
import zlib
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Check = tuple[Any, ...]
PATIENCE = 120.0  # seconds for one function
GRACE = 2.0  # seconds for the other ranks, after one has failed
# Processes are forked from one that has imported torch and nothing else, which is fast. They end
# at once: a spawned process ends by Python's finalisation, where a gloo thread that frees its last
# tensor aborts the process.
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._inductor.compile_fx",  # what compiling imports, with any backend
]


def forkserver() -> Any:
    """The context that forks processes from one that has imported torch."""
    mp.set_forkserver_preload(PRELOAD)
    return mp.get_context("forkserver")


def shorten_the_dynamic_start() -> int:
    """Let a delayed cast have its first scale after one sync: tests train for a few steps only.

    Returns:
        the number of syncs before, by default that of users.
    """
    delayed = importlib.import_module("float8.distributed.sync")
    before, delayed.DYNAMIC_STEPS = delayed.DYNAMIC_STEPS, 1
    return int(before)


class Member(NamedTuple):
    """A process of a pool, and the connection to it."""

    process: Any
    connection: Any


class Pool:
    """Processes that run one function after another; at most ``world`` of them at once."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.members: list[Member] = []
        self.calls = 0

    def run(
        self,
        world: int,
        module: str,
        function: str,
        *arguments: Any,
        patience: float = PATIENCE,
        **options: Any,
    ) -> None:
        """Call a function on ``world`` processes, with the rank before the arguments.

        Args:
            world: the number of processes.
            module: the name of a module, or the path of a file.
            function: its name.
            arguments, options: what pickle can send.
            patience: seconds after which the function counts as hanging.

        Raises:
            AssertionError: with the traceback of each rank that failed, or how its process ended.
        """
        if not all(member.process.is_alive() for member in self.members):
            self.close()
        while len(self.members) < world:
            self.members.append(self._started())
        self.calls += 1
        call = (module, function, arguments, options)
        waiting = dict(enumerate(self.members[:world]))
        for rank, member in waiting.items():
            member.connection.send((f"call {self.calls}", rank, world, *call))
        errors: list[str] = []
        end = time.monotonic() + patience
        while waiting and (
            ready := wait([m.connection for m in waiting.values()], max(0, end - time.monotonic()))
        ):
            for rank in [r for r, m in waiting.items() if m.connection in ready]:
                if error := _answer_of(waiting.pop(rank)):
                    errors.append(f"{function}: rank {rank} of {world}: {error}")
                    end = min(end, time.monotonic() + GRACE)
        if waiting and not errors:
            errors = [f"{function}: ranks {list(waiting)} of {world} hang for {patience:g} seconds"]
        if errors:
            self.close()
            raise AssertionError("\n".join(errors))

    def _started(self) -> Member:
        here, there = forkserver().Pipe()
        process = forkserver().Process(target=_serve, args=(there, self.store.port), daemon=True)
        process.start()
        there.close()  # then the end of the process ends the connection
        return Member(process, here)

    def close(self) -> None:
        """End all processes; the next call starts new ones."""
        for process, connection in self.members:
            process.kill()
            process.join()
            connection.close()
        self.members = []


def _answer_of(member: Member) -> str:
    try:
        return str(member.connection.recv())
    except (EOFError, ConnectionError):
        member.process.join()
        return f"its process ended with exit status {member.process.exitcode}"


@functools.cache
def pool() -> Pool:
    """The processes of this session."""
    return Pool()


def failures(
    program: str,
    checks: Sequence[Check] | dict[str, Check],
    world: int = 2,
    patience: float = PATIENCE,
    alone: bool = False,
) -> dict[str, Exception]:
    """Run functions of a program on ``world`` processes; the errors of those that fail, by name.

    Args:
        program: a file of ``test/multiprocess/``, without ``.py``.
        checks: (function's name, *arguments) of each check, perhaps by a name of its own.
        world: the number of processes.
        patience: seconds after which a check counts as hanging.
        alone: in processes of its own, as a program needs it that changes torch for good.
    """
    if not isinstance(checks, dict):
        checks = {" ".join(map(str, check)): check for check in checks}
    found: dict[str, Exception] = {}
    processes = Pool() if alone else pool()
    for name, (function, *arguments) in checks.items():
        try:
            processes.run(world, program, function, *arguments, patience=patience)
        except AssertionError as error:
            found[name] = error
    if alone:
        processes.close()
    return found


# --- in each process


def _serve(connection: Any, port: int) -> None:
    """Run the functions that the parent names, until it ends."""
    torch.set_num_threads(1)
    shorten_the_dynamic_start()
    importlib.import_module("float8.convert.filters").DEFAULT_FILTERS.clear()  # as in conftest.py
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    gc.freeze()  # collecting is slow with all objects of torch
    with suppress(EOFError):
        while True:
            connection.send(_error_of(store, *connection.recv()))
    os._exit(0)


def _error_of(
    store: dist.Store,
    call: str,
    rank: int,
    world: int,
    module: str,
    function: str,
    arguments: Sequence[Any],
    options: dict[str, Any],
) -> str:
    """Run a function in a process group of its own; the traceback if it fails, or nothing."""
    try:
        tested = getattr(_module(module), function)
        own = dist.PrefixStore(call, store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world)
        torch.manual_seed(zlib.crc32(function.encode()))
        if (dynamo := sys.modules.get("torch._dynamo")) is not None:
            dynamo.reset()
        tested(rank, *arguments, **options)
        dist.barrier()  # no rank leaves while another one still receives
        dist.destroy_process_group()
        gc.collect()
    except BaseException:  # of any kind: it belongs to this function
        return traceback.format_exc()
    return ""


def _module(name: str) -> Any:
    """A module by its name, or by the path of its file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    own = "_".join(Path(name).with_suffix("").parts[-2:])
    if own not in sys.modules:
        spec = importlib.util.spec_from_file_location(own, name)
        assert spec is not None and spec.loader is not None
        sys.modules[own] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[own]
