"""Before a cast's first launch on a device: the same kernel on a small matrix, bit for bit.

Triton and ptxas have had faults that store wrong bytes without any error (triton#11111), and
a model trained on those may look healthy for long. So the first launch of an op of `_CHECKED` on a
device is preceded by launches on a matrix of 80 x 144. Their results are compared with the op's
definition in plain PyTorch; a difference raises. 80 and 144 are multiples of 16 and of no tile: the
compiled forms are those of training, and both edges of a tile are masked.

It costs a few milliseconds per op, and once per machine the compilation of forms that training does
not use: `cast_dynamic` of a matrix with fewer partial amaxes, the format that a recipe does not
use. Nothing is checked while a
CUDA graph is captured; the next launch is. Under torch.compile and FakeTensorMode the ops are
opaque, so the check runs where the kernel runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor

from float8.kernels import definition

SWITCH = "FLOAT8_SKIP_KERNEL_CHECK"

_CHECKED = (
    "cast",
    "cast_dynamic",
    "cast_rowwise",
    "cast_blockwise",
    "cast_mx",
    "cast_tokens",
    "cast_tokens_mx",
    "transpose",
)


def checked(op: str, kernel: Callable[..., Any], definition: Callable[..., Any]) -> Any:
    """``kernel``, the launcher of ``op``, with a check before its first launch on each device."""
    if op not in _CHECKED:
        return kernel
    passed: set[int] = set()  # indices of devices
    lock = threading.Lock()

    def launch(x: Tensor, *others: Any) -> Any:
        if x.get_device() not in passed:
            check_once(x)
        return kernel(x, *others)

    def check_once(x: Tensor) -> None:
        with lock:
            if x.get_device() in passed or _is_capturing(x.device):
                return
            if os.environ.get(SWITCH, "0") != "1":
                # In a thread of its own, where no mode, no autocast, no memory pool and no stream
                # of the caller is active.
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(check, op, kernel, definition, x.device).result()
            passed.add(x.get_device())

    return launch


def check(
    op: str, kernel: Callable[..., Any], definition: Callable[..., Any], device: torch.device
) -> None:
    """Launch ``op`` on small matrices.

    Raises RuntimeError if a result differs from that of ``definition`` on the CPU.
    """
    for arguments in _arguments(op):
        found = kernel(*(a.to(device) if isinstance(a, Tensor) else a for a in arguments))
        expected = definition(*arguments)
        found, expected = ((r,) if isinstance(r, Tensor) else r for r in (found, expected))
        for i, (actual, right) in enumerate(zip(found, expected, strict=True)):
            wrong = _differences(actual.cpu(), right)
            if wrong:
                what = f"result {i}, {wrong} of {right.numel()} elements"
                raise RuntimeError(_message(op, arguments[1:], what, device))


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _arguments(op: str) -> Iterator[tuple[Any, ...]]:
    """The arguments of each launch of a check: a CPU matrix, and the op's other arguments.

    The sizes of the groups of `cast_tokens`, 33, 1 and 17, and of `cast_tokens_mx`, 1 and 129,
    leave nothing of their results unwritten.
    """
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    random = torch.Generator().manual_seed(0)
    exponents = torch.randint(-12, 12, (80, 1), generator=random, device="cpu").float()
    x = torch.randn(80, 144, generator=random, device="cpu", dtype=torch.float32)
    x = (x * exponents.exp2()).bfloat16()
    x[5:9, 60:70] = 0.0
    x[7, 65] = -0.0
    if op == "cast_dynamic":  # anything infinite would leave no other code to compare
        yield from ((x, dtype, False, True, True) for dtype in (e4m3, e5m2))
        return
    x[-1, -3:] = torch.tensor([float("inf"), -float("inf"), float("nan")], device="cpu")
    scale = torch.full((1, 1), 0.25, dtype=torch.float32, device="cpu")
    if op == "cast":
        amax = torch.zeros((), dtype=torch.float32, device="cpu")
        yield from ((x, scale, dtype, True, True, amax) for dtype in (e4m3, e5m2))
    elif op == "cast_rowwise":
        yield from ((x, dtype, True, True, True) for dtype in (e4m3, e5m2))
    elif op == "cast_blockwise":
        yield from ((x, e4m3, True, *block, True, True) for block in ((1, 128), (128, 128)))
    elif op == "cast_mx":
        yield (x, e4m3, "e8m0", True, True, True)
    elif op == "cast_tokens_mx":
        offs = torch.tensor([1, 130], dtype=torch.int32, device="cpu")
        yield (x.repeat(2, 1)[:130], offs, (1, 32), e4m3, "e8m0", None, 128, True, True)
    elif op == "cast_tokens":
        offs = torch.tensor([33, 34, 51], dtype=torch.int32, device="cpu")
        for block, given in (
            ((-1, -1), scale),
            ((-1, -1), None),
            ((1, -1), None),
            ((1, 128), None),
        ):
            scale_format = definition.scale_format_of(block[0] == 1)
            yield x[:51], offs, block, e4m3, scale_format, given, 16, True, True
    else:
        yield (x.view(torch.uint8).view(e4m3),)


def _differences(found: Tensor, expected: Tensor) -> int:
    """The number of elements with different bits; all NaNs count as equal."""
    if found.shape != expected.shape:
        return expected.numel()
    integer = {1: torch.uint8, 4: torch.int32}[expected.element_size()]
    differ = found.contiguous().view(integer) != expected.contiguous().view(integer)
    return int((differ & ~(found.float().isnan() & expected.float().isnan())).sum())


def _message(op: str, arguments: tuple[Any, ...], what: str, device: torch.device) -> str:
    given = ", ".join(
        str(a.tolist() if isinstance(a, Tensor) and a.numel() < 16 else getattr(a, "shape", a))
        for a in arguments
    )
    compiler, variable = _compiler(device)
    return (
        f"float8::{op}({given}) on {device} differs from its definition in plain PyTorch: {what}. "
        f"It was compiled by Triton {triton.__version__} with {compiler}. ptxas 12.8 and 12.9 are "
        "known to compile some float8 conversions wrongly (triton#11111): set "
        f"{variable} to the ptxas of CUDA 13.1 or later, or install another Triton. "
        f"emulate=True runs without Triton kernels; {SWITCH}=1 skips this check"
    )


def _compiler(device: torch.device) -> tuple[str, str]:
    """The ptxas that Triton uses for a device, and the variable that names another."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "no ptxas", "TRITON_PTXAS_PATH"
    from triton.backends.nvidia.compiler import get_ptxas

    major, minor = torch.cuda.get_device_capability(device)
    tool = get_ptxas(10 * major + minor)
    is_first = tool.path == triton.knobs.nvidia.ptxas.path
    return (
        f"ptxas {tool.version} ({tool.path}) for {torch.cuda.get_device_name(device)}, "
        f"sm_{major}{minor}",
        "TRITON_PTXAS_PATH" if is_first else "TRITON_PTXAS_BLACKWELL_PATH",
    )
