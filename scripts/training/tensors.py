"""Counts the bytes of tensors: storages, each once; of a subclass the plain tensors inside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or the plain ones that a wrapper subclass is made of."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # a DTensor names its mesh as well
            yield from plain_tensors(part)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each once."""
    storages = {
        storage._cdata: storage
        for tensor in tensors
        for plain in plain_tensors(tensor)
        for storage in [plain.untyped_storage()]
    }
    return sum(storage.nbytes() for storage in storages.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors that an optimizer holds for its parameters."""
    leaves = pytree.tree_leaves([dict(state) for state in optimizer.state.values()])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
