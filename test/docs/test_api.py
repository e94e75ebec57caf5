"""The API reference has every public name; a strict build refuses less.

It is read as the site's builder reads it: statically, with griffe.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import operator
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest
from fresh import ROOT
from pages import blocks_of

pytest.importorskip("griffe")  # it comes with mkdocstrings, of the extra `docs`

import griffe

import float8
from scripts.documentation.api import entries, find, undocumented
from scripts.documentation.docstrings import add_names_on_demand, as_markdown, objects

INDEX = (ROOT / "docs/api/index.md").read_text("utf-8")
OPTIONS = {
    "returns_multiple_items": False,
    "warn_missing_types": False,
    "warn_unknown_params": False,
}


@pytest.fixture(scope="module")
def package():
    top = griffe.load("float8", search_paths=[ROOT], try_relative_path=False)
    for obj in list(objects(top)):
        if obj.is_module:
            add_names_on_demand(obj)
    return top


# --- complete


def test_every_public_name_is_documented():
    assert undocumented(ROOT) == []


def test_no_name_has_two_entries(package):
    found = Counter(find(package, name).path for _, name in entries(ROOT))
    assert [path for path, count in found.items() if count > 1] == []


def _entries() -> set[str]:
    """The names that docs/api shows with a path: what a user imports."""
    entry = re.compile(r"^::: (\S+)\n((?: +.*\n)*)", re.MULTILINE)
    found = set()
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for name, options in entry.findall(page.read_text(encoding="utf-8")):
            heading = re.search(r" heading: (\S+)", options)
            if "show_root_heading: false" not in options:
                found.add(heading[1] if heading else name)
    return {name for name in found if name.startswith("float8.")}


def _rows() -> list[tuple[list[str], list[str]]]:
    """The places and names of each row of the table of public names."""
    cell = r"((?:`[\w.]+`(?:, )?)+)"
    rows = re.findall(rf"^\| {cell} \| {cell} \| \S.* \|$", INDEX, re.MULTILINE)
    return [(re.findall(r"[\w.]+", a), re.findall(r"[\w.]+", b)) for a, b in rows]


def _reached(path: str) -> object:
    """What a path means in a program that has imported its module."""
    with contextlib.suppress(ImportError):
        importlib.import_module(path.rpartition(".")[0])
    return operator.attrgetter(path.partition(".")[2])(float8)


def test_the_table_has_every_name_and_every_name_is_where_it_says():
    """Except the names of the package ``unit-scaling``, which have the same reason."""
    theirs = runpy.run_path(str(ROOT / "test/unit_scaling/test_drop_in.py"))
    mirrored = {f"float8.unit_scaling.{name}" for name in (*theirs["SIGNATURES"], *theirs["NAMES"])}
    public, rows = _entries(), _rows()
    found = [
        path for places, names in rows for name in names
        for path in (f"{place}.{name}" for place in places) if path in public
    ]  # fmt: skip
    assert set(found) ^ (public - mirrored) == set()
    assert len(found) == sum(len(names) for _, names in rows), "a name of a row is not public"
    assert len(rows) == len(re.findall(r"^\| `", INDEX, re.MULTILINE))
    assert [path for path in public if _reached(path) is None] == []
    # ``from place import name`` gives what ``place.name`` is, where a function hides a package too.
    pairs = [(place, name) for places, names in rows for place in places for name in names]
    imports = [(p, n) for p, n in pairs if f"{p}.{n}" in public and importlib.util.find_spec(p)]
    assert ("float8.estimate", "DEVICES") in imports
    for place, name in imports:
        imported = getattr(importlib.import_module(place), name)
        assert imported is _reached(f"{place}.{name}"), (place, name)


def test_guides_import_public_names_only():
    public = _entries()
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    code = "\n".join(
        b.code for p in pages for b in blocks_of(p.read_text("utf-8")) if b.kind == "python"
    )
    names = {
        f"{module}.{name.strip()}"
        for module, one, many in re.findall(
            r"from (float8[\w.]*) import (?:([\w, ]+)|\(([\w,\s]+)\))", code
        )
        for name in (one or many).split(" as ")[0].split(",")
        if name.strip()
    }
    assert [n for n in names if not any(f"{p}.".startswith(f"{n}.") for p in public)] == []


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(inspect.cleandoc(text) + "\n", encoding="utf-8")


TINY = {
    "float8/__init__.py": '''
        """A package."""
        from float8.parts import told, silent, forgotten
        _ON_DEMAND = {"late": "float8.parts"}
        __all__ = ["told", "silent", "forgotten", "late"]
        ''',
    "float8/parts.py": '''
        """Its parts."""
        def told(x):
            """Return x.

            Args:
                x: anything; see `late`.
            """
        def silent(): ...
        def forgotten():
            """Return nothing."""
        def late():
            """Return, at last."""
        ''',
    "float8/other.py": '"""Another part."""',
    "docs/api/all.md": """
        # All

        ::: float8.told

        ::: float8.silent

        ::: float8.late
        """,
}
MISSING = [
    "float8.silent has no docstring",
    "float8.forgotten is nowhere in docs/api: add ::: float8.forgotten",
]


def test_a_name_without_docstring_or_entry_is_caught_and_an_entry_of_nothing(tmp_path):
    """A warning of the build, which is strict."""
    _write(tmp_path, {**TINY, "docs/api/more.md": "::: float8.old"})
    assert undocumented(tmp_path) == ["docs/api/more.md: there is no float8.old", *MISSING]


# --- true


def _told(obj: griffe.Object) -> set[str]:
    """The parameters and attributes that a docstring describes."""
    if obj.docstring is None:
        return set()
    sections = obj.docstring.parse("google", **OPTIONS)
    items = [s.value for s in sections if s.kind.value in ("parameters", "attributes")]
    names = [name for item in items for one in item for name in one.name.split(",")]
    return {name.strip().lstrip("*") for name in names} - {""}


def _taken(obj: griffe.Object) -> set[str]:
    """The parameters of a function; of a class, its attributes too."""
    names = {parameter.name.lstrip("*") for parameter in getattr(obj, "parameters", ())}
    if obj.is_class:
        names |= set(obj.all_members)
        for member in obj.members.values():  # attributes that a method sets
            names |= set(re.findall(r"\bself\.(\w+)", getattr(member, "source", "")))
    return names


def test_docstrings_describe_parameters_that_exist(package):
    wrong = {
        obj.path: unknown
        for obj in objects(package)
        if (obj.is_function or obj.is_class) and (unknown := _told(obj) - _taken(obj))
    }
    assert wrong == {}


# --- readable


def _scope(tmp_path: Path) -> griffe.Module:
    _write(tmp_path, TINY)
    top = griffe.load("float8", search_paths=[tmp_path], try_relative_path=False)
    add_names_on_demand(top)
    return top


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("`told` it", '<autoref identifier="float8.parts.told" optional>`told`</autoref> it'),
        ("`late`", '<autoref identifier="float8.parts.late" optional>`late`</autoref>'),
        ("`float8.parts`", '<autoref identifier="float8.parts" optional>`float8.parts`</autoref>'),
        ("``told``, `nothing`, `told()`", "``told``, `nothing`, `told()`"),
        ("Write ::\n\n    `told`\n\n`x`", "Write\n\n    `told`\n\n`x`"),
        ("Write::\n\n    a = 1", "Write:\n\n    a = 1"),
        (
            "== ====\na  b\n== ====\n1  2\n   3\n4  x|y\n== ====",
            "| a | b |\n| --- | --- |\n| 1 | 2 3 |\n| 4 | x\\|y |\n",
        ),
        ("==== ===\n`a`  1.0\n==== ===", "|  |  |\n| --- | --- |\n| `a` | 1.0 |\n"),
    ],
)
def test_docstrings_become_markdown(text, markdown, tmp_path):
    top = _scope(tmp_path)
    assert as_markdown(text, top.members["other"]) == markdown
