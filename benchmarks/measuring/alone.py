"""Measures a contender in a process of its own, where the memory of no other one counts.

Candidates that are timed in turns are alive together (`harness.py`). So a benchmark measures twice:
time with all of them, memory with one per process. The processes are forked from one that has
imported torch and used no device: each begins in the time that the device takes, not the imports.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.measuring import harness
from benchmarks.measuring.harness import Row


def alone(measure: Callable[..., Row], *arguments: Any) -> Row:
    """A row measured in a new process; what it raises is the row, as in `harness.runnable`.

    Args:
        measure: a function of a module: it is sent by its name.
        arguments: of `measure`; they are pickled.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # for the new process
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(1, context) as processes:
        try:
            return processes.submit(_tried, measure, *arguments).result()
        except BrokenProcessPool as error:  # killed: the machine has too little memory
            return harness.why(error)


def _tried(measure: Callable[..., Row], *arguments: Any) -> Row:
    try:
        return measure(*arguments)
    except Exception as error:  # as a row it arrives whatever it holds
        return harness.why(error)


def peak_bytes(step: Callable[[], object], device: str) -> int:
    """The most memory of the third step: by then it is compiled, and delayed scales are known.

    On CUDA what is allocated during that step; on a CPU the most that the process has had in memory
    so far, its program included.
    """
    on_cuda = torch.device(device).type == "cuda"
    for _ in range(3):
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        step()
    if on_cuda:
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10
