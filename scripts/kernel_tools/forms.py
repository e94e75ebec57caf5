"""The compiled forms of the kernels that ship: types, compile-time constants, options and grid.

A form is what one launch compiles. `variant` calls a launcher with tensors on the meta device, and
records its last launch instead of making it. `shipped.py` lists the calls of the recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.torch_version import TorchVersion
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from float8.kernels.gpu.launch import TRITON_DTYPES, TRITON_FORMATS, Form

ARCHITECTURES = ("sm_89", "sm_90", "sm_100")  # what is compiled for unless others are asked for

# Triton's name of each dtype.
_POINTERS = {dtype: str(t) for dtype, t in (TRITON_FORMATS | TRITON_DTYPES).items()}
_POINTERS |= {torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}
# In a launch's key: with Triton 3.6, only those that are strings.
_CONSTANTS_HAVE_ATTRIBUTES = TorchVersion(triton.__version__) >= TorchVersion("3.7")


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel.

    Args:
        name: its title in reports.
        kernel: the ``@triton.jit`` function.
        types: each runtime argument's Triton type, in the order of the signature
            (``"*bf16"``, ``"i32"``).
        constants: every compile-time argument.
        options: ``num_warps`` and what else the launch passes.
        programs: the size of the grid.
        arguments: every runtime argument, tensors without memory.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    programs: tuple[int, int] = (1, 1)
    arguments: Mapping[str, Any] = field(default_factory=dict)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def variant(name: str, launcher: Callable[..., Any], *arguments: Any, **options: Any) -> Variant:
    """The form of the last kernel that ``launcher`` launches, for arguments on the meta device."""
    found: list[Variant] = []

    def record(form: Form, programs: Any, *values: Any) -> None:
        grid = (programs, 1) if isinstance(programs, int) else programs
        values = (*form.as_read(values), *form.numbers)
        found.append(_variant(name, form.kernel, grid, values, form.constants))

    with mock.patch.object(Form, "launch", record):
        launcher(*arguments, **options)
    return found[-1]


def _variant(
    name: str,
    kernel: Any,
    programs: tuple[int, int],
    values: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> Variant:
    runtime = dict(zip(kernel.arg_names, values, strict=False))
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for parameter, value in runtime.items():
        is_one = isinstance(value, int) and value == 1 and parameter not in kernel.do_not_specialize
        if value is None or is_one:
            constants[parameter] = None if value is None else 1  # Triton compiles it in
        elif isinstance(value, Tensor):
            types[parameter] = f"*{_POINTERS[value.dtype]}"
        else:
            types[parameter] = "i32" if isinstance(value, int) else "fp32"
    constants |= {n: value for n, value in keywords.items() if n in kernel.arg_names}
    compiler = {n: value for n, value in keywords.items() if n not in kernel.arg_names}
    return Variant(name, kernel, types, constants, compiler, programs, runtime)


def compile_for(variant: Variant, arch: str) -> Any:
    """Triton's compiled kernel; sizes and pointers are multiples of 16, as in training.

    Its key in Triton's cache is that of a launch, so that the two share one compilation.
    """
    signature = {n: variant.types.get(n, "constexpr") for n in variant.kernel.arg_names}
    attributes: dict[tuple[int], list[Any]] = {}
    for i, parameter in enumerate(variant.kernel.params):
        if parameter.name not in variant.types:
            if _CONSTANTS_HAVE_ATTRIBUTES or isinstance(variant.constants[parameter.name], str):
                attributes[(i,)] = []
        elif variant.types[parameter.name] != "fp32" and not parameter.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(variant.kernel, signature, dict(variant.constants), attributes)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return triton.compile(source, target=target, options=dict(variant.options))
