"""Checks of arguments: a TypeError names the expected type, the value, and the remedy.

Public functions ask these before anything else, so that a wrong argument never shows as an
AttributeError from the middle of the library.
"""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def described(value: object) -> str:
    """A few words for an error message: ``None``, ``'x'``, ``a list``, ``the class Linear``."""
    if value is None or isinstance(value, (bool, int, float, torch.dtype)):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    library = type(value).__module__.partition(".")[0]
    origin = f" of {library}" if library in ("torchao", "transformer_engine") else ""
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}{origin}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'rowwise'?"``, or nothing where no known name is near."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def _check(fits: bool, value: object, name: str, such_as: str) -> None:
    if not fits:
        raise TypeError(f"{name} must be {such_as}, got {described(value)}")


def check_type(value: object, wanted: Any, caller: str, argument: str, such_as: str) -> None:
    """Raise TypeError unless ``value`` is of the type ``wanted``, or of one of a tuple of types.

    The message names the public function, its parameter, and what to give instead (``such_as``).
    """
    _check(isinstance(value, wanted), value, f"{caller}: {argument}", such_as)


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise TypeError unless the field ``name`` of a config is a ``kind``."""
    _check(isinstance(value, kind), value, name, f"a {kind.__name__}")


def check_module(value: object, caller: str, argument: str = "model") -> None:
    """Raise TypeError unless ``value`` is an ``nn.Module``.

    ``caller`` and ``argument`` name the public function and its parameter, for the message.
    """
    check_type(value, nn.Module, caller, argument, "an nn.Module")


def check_bool(value: object, name: str) -> None:
    """Raise TypeError unless ``value`` is True or False: the string "false" is true to ``if``."""
    _check(isinstance(value, bool), value, name, "True or False")


def check_tensors(caller: str, **arguments: object) -> None:
    """Raise TypeError unless all arguments, by name, are tensors."""
    for name, value in arguments.items():
        check_type(value, Tensor, caller, name, "a torch.Tensor")


def check_function(value: object, caller: str, argument: str) -> None:
    """Raise TypeError unless ``value`` can be called."""
    _check(callable(value), value, f"{caller}: {argument}", "a function")


def check_integer(value: Any, name: str, least: int) -> None:
    """Raise TypeError unless ``value`` is an integer, ValueError if it is less than ``least``."""
    is_integer = isinstance(value, (numbers.Integral, torch.SymInt)) and value is not True
    _check(is_integer and value is not False, value, name, f"an integer >= {least}")
    if value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value}")
