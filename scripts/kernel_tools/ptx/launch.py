"""Triton's launches, rerouted to the interpreter: a driver for GPUs that are not there.

Inside ``with compiled("sm_90") as runs:``, a launch ``kernel[grid](...)`` of CPU tensors goes
Triton's own way until the GPU would be needed: arguments are bound and specialised (a 1 becomes a
constant, multiples of 16 are told to the compiler), the kernel is compiled for the architecture,
and Triton's cache is asked first. The interpreter then runs the PTX on the tensors' memory.

Triton asks its *driver* for all that depends on a device. `_Driver` answers for an architecture,
which is also the name of its device: Triton keeps kernels by device.

A kernel may touch the bytes of the tensors that it is given, from their first element to their
last, and no others. Clusters of programs, cooperative launches and tensor descriptors as arguments
are refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from scripts.kernel_tools.ptx.machine import execute
from scripts.kernel_tools.ptx.memory import BASE, GlobalMemory
from scripts.kernel_tools.ptx.program import Program, PtxError, parse
from scripts.kernel_tools.ptx.report import Report

# Bytes of shared memory that a program may use: CUDA C++ Programming Guide, "Compute capabilities".
SHARED_BYTES = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448}
SHARED_BYTES |= {"sm_100": 232448, "sm_103": 232448, "sm_120": 101376}


@contextmanager
def compiled(arch: str) -> Iterator[list[Report]]:
    """Run each Triton launch of the block as its compiled form for ``arch``, on CPU tensors.

    Args:
        arch: "sm_90", for example.

    Yields:
        a list, to which each launch appends its `Report`; `Report.check` raises if there are
        findings.
    """
    if arch not in SHARED_BYTES:
        raise PtxError(f"architecture {arch!r} is not known; there are {', '.join(SHARED_BYTES)}")
    runs: list[Report] = []
    outer = driver._active
    driver.set_active(_Driver(arch))
    _runs.append(runs)
    try:
        yield runs
    finally:
        _runs.pop()
        driver._active = outer


_runs: list[list[Report]] = []  # of the blocks that are entered, the innermost last


class _Driver:
    """What Triton asks of a device."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.utils = self
        self.launcher_cls = _Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(self.arch.removeprefix("sm_")), 32)

    def get_current_device(self) -> str:
        return self.arch

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[self.arch]}

    def load_binary(self, *_: Any) -> tuple[None, None, int, int, int]:
        """Module, function, registers, spills, and the most threads of a program."""
        return None, None, 0, 0, 1024

    def unload_module(self, module: None) -> None:
        pass


class _Launcher:
    """Runs one compiled kernel; Triton keeps it for the kernel's later launches."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.types = tuple(source.signature.values())
        self.metadata = metadata
        self.program = _program(metadata.hash, source.name[:150])
        is_plain = [isinstance(t, str) and not t.startswith("tensordesc") for t in self.types]
        for feature, is_used in (
            ("clusters of programs are", metadata.num_ctas != 1),
            ("cooperative launches are", metadata.launch_cooperative_grid),
            ("arguments that are tuples or tensor descriptors are", not all(is_plain)),
        ):
            if is_used:
                raise PtxError(f"{metadata.name}: {feature} not supported")

    def __call__(self, x: int, y: int, z: int, *arguments: Any) -> None:
        """What Triton calls, with all arguments of the kernel, constants too."""
        # Before them: stream, function, packed metadata, launch metadata, and two hooks.
        arguments = arguments[6:]
        pairs = zip(self.types, arguments, strict=True)
        values = [value for type_, value in pairs if type_ != "constexpr"]
        programs = x * y * z
        for size in (self.metadata.global_scratch_size, self.metadata.profile_scratch_size):
            # The last two parameters: memory for the kernel's own use, by all programs.
            values.append(np.zeros(programs * size, np.uint8) if size else 0)
        memory = GlobalMemory()
        passed = _place(memory, values)
        report = execute(self.program, (x, y, z), passed, memory, shared_bytes=self.metadata.shared)
        memory.download()
        report.form = self.metadata.hash
        _runs[-1].append(report)


@cache
def _program(key: str, name: str) -> Program:
    """The PTX that Triton has left in its cache."""
    files = get_cache_manager(key).get_group(f"{name}.json")
    return parse(Path(files[f"{name}.ptx"]).read_text())


def _place(memory: GlobalMemory, values: Sequence[Any]) -> list[int | float]:
    """Copy tensors into memory; the arguments with their addresses there.

    Tensors of one storage keep their distances.
    """
    starts: dict[int, int] = {}  # of a storage -> its address in memory
    passed: list[int | float] = []
    spans: list[tuple[int, int]] = []
    for value in values:
        if isinstance(value, np.ndarray):
            address = memory.add(value)
            end = address + value.size
        elif isinstance(value, Tensor):
            if value.device.type != "cpu":
                raise PtxError(f"a tensor is on {value.device}; the interpreter takes CPU tensors")
            storage = value.untyped_storage()
            start = storage.data_ptr()
            if start not in starts:
                starts[start] = memory.add(_bytes(start, storage.nbytes()))
            address = starts[start] + value.data_ptr() - start if start else 0
            last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
            end = address + (last + 1) * value.element_size() if value.numel() else address
        else:
            passed.append(value)
            continue
        spans.append((address, end))
        passed.append(address)
    memory.upload()
    memory.valid[:] = False
    for address, end in spans:
        memory.valid[address - BASE : end - BASE] = True
    return passed


def _bytes(start: int, count: int) -> npt.NDArray[np.uint8]:
    """The memory of a storage."""
    if count == 0:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(start))
