"""Meters: bytes that autograd saves for backward, and products that run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measuring.memory import PlainOps
from float8.kernels.cublas import cublas_blockwise_mm


def saved_bytes(forward: Callable[[], Tensor], module: nn.Module) -> int:
    """Bytes of the unique storages that ``forward`` saves for backward, parameters excluded."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, int] = {}
    held: list[Tensor] = []  # until the forward ends: its ops find each other's copies

    def pack(x: Tensor) -> Tensor:
        held.append(x)
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return x  # itself: `saved_activations` finds a copy by the tensor that was saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = forward()
    del kept
    return sum(storages.values())


# The ops by which torch's own kernels multiply float8 matrices.
TORCH_PRODUCTS = (torch.ops.aten._scaled_mm.default, cublas_blockwise_mm)


class Casts(TorchDispatchMode):
    """The sizes of the matrices that are cast, in eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a cast, and run the op."""
        if func is torch.ops.float8.cast.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


class GemmCounter(TorchDispatchMode):
    """Counts matrix products, whichever way they are spelt."""

    OPS = (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        *TORCH_PRODUCTS,
        torch.ops.aten._scaled_grouped_mm.default,
        torch.ops.float8.scaled_mm.default,
    )

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.products += func in self.OPS
        return func(*args, **(kwargs or {}))


class CastMeter(PlainOps):
    """Device-memory bytes that casts move, per element of the matrix they read, and launches.

    Of each op that runs, in eager mode on CUDA: a float8 op of ours moves its matrix as often as
    its kernel reads it (`_reads`), plus what it writes; any other op that is neither a view, a
    product nor an empty allocation moves what it reads and writes. Scales and amaxes are noise and
    count too, and are next to nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_by_numel: dict[int, int] = {}
        self.launches = 0
        self.ops: list[str] = []

    def saw(self, func: Any, args: Any, kwargs: dict[str, Any] | None, out: Any) -> None:
        """Count it."""
        name = func.name().partition(".")[0]
        if func in GemmCounter.OPS or name == "float8::grouped_mm_gpu":
            self.launches += 1
        elif not self._is_free(func, name):
            self.ops.append(name)
            self.launches += self._launches(name, args)
            read = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            written = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
            matrix = max([*read, *written], key=Tensor.numel)
            moved = sum(map(_nbytes, read)) * self._reads(name, args) + sum(map(_nbytes, written))
            seen = self.bytes_by_numel.get(matrix.numel(), 0)
            self.bytes_by_numel[matrix.numel()] = seen + moved

    def _is_free(self, func: Any, name: str) -> bool:
        is_question = name.startswith(("prim::", "profiler::"))
        is_view = func.is_view and name != "aten::to"  # by its schema it may be one
        return (
            is_view or is_question or name in ("aten::empty", "aten::detach", "aten::_unsafe_view")
        )

    def _reads(self, name: str, args: Any) -> int:
        """How often the kernel reads its matrix from device memory, as its docstring says."""
        return 2 if name in CASTS and _amaxes_of(name, args) else 1

    def _launches(self, name: str, args: Any) -> int:
        if name not in CASTS or not (of := _amaxes_of(name, args)):
            return 1
        return 2 if of == "tensor" else 3  # zeros, amaxes, cast


CASTS = ("float8::cast", "float8::cast_tokens")


def _amaxes_of(name: str, args: Any) -> str | None:
    """Of what a pass before the cast finds the amaxes; None where the cast itself does."""
    if name == "float8::cast":
        x, scale, block, _, _, _, rows, cols = args[:8]
        columns = rows if x.stride(-2) == 1 else cols  # of what lies in memory
    else:
        _, _, block, _, _, scale, _, _, columns = args
    if tuple(block) == (-1, -1):
        return None if scale is not None else "tensor"
    return "lines" if columns and block[1] == -1 else None


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
