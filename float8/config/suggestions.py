"""Suggestions for unknown names: the nearest known name, or the counterpart of another library's.

A script for another library uses fields, values and configs that float8 does not know. The
error then says what to write. `DIALECTS` holds these hints; `float8.integrations` fills it.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, TypeVar

T = TypeVar("T", bound=type)


@dataclass(frozen=True)
class Dialect:
    """How another library names what this one has too.

    Args:
        library: its name, for messages.
        constructor: the class method of `Float8LinearConfig` that translates its configs; empty
            if there is none.
        fields: a field of its configs -> the counterpart in float8, or advice.
        values: the value of one of its enums -> the expression in float8.
        names: a public name of it -> the counterpart in float8, or advice.
    """

    library: str
    constructor: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


# By the top-level package of the library.
DIALECTS: dict[str, Dialect] = {}


def dialect_of(value: object) -> Dialect | None:
    """The dialect of the library that defines the type of ``value``, or None.

    A library whose configs are not translated counts as none.
    """
    dialect = DIALECTS.get(type(value).__module__.partition(".")[0])
    return dialect if dialect is not None and dialect.constructor else None


def refuse_name(module: str, name: str) -> NoReturn:
    """Raise the error of a module that has no such name; for its ``__getattr__``.

    Raises:
        AttributeError: always; with what to write for a name of another library.
        ImportError: instead, where ``from module import name`` asks for a name of another library:
            Python would replace the text of an AttributeError.
    """
    for dialect in DIALECTS.values():
        if name in dialect.names:
            hint = f"; a script for {dialect.library} imports it: {dialect.names[name]}"
            if sys._getframe(2).f_code.co_name == "_handle_fromlist":
                raise ImportError(f"cannot import name {name!r} from {module!r}{hint}")
            raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'rowwise'?"``, or nothing where no known name is near.

    Args:
        name: the unknown name.
        known: what there is.
    """
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def explains_unknown_fields(cls: T) -> T:
    """A class decorator for dataclasses: an unknown field's error says what to write instead."""
    made: Any = cls
    set_up: Callable[..., None] = made.__init__
    known = [f.name for f in fields(made) if f.init]

    @functools.wraps(set_up)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                hints = [f"; {d.fields[name]}" for d in DIALECTS.values() if name in d.fields]
                hint = hints[0] if hints else did_you_mean(name, known)
                raise TypeError(f"{made.__name__} has no field {name!r}{hint}")
        set_up(self, *args, **kwargs)

    made.__init__ = __init__
    return cls
