"""Which unit-scaled function stands for which function of torch, and how a transform sees calls.

A transform (`float8.unit_scaling.transforms`) is a torch function mode: it sees the functions that
a model calls. Three tables of this file say what it makes of them:

1. `SPELLINGS`: spelling -> torch function. ``x @ w``, ``x.matmul(w)`` and ``torch.matmul(x, w)``
   are one function. Eager mode reports the method behind an operator, ``torch.compile`` the method
   or the operator, and looks through some functions of `torch.nn.functional`.
2. `torch_map`: torch function -> unit-scaled function. Entries are called with the arguments that
   the model wrote for torch, by position or by torch's names, which `handler` translates.
3. `overridable`: a decorator that makes a mode see a unit-scaled function as one call, as it sees
   ``F.linear``, before anything inside it runs. The mode replaces it, calls it, or looks inside
   (``function.implementation``).

Register a function of your own, or another one for a function of torch::

    U.register(torch.nn.functional.silu, my_unit_scaled_silu, replace=True)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

Function = Callable[..., Any]
Decorated = TypeVar("Decorated", bound=Function)


def overridable(function: Decorated) -> Decorated:
    """Make torch function modes see the calls of ``function``, as a decorator.

    `float8.unit_scaling.transforms` are such modes.

    Args:
        function: called with tensors among its arguments.
    """

    @functools.wraps(function)
    def visible(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if has_torch_function(tensors) or _is_mode_on_while_compiling():
            return handle_torch_function(visible, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    visible.implementation = function  # type: ignore[attr-defined]
    return visible  # type: ignore[return-value]


def _is_mode_on_while_compiling() -> bool:
    # has_torch_function under torch.compile misses modes that are entered in the graph.
    return torch.compiler.is_compiling() and torch._C._len_torch_function_stack() > 0


# A spelling takes the arguments of its function. In-place spellings (``x += y``) are one function
# too: a transform must know that the first operand changes.
SPELLINGS: dict[Function, Function] = {
    **{
        getattr(Tensor, name): getattr(torch, name)
        for name in ("matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "add", "softmax")
    },
    **dict.fromkeys((Tensor.__matmul__, operator.matmul, torch.linalg.matmul), torch.matmul),
    # addition commutes, so __radd__ is a spelling too
    **dict.fromkeys((Tensor.__add__, Tensor.__radd__, operator.add), torch.add),
    **dict.fromkeys((Tensor.__iadd__, operator.iadd), Tensor.add_),
    torch.special.softmax: torch.softmax,
    torch.rms_norm: F.rms_norm,
    torch.layer_norm: F.layer_norm,
}


def respelt(func: Any) -> Any:
    """The function that ``func`` is a spelling of, or ``func``."""
    if func is Tensor.unflatten:  # dynamo can neither trace its super() nor find it in a dict
        return torch.unflatten
    return SPELLINGS.get(func, func)


torch_map: dict[Function, Function] = {}
"""torch function -> its unit-scaled function; change it with `register` and `unregister`."""
# torch function -> torch's name of an argument -> ours
_KEYWORDS: dict[Function, Mapping[str, str]] = {}


def register(
    torch_function: Function,
    unit_scaled_function: Function,
    *,
    replace: bool = False,
    keywords: Mapping[str, str] | None = None,
) -> None:
    """Add an entry to ``torch_map``.

    Args:
        torch_function: what models call.
        unit_scaled_function: what a unit-scaled model calls instead, with the same arguments.
        replace: whether an existing entry may be replaced.
        keywords: the unit-scaled function's names for arguments that torch names differently.

    Raises:
        ValueError: there is an entry already and ``replace`` is False.
    """
    if torch_function in torch_map and not replace:
        raise ValueError(f"{torch_function} is registered already; pass replace=True")
    torch_map[torch_function] = unit_scaled_function
    _KEYWORDS[torch_function] = dict(keywords or {})


def unregister(torch_function: Function) -> None:
    """Remove an entry of ``torch_map``; a KeyError if there is none."""
    del torch_map[torch_function]
    _KEYWORDS.pop(torch_function, None)


def handler(torch_function: Function) -> Function:
    """The unit-scaled function for one of torch's, taking torch's keywords; KeyError if none."""
    return renamed(torch_map[torch_function], _KEYWORDS.get(torch_function))


def renamed(function: Decorated, names: Mapping[str, str] | None) -> Decorated:
    """A function that takes keywords of other names: name -> the function's own."""
    if not names:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{names.get(name, name): x for name, x in kwargs.items()})

    return call  # type: ignore[return-value]
