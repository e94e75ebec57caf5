"""Meters: bytes that autograd saves for backward, and products that run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


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


class GemmCounter(TorchDispatchMode):
    """Counts matrix products, whichever way they are spelt."""

    OPS = (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_mm.default,
    )

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.products += func in self.OPS
        return func(*args, **(kwargs or {}))
