"""Making a model's own functions visible to a torch function mode.

A mode sees the functions of torch, and those that are `overridable`; a plain Python function of a
model, ``def new_gelu(x): ...``, it does not see. Its caller finds it by a name: of a global of a
module, of a variable of an enclosing function, of an attribute of an ``nn.Module``. `made_visible`
puts the function, wrapped by `overridable`, behind all of these names.

That is done once and stays, in the user's modules, since the name is looked up by all models of the
same class: while no transform looks, the wrapped function does what the function did, for every
caller. Patching it for the length of a forward instead would not be safe with threads, nor
possible under ``torch.compile``, which checks that globals are what they were.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from float8.unit_scaling.override import overridable

Function = Callable[..., Any]
Put = Callable[[Function], None]

_VISIBLE: weakref.WeakValueDictionary[Function, Function] = weakref.WeakValueDictionary()


def made_visible(model: nn.Module, functions: Iterable[Function]) -> None:
    """Have a torch function mode see calls of these functions by a model.

    Args:
        model: its submodules' attributes are changed, and names that their classes' methods use.
        functions: functions of torch and overridable ones are seen already.

    Raises:
        ValueError: a function is not found behind any name, or is no Python function.
    """
    found: list[tuple[Function, list[Put]]] = []  # all of them, before the first is put in place
    for function in functions:
        if is_visible(function):
            continue
        if not isinstance(function, types.FunctionType):
            raise ValueError(
                f"replace: {function!r} is neither a function of torch nor one that was written "
                "in Python, and its calls cannot be seen; replace a function that calls it"
            )
        known = function in _VISIBLE  # and its names, perhaps all, lead to the wrapped one
        visible = _VISIBLE.setdefault(function, overridable(function))
        names = [
            *_in_modules(function),
            *_in_cells(model, function),
            *_in_attributes(model, function),
        ]
        if not names and not known:
            raise ValueError(
                f"replace: {function.__qualname__} is not found as a global of a module, a "
                "variable that the model's methods enclose or an attribute of its modules. "
                "Decorate it with float8.unit_scaling.override.overridable where it is defined"
            )
        found.append((visible, names))
    for visible, names in found:
        for put in names:
            put(visible)


def is_visible(function: Function) -> bool:
    """Whether a torch function mode sees calls of a function."""
    module = getattr(function, "__module__", None) or "torch"
    return hasattr(function, "implementation") or module.partition(".")[0] in ("torch", "_operator")


def _in_modules(function: Function) -> Iterator[Put]:
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for name, value in list(names.items()):
                if value is function:
                    yield _setter(names, name)


def _setter(names: dict[str, Any], name: str) -> Put:
    return lambda visible: names.__setitem__(name, visible)


def _in_cells(model: nn.Module, function: Function) -> Iterator[Put]:
    classes = {base for module in model.modules() for base in type(module).__mro__}
    methods = [m for c in classes for m in vars(c).values() if isinstance(m, types.FunctionType)]
    seen: set[int] = set()
    while methods:
        method = methods.pop()
        for cell in method.__closure__ or ():
            if id(cell) in seen:
                continue
            seen.add(id(cell))
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if value is function:
                yield _cell_setter(cell)
            elif isinstance(value, types.FunctionType):
                methods.append(value)


def _cell_setter(cell: Any) -> Put:
    return lambda visible: setattr(cell, "cell_contents", visible)


def _in_attributes(model: nn.Module, function: Function) -> Iterator[Put]:
    for module in model.modules():
        for name, value in vars(module).items():
            if value is function:
                yield _attribute_setter(module, name)


def _attribute_setter(module: nn.Module, name: str) -> Put:
    return lambda visible: setattr(module, name, visible)
