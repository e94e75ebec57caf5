"""HTML as text in which nothing of a run becomes markup."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML. All other text is escaped before it becomes part of the page."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element; ``class_`` is the attribute class, ``aria_label`` is aria-label."""
    named = (
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{''.join(named)}>{joined(children)}</{name}>")


def joined(children: Iterable[object]) -> Markup:
    """Elements and texts, one after the other."""
    return Markup("".join(c if isinstance(c, Markup) else html.escape(str(c)) for c in children))


def breakable(name: str) -> Markup:
    """A long name, which may end a line behind a dot or an underscore."""
    return Markup("<wbr>".join(html.escape(part) for part in re.split(r"(?<=[._])", name)))


def shown(value: float | None, spec: str) -> str:
    """A number in a format such as ``"{:.1f} dB"``; a dash where it is not known."""
    if value is None or math.isnan(value):
        return "\N{EN DASH}"
    return spec.format(value).replace("inf", "∞")


def counted(count: int, noun: str) -> str:
    """Such as "2 casts"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
