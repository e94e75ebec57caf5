"""Run the tests of kernels on compiled code: `kernel_tools.ptx` in place of Triton's interpreter.

Inside ``with executed("sm_90") as runs:``, `interpreter.launcher` gives a launcher for CPU tensors
that compiles its kernels for that architecture and executes their PTX. Whatever the execution
finds (an access out of bounds, a race) raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from scripts.kernel_tools.ptx import Report

_blocks: list[tuple[str, bool, list[Report]]] = []  # that are entered, the innermost last


@contextmanager
def executed(arch: str, raises: bool = True) -> Iterator[list[Report]]:
    """Let launchers of the block run compiled code; yields the report of each launch.

    ``raises``: a launch whose execution found something raises.
    """
    _blocks.append((arch, raises, []))
    try:
        yield _blocks[-1][2]
    finally:
        _blocks.pop()


def is_active() -> bool:
    """Whether a block of `executed` is entered."""
    return bool(_blocks)


def launcher(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, or what launches the kernels of an op, running compiled code."""
    from float8.kernels.registration import LAUNCHERS
    from scripts.kernel_tools.ptx.launch import compiled

    arch, raises, reports = _blocks[-1]
    if isinstance(function, torch._ops.OpOverload):
        function = LAUNCHERS[function._schema.name.removeprefix("float8::")]

    def launch(*args: Any, **kwargs: Any) -> Any:
        with compiled(arch) as runs:
            result = function(*args, **kwargs)
        reports.extend(runs)
        for run in runs if raises else []:
            run.check()
        return result

    return launch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--execute", metavar="ARCH", help="run kernels as compiled for it, on CPUs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--execute"):
        items[:] = [item for item in items if hasattr(getattr(item, "module", None), "launcher")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    arch = item.config.getoption("--execute")
    if arch is None:
        return (yield)
    with executed(arch):
        return (yield)
