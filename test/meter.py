"""Meters: bytes that autograd saves for backward, and products that run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from float8.kernels.cublas import cublas_blockwise_mm


def saved_bytes(forward: Callable[[], Tensor], module: nn.Module) -> int:
    """Bytes of the unique storages that ``forward`` saves for backward, parameters excluded."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = forward()
    del kept
    return sum(storages.values())


# The ops by which torch's own kernels multiply float8 matrices.
TORCH_PRODUCTS = (torch.ops.aten._scaled_mm.default, cublas_blockwise_mm)


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


class CastMeter(TorchDispatchMode):
    """Device-memory bytes that casts move, per element of the matrix they read, and launches.

    Of each op that runs, in eager mode on CUDA: a float8 op of ours moves its matrix as often as
    its kernel reads it (`READS`), plus what it writes; any other op that is neither a view, a
    product nor an empty allocation moves what it reads and writes. Scales and amaxes are noise and
    count too, and are next to nothing.
    """

    # ours -> how often the kernel reads its matrix from device memory, as its docstring says
    READS: ClassVar = {
        "float8::cast": 1,
        "float8::cast_dynamic": 2,
        "float8::transpose": 1,
        "float8::cast_blockwise": 1,
        "float8::cast_mx": 1,
    }
    # ours -> kernels that it launches
    LAUNCHES: ClassVar = {"float8::cast": 1, "float8::cast_dynamic": 2, "float8::transpose": 1}

    def __init__(self) -> None:
        super().__init__()
        self.bytes_by_numel: dict[int, int] = {}
        self.launches = 0
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
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
        return out

    def _is_free(self, func: Any, name: str) -> bool:
        is_question = name.startswith("prim::")
        return func.is_view or is_question or name in ("aten::empty", "aten::detach")

    def _reads(self, name: str, args: Any) -> int:
        if name == "float8::cast_rowwise":
            return 1 + _wants_columns(args)
        if name == "float8::cast_tokens":
            return 1 if _is_one_pass(args) else 2
        return self.READS[name] if name.startswith("float8::") else 1

    def _launches(self, name: str, args: Any) -> int:
        if name == "float8::cast_rowwise":
            return 3 if _wants_columns(args) else 1
        if name == "float8::cast_tokens":
            return 1 if _is_one_pass(args) else 2 + (args[2][0] == 1)
        return self.LAUNCHES.get(name, 1)


def _wants_columns(args: Any) -> bool:
    """Whether `cast_rowwise` casts columns of what lies in memory: they need their amaxes first."""
    x, _, _, rows, cols = args[:5]
    return bool(rows if x.stride(-2) == 1 else cols)


def _is_one_pass(args: Any) -> bool:
    """Whether `cast_tokens` finds its scales in the read that casts."""
    _, _, block, _, _, scale, _, _, transposed = args
    whole_columns = transposed and block[1] == -1
    return scale is not None or not (block[0] == -1 or whole_columns)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
