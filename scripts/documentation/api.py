"""Whether every public name of the package is documented; the build and a test ask.

Public are the names in the ``__all__`` of every module that has one, except in `INTERNAL`. Each
needs a docstring and, in docs/api, a line ``::: NAME`` with any of its paths. A module needs a
docstring, and an entry for its own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import griffe

from scripts.documentation.docstrings import add_names_on_demand

# Modules whose ``__all__`` is for the package itself.
INTERNAL = ("kernels", "linear.cast", "tensor.dispatch")
_ENTRY = re.compile(r"^::: (\S+)$", re.MULTILINE)


def undocumented(root: Path, package: str = "float8") -> list[str]:
    """What is missing, a line each.

    Args:
        root: the directory of the package and of docs/.
        package: its name.
    """
    top = griffe.load(package, search_paths=[root], try_relative_path=False)
    assert isinstance(top, griffe.Module)
    modules = list(modules_of(top))
    for module in modules:
        add_names_on_demand(module)
    problems, documented = [], set()
    for page, name in entries(root):
        found = find(top, name)
        if found is None:
            problems.append(f"docs/api/{page}: there is no {name}")
        elif top[name.removeprefix(f"{package}.")].is_module and not found.is_module:
            problems.append(f"docs/api/{page}: {name} is a module too: add .{found.name}")
        else:
            documented.add(found.path)
    internal = tuple(f"{package}.{name}" for name in INTERNAL)
    for module in modules:
        if f"{module.path}.".startswith(tuple(f"{name}." for name in internal)):
            continue
        for name in map(str, module.exports or ()):
            if name.startswith("_"):
                continue
            found = find(top, f"{module.path}.{name}")
            if found is None or found.docstring is None:
                problems.append(f"{module.path}.{name} has no docstring")
            if found is not None and not _has_entry(found, documented):
                problems.append(
                    f"{module.path}.{name} is nowhere in docs/api: add ::: {module.path}.{name}"
                )
    return problems


def _has_entry(found: griffe.Object, documented: set[str]) -> bool:
    """Whether an object is documented; of a module, its public names or anything in it."""
    if isinstance(found, griffe.Module):
        inside = any(name.startswith(f"{found.path}.") for name in documented)
        return inside or bool(found.exports)
    return found.path in documented


def entries(root: Path) -> Iterator[tuple[str, str]]:
    """(page, name) of each ``::: NAME`` in docs/api."""
    for page in sorted((root / "docs" / "api").glob("*.md")):
        for name in _ENTRY.findall(page.read_text(encoding="utf-8")):
            yield page.name, name


def modules_of(module: griffe.Module) -> Iterator[griffe.Module]:
    """A module and all modules in it."""
    yield module
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            yield from modules_of(member)


def find(top: griffe.Module, path: str) -> griffe.Object | None:
    """The object of a path, where it is defined.

    Where a function has the name of its module and hides it, the function.
    """
    try:
        found = top[path.removeprefix(f"{top.name}.")]
        found = found.final_target if isinstance(found, griffe.Alias) else found
    except (KeyError, griffe.AliasResolutionError):
        return None
    own = found.members.get(found.name) if found.is_module else None
    if own is None:
        return found
    return own.final_target if isinstance(own, griffe.Alias) else own
