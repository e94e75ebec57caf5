"""The host's part of a CUDA step, on a machine without a GPU.

Inside `stubbed_gpu`, CPU tensors take the path of CUDA ones on an H100: plans, checks, ops and
launchers run as there. Triton compiles each kernel and is asked for its launch, which does nothing;
a GEMM returns an empty result. The time of a step is then that of Python and of torch's dispatch.
Missing are the calls into the CUDA driver, the same for every library: some microseconds a launch.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from float8.kernels.scaled_mm import GEMMS
from float8.linear import bound_plan

ARCH = 90


class Launch(NamedTuple):
    """What a driver is asked to run."""

    kernel: Any  # Triton's metadata of the compiled kernel
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class StubbedDriver:
    """What Triton asks of a device.

    Args:
        keeps: keep what it is asked to launch in ``launches``; otherwise only count.
    """

    def __init__(self, keeps: bool = True) -> None:
        self.keeps, self.launched = keeps, 0
        self.launches: list[Launch] = []
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (self, None, 0, 0, 1024),  # module, function, ..., most threads
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 232448},
        )

    def get_current_device(self) -> str:
        return "stub"  # Triton keeps kernels by device

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", ARCH, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(*arguments: Any) -> None:
            self.launched += 1
            if self.keeps:  # x, y, z, stream, function, three of Triton's and two hooks
                self.launches.append(Launch(metadata, arguments[:3], arguments[9:]))

        return launch


def _multiply(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, a_block: Any, b_block: Any,
    bias: Tensor | None, out_dtype: torch.dtype, fast: bool,
) -> Tensor:  # fmt: skip
    return torch.empty(a.shape[0], b.shape[0], dtype=out_dtype)


@contextmanager
def stubbed_gpu() -> Iterator[StubbedDriver]:
    """CPU tensors take the path of CUDA ones; results are not defined."""
    from triton.runtime import driver

    stub, outer = StubbedDriver(keeps=False), driver._active
    modules = ("float8.kernels", "float8.kernels.casts", "float8.kernels.scaled_mm")
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch(f"{module}.family_of", return_value=f"sm_{ARCH}"))
        gemms = {name: gemm._replace(multiply=_multiply) for name, gemm in GEMMS.items()}
        stack.enter_context(mock.patch.dict(GEMMS, gemms))
        stack.callback(bound_plan._bound_once.cache_clear)
        stack.callback(driver.set_active, outer)
        bound_plan._bound_once.cache_clear()
        driver.set_active(stub)
        stack.enter_context(_launchers_for_cpu_tensors())
        yield stub


@contextmanager
def _launchers_for_cpu_tensors() -> Iterator[None]:
    for name in ("cast", "cast_rowwise", "cast_blockwise", "cast_mx", "transpose"):
        importlib.import_module(f"float8.kernels.gpu.{name}")
    from float8.kernels.gpu.launch import LAUNCHERS

    library = torch.library.Library("float8", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of kernels that replace others
            for name, launcher in LAUNCHERS.items():
                library.impl(name, launcher, "CPU", allow_override=True)
        yield
    finally:
        library._destroy()
