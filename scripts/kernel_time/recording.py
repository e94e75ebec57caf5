"""Records the launches of any Triton kernel, instead of running them.

    with recorded() as launches:
        some_library.some_function(torch.empty(4096, 4096, device="meta"))

``launches`` then has a list for each ``kernel[grid](...)``: one `Variant`, or one for each
configuration of an autotuned kernel. Tensors are on the meta device, which needs no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from float8.kernels.gpu.launch import POINTERS, Variant

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")


@contextmanager
def recorded() -> Iterator[list[list[Variant]]]:
    """Record the launches in this block; each has as many variants as its kernel configurations."""
    launches: list[list[Variant]] = []

    def run(kernel: Any, *values: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launches.append([_variant(kernel, grid, values, keywords)])

    def tuned(tuner: Any, *values: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launches.append(
            [_variant(tuner.fn, grid, values, keywords | c.all_kwargs()) for c in tuner.configs]
        )

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(Autotuner, "run", tuned):
        yield launches


def _variant(
    kernel: Any, grid: Any, values: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Variant:
    arguments = dict(zip(kernel.arg_names, values, strict=False))
    arguments |= {n: value for n, value in keywords.items() if n in kernel.arg_names}
    options = {n: value for n, value in keywords.items() if n in _OPTIONS and value is not None}
    sizes = grid(arguments | options) if callable(grid) else grid
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for parameter in kernel.params:
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            constants[parameter.name] = value
        elif isinstance(value, Tensor):
            types[parameter.name] = f"*{POINTERS[value.dtype]}"
        else:
            types[parameter.name] = "i32" if isinstance(value, int) else "fp32"
    x, y = (*sizes, 1)[:2]
    return Variant(kernel.fn.__name__, kernel, types, constants, options, (x, y), arguments)
