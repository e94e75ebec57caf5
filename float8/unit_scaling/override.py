"""Functions that a torch function mode sees as one call, as it sees ``F.linear``.

A transform (`float8.unit_scaling.transforms`) watches the functions that a model calls. What torch
calls a function it sees by itself; `overridable` makes it see ours too, whole, before anything
inside them runs. What to do with one is the mode's choice: replace it, run it as it is, or look
inside (``function.implementation``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

Function = TypeVar("Function", bound=Callable[..., Any])


def overridable(function: Function) -> Function:
    """``function``, which a torch function mode that is on is asked about first."""

    @functools.wraps(function)
    def asks_first(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if has_torch_function(tensors) or _is_mode_on_while_compiling():
            return handle_torch_function(asks_first, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    asks_first.implementation = function  # type: ignore[attr-defined]
    return asks_first  # type: ignore[return-value]


def _is_mode_on_while_compiling() -> bool:
    # What torch.compile makes of has_torch_function knows nothing of modes entered in the graph.
    return torch.compiler.is_compiling() and torch._C._len_torch_function_stack() > 0
