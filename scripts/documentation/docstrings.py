"""Docstrings as the site needs them; an extension of griffe, which mkdocs.yml names.

Docstrings are written to be read with ``help()``. Three of their habits are not Markdown:

- a name in single backticks becomes a link to its place in the API reference, if it has one;
- a table in reStructuredText, between lines of ``=``, becomes a Markdown table;
- two colons before an indented block become one: Markdown indents code without them.

It also adds the names that ``float8`` imports on first use, which no import statement shows, and
leaves ``cls`` out of functions that a class takes for its class methods.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe

_NAME = re.compile(r"(?<![`\w])`([A-Za-z_][\w.]*)`(?!`)")
_RULER = re.compile(r"^ *=+( +=+)* *$")
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")


class Docstrings(griffe.Extension):
    """Rewrites every docstring of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite the docstrings of a package."""
        for obj in list(objects(pkg)):
            if isinstance(obj, griffe.Module):
                add_names_on_demand(obj)
        for obj in objects(pkg):
            if isinstance(obj, griffe.Function) and isinstance(obj.parent, griffe.Module):
                obj.parameters = griffe.Parameters(*(p for p in obj.parameters if p.name != "cls"))
            if obj.docstring is not None:
                obj.docstring.value = as_markdown(obj.docstring.value, obj)


def add_names_on_demand(module: griffe.Module) -> None:
    """Add the names that a module imports in its ``__getattr__``, from its ``_ON_DEMAND``."""
    table = module.members.get("_ON_DEMAND")
    if not isinstance(table, griffe.Attribute):
        return
    origins: dict[str, str] = ast.literal_eval(str(table.value))
    for name, origin in origins.items():
        source = origin if "." in origin else f"{module.path}.{origin}"
        if name not in module.members:
            module.set_member(name, griffe.Alias(name, f"{source}.{name}"))
    # Griffe does not read ``__all__ += [name for name in _ON_DEMAND ...]``.
    module.exports = list(dict.fromkeys([*(module.exports or ()), *origins]))


def objects(obj: griffe.Object) -> Iterator[griffe.Object]:
    """An object and everything that is defined in it."""
    yield obj
    for member in obj.members.values():
        if isinstance(member, griffe.Object):
            yield from objects(member)


def as_markdown(text: str, scope: griffe.Object) -> str:
    """A docstring in Markdown.

    Args:
        text: the docstring, without indentation.
        scope: the object whose docstring it is.
    """
    lines, done, i = text.split("\n"), [], 0
    in_section = False
    while i < len(lines):
        line = lines[i]
        indent = len(line) - len(line.lstrip())
        if line and not indent:
            in_section = _SECTION.match(line) is not None
        if _RULER.match(line) and " " in line.strip():
            end = max(j for j in range(i, _end_of_block(lines, i)) if _RULER.match(lines[j]))
            done += [*_table(lines[i : end + 1], scope), ""]
            i = end + 1
        elif line.rstrip().endswith("::"):
            title = line.rstrip()[:-1]
            title = title.removesuffix(":") if title.endswith(" :") or title == ":" else title
            done.append(with_links(title.rstrip(), scope))
            end = _end_of_indented(lines, i + 1, indent)
            done += lines[i + 1 : end]
            i = end
        elif indent >= 4 and not in_section and (not done or not done[-1].strip()):
            end = _end_of_indented(lines, i, indent - 1)
            done += lines[i:end]
            i = end
        else:
            done.append(with_links(line, scope))
            i += 1
    return "\n".join(done)


def _end_of_indented(lines: list[str], start: int, indent: int) -> int:
    """The line behind those from ``start`` that are empty or indented by more than ``indent``."""
    end = start
    while end < len(lines) and (
        not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > indent
    ):
        end += 1
    return end


def _end_of_block(lines: list[str], start: int) -> int:
    return next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))


def _table(lines: list[str], scope: griffe.Object) -> list[str]:
    """A reStructuredText simple table in Markdown, its cells joined over lines."""
    starts = [match.start() for match in re.finditer("=+", lines[0])]
    bounds = [(a, b) for a, b in zip(starts, [*starts[1:], None], strict=True)]
    rulers = [i for i, line in enumerate(lines) if _RULER.match(line)]
    has_head = len(rulers) > 2
    rows: list[list[str]] = []
    for i, line in enumerate(lines):
        if i in rulers or re.fullmatch(r" *-+( +-+)* *", line):
            continue
        cells = [line[a:b].strip() for a, b in bounds]
        is_head = has_head and i < rulers[1]
        if rows and (not cells[0] or (is_head and i > 1)):
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
    if not has_head:
        rows.insert(0, [""] * len(starts))
    rows.insert(1, ["---"] * len(starts))
    indent = lines[0][: starts[0]]
    cells_of = [[with_links(cell.replace("|", "\\|"), scope) for cell in row] for row in rows]
    return [textwrap.indent(f"| {' | '.join(row)} |", indent) for row in cells_of]


def with_links(text: str, scope: griffe.Object) -> str:
    """A line in which names in single backticks are links, where the site has a place for them."""

    def link(match: re.Match[str]) -> str:
        path = path_of(match[1], scope)
        if path is None or path in (scope.path, scope.package.path):
            return match[0]
        return f'<autoref identifier="{path}" optional>`{match[1]}`</autoref>'

    return _NAME.sub(link, text)


def path_of(name: str, scope: griffe.Object) -> str | None:
    """The full path of the object of this package that a docstring names, or None."""
    first, _, rest = name.partition(".")
    package = scope.package
    try:
        path = first if first == package.name else scope.resolve(first)
    except griffe.NameResolutionError:
        return None
    path = f"{path}.{rest}" if rest else path
    inside = path.removeprefix(f"{package.name}.")
    if inside == path:
        return None  # of another library
    try:
        found = package[inside]
        # A function that has its module's name hides the module.
        return f"{path}.{found.name}" if found.is_module and found.name in found.members else path
    except (KeyError, griffe.AliasResolutionError):
        return None
