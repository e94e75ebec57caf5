"""What every Triton kernel of this room shares: how it is registered, launched, and shipped.

A kernel file holds one op, whole: the ``@triton.jit`` kernel, the function that launches it on CUDA
tensors, the same op in plain PyTorch (from ``reference.py``, for CPU tensors), the shapes that it
returns (for FakeTensors), and the variants that ship. `register` makes an op of them,
``torch.ops.float8.<name>``: torch.compile, CUDA graphs and FakeTensorMode treat it as one of
torch's own.

The files are imported when a CUDA tensor first needs one: Triton costs half a second, and laptops
may not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from float8.kernels.gpu.first_use import checked

LIBRARY = torch.library.Library("float8", "FRAGMENT")

TRITON_FORMATS: dict[torch.dtype, Any] = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.float8_e4m3fnuz: tl.float8e4b8,
    torch.float8_e5m2fnuz: tl.float8e5b16,
}


TRITON_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

REFERENCES: dict[str, Callable[..., Any]] = {}  # op -> the same in plain PyTorch


def register(
    schema: str,
    *,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
) -> Any:
    """Make an op of a kernel and its reference.

    Args:
        schema: as ``torch.library`` takes it, without the namespace.
        kernel: launches on CUDA tensors; see `first_use` for the first time.
        reference: the same op in plain PyTorch, what CPU tensors get.
        fake: returns empty tensors of the right shapes, dtypes and strides.

    Returns:
        the op's only overload, for calling it with the least overhead.
    """
    name = schema.partition("(")[0]
    REFERENCES[name] = reference
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, checked(name, kernel, reference), "CUDA")
    LIBRARY.impl(name, reference, "CPU")
    torch.library.register_fake(f"float8::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.float8, name).default


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel that users get: what is inspected without a GPU.

    Args:
        name: for people.
        kernel: the ``@triton.jit`` function.
        types: each runtime argument's Triton type, in the order of the signature
            (``"*bf16"``, ``"i32"``).
        constants: every compile-time argument.
        options: ``num_warps`` and what else the launch passes.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]


# Contracting a * b + c to one rounding would change bits; Triton's own default is about to change.
NO_FUSION = {"enable_fp_fusion": False}


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it x's."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def check_device(op: str, x: Tensor, **others: Tensor | None) -> None:
    """A kernel follows pointers wherever they point: refuse those of another device."""
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise ValueError(
                f"float8::{op}: {name} is on {other.device} and the operand on {x.device}; "
                f"move it with .to({str(x.device)!r})"
            )


def new_codes(x: Tensor, rows: int, cols: int, wanted: bool, dtype: torch.dtype) -> Tensor:
    """An empty row-major matrix for float8 codes, of no elements if it is not wanted."""
    return torch.empty((rows, cols) if wanted else (0, 0), dtype=dtype, device=x.device)
