"""What a model is called with, taken apart into tensors and the rest.

The rest, the *skeleton*, is made of constants: nested tuples, with `TENSOR` where a tensor is. It
tells one kind of call from another, and tensors put back into it (`filled`) make the call again.
Under ``torch.compile`` both halves can be handed to a function that runs while tracing, which the
arguments as they are cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

TENSOR = "<tensor>"
_CONSTANTS = (int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)


def skeleton_of(arguments: Any) -> Any:
    """The arguments without their tensors: ``(kind, items)`` for containers, constants as such."""
    if isinstance(arguments, Tensor):
        return TENSOR
    if type(arguments) in (list, tuple):
        return (type(arguments).__name__, *[skeleton_of(item) for item in arguments])
    if type(arguments) is dict:
        items = [(name, skeleton_of(item)) for name, item in arguments.items()]
        return ("dict", *items)
    if isinstance(arguments, tuple) and len(arguments) == 0:
        return ("tuple",)
    return ("constant", arguments)


def filled(skeleton: Any, tensors: Iterator[Tensor]) -> Any:
    """The arguments again, with these tensors."""
    if skeleton == TENSOR:
        return next(tensors)
    kind, *items = skeleton
    if kind == "constant":
        return items[0]
    if kind == "dict":
        return {name: filled(item, tensors) for name, item in items}
    parts = [filled(item, tensors) for item in items]
    return parts if kind == "list" else tuple(parts)


def kind_of(skeleton: Any) -> Any:
    """What calls of a kind have in common, hashable: constants by value, other objects by type."""
    if skeleton == TENSOR:
        return TENSOR
    kind, *items = skeleton
    if kind == "constant":
        (value,) = items
        return type(value), value if isinstance(value, _CONSTANTS) else None
    if kind == "dict":
        return kind, *[(name, kind_of(item)) for name, item in items]
    return kind, *[kind_of(item) for item in items]
