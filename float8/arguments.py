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


def check_module(value: object, caller: str, argument: str = "model") -> None:
    """Raise TypeError unless ``value`` is an ``nn.Module``.

    ``caller`` and ``argument`` name the public function and its parameter, for the message.
    """
    if isinstance(value, nn.Module):
        return
    way_out = ""
    if isinstance(value, torch.optim.Optimizer):
        way_out = "; give the model whose parameters it steps"
    elif isinstance(value, type) and issubclass(value, nn.Module):
        way_out = f"; give an instance, such as {value.__name__}(...)"
    elif isinstance(value, (list, tuple, dict)):
        container = "ModuleDict" if isinstance(value, dict) else "ModuleList"
        way_out = f"; give the model that holds them, or nn.{container}(...) of them"
    raise TypeError(f"{caller}: {argument} must be an nn.Module, got {described(value)}{way_out}")


def check_bool(value: object, name: str) -> None:
    """Raise TypeError unless ``value`` is True or False: the string "false" is true to ``if``."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {described(value)}")


def check_type(value: object, wanted: Any, caller: str, argument: str, such_as: str) -> None:
    """Raise TypeError unless ``value`` is of the type ``wanted``, or of one of a tuple of types.

    The message names the public function, its parameter, and what to give instead (``such_as``).
    """
    if not isinstance(value, wanted):
        raise TypeError(f"{caller}: {argument} must be {such_as}, got {described(value)}")


def check_tensors(caller: str, **arguments: object) -> None:
    """Raise TypeError unless all arguments, by name, are tensors."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{caller}: {name} must be a torch.Tensor, got {described(value)}")


def check_function(value: object, caller: str, argument: str) -> None:
    """Raise TypeError unless ``value`` can be called."""
    if not callable(value):
        raise TypeError(f"{caller}: {argument} must be a function, got {described(value)}")


def check_integer(value: object, name: str, least: int) -> None:
    """Raise TypeError unless ``value`` is an integer, ValueError if it is less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{name} must be an integer >= {least}, got {described(value)}")
    if value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value}")
