"""The host's part of a CUDA step, on a machine without a GPU.

Inside `stubbed_gpu`, CPU tensors take the path of CUDA ones: plans, checks, ops and launchers run
as there. Triton compiles each kernel and is asked for its launch, which does nothing; a GEMM
returns an empty result. The time of a step is then that of Python and of torch's dispatch. The
calls into the CUDA driver are missing, some microseconds a launch in every library.
"""

from __future__ import annotations

import importlib
import itertools
import operator
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.kernels.registration import LAUNCHERS
from float8.linear.plan import USED

_numbers = itertools.count()
# Those of a layer and of saved activations, files of gpu/.
KERNELS = ("cast", "transpose", "expand_scales", "dequantize_groups")


class Launch(NamedTuple):
    """What a driver is asked to run; ``kernel`` is Triton's metadata of the compiled kernel."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class StubbedDriver:
    """What Triton asks of a device; keeps the last launches that it was asked for."""

    def __init__(self, family: str = "sm_90") -> None:
        self.family, self.number = family, next(_numbers)
        self.launches: deque[Launch] = deque(maxlen=100)
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (self, None, 0, 0, 1024),  # module, function, ..., most threads
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 232448},
        )

    def get_current_device(self) -> str:
        return f"stub {self.number}"  # Triton keeps kernels, and what launches them, by device

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(self.family.removeprefix("sm_")), 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(*given: Any) -> None:  # x, y, z, stream, function, three of Triton's, two hooks
            self.launches.append(Launch(metadata, given[:3], given[9:]))

        return launch


def _multiply(
    a: Tensor,
    b: Tensor,
    *_: Any,
    out_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    **others: Any,
) -> Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype or output_dtype)


@contextmanager
def stubbed_gpu(family: str) -> Iterator[StubbedDriver]:
    """CPU tensors take the path of CUDA ones of this family; results are not defined."""
    from triton.runtime import driver

    for name in KERNELS:
        importlib.import_module(f"float8.kernels.gpu.{name}")
    stub, library = StubbedDriver(family), torch.library.Library("float8", "IMPL")
    with ExitStack() as stack:
        stack.enter_context(mock.patch("float8.kernels.family_of", return_value=family))
        on_gpu = operator.attrgetter("is_cpu")
        stack.enter_context(mock.patch("float8.kernels.registration._on_gpu", on_gpu))
        stack.enter_context(mock.patch.object(torch, "_scaled_mm", _multiply))
        stack.enter_context(mock.patch.object(F, "scaled_mm", _multiply))
        stack.callback(driver.set_active, driver._active)
        stack.callback(library._destroy)
        stack.callback(USED.clear)
        USED.clear()
        driver.set_active(stub)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of kernels that replace others
            for name in KERNELS:
                library.impl(name, LAUNCHERS[name], "CPU", allow_override=True)
        yield stub
