"""The API reference has every public name; a strict build refuses less.

It is read as the site's builder reads it: statically, with griffe.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fresh import ROOT

pytest.importorskip("griffe")  # it comes with mkdocstrings, of the extra `docs`

import griffe

from scripts.documentation.api import entries, find, undocumented
from scripts.documentation.docstrings import add_names_on_demand, as_markdown, objects, path_of

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


def test_a_name_without_docstring_or_entry_is_caught(tmp_path):
    _write(tmp_path, TINY)
    assert undocumented(tmp_path) == MISSING


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


def test_full_names_in_docstrings_exist(package):
    named = {
        (obj.path, name)
        for obj in objects(package)
        if obj.docstring is not None
        for name in re.findall(r"(?<!`)`(float8\.[\w.]+)`(?!`)", obj.docstring.value)
    }
    assert len(named) > 100
    assert {each for each in named if path_of(each[1], package) is None} == set()
    assert path_of("float8.no_such_name", package) is None


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


# --- strict


def _built(root: Path) -> subprocess.CompletedProcess[str]:
    """Build a small site with this project's settings, hooks and extension."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    settings = text.partition("\nnav:")[0] + "\nnav: [index.md, api/all.md]\n"
    (root / "mkdocs.yml").write_text(settings, encoding="utf-8")
    shutil.copytree(ROOT / "scripts/documentation", root / "scripts/documentation")
    (root / "scripts/__init__.py").touch()
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": ""}
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"],
        cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


SITE = {
    "README.md": "# Tiny\n\n[a](docs/api/none.md) [b](docs/api/all.md#none) [c](float8/none.py)",
    "docs/other.md": "# Not in the table of contents",
    "docs/api/all.md": "# All\n\n::: float8.told\n\n::: float8.parts.old",
    "float8/__init__.py": TINY["float8/__init__.py"],
    "float8/parts.py": TINY["float8/parts.py"],
}


@pytest.mark.slow
def test_a_strict_build_refuses_each_fault(tmp_path):
    """The site without faults is built by `test_browser.py`."""
    _write(tmp_path, SITE)
    done = _built(tmp_path)
    assert done.returncode != 0
    for problem in (
        "contains a link 'api/none.md'",
        "contains a link 'api/all.md#none', but the doc 'api/all.md' does not contain an anchor",
        "contains a link 'float8/none.py'",
        'not included in the "nav" configuration:\n  - other.md',
        "docs/api/all.md: there is no float8.parts.old",
        MISSING[1],
    ):
        assert problem in done.stderr, (problem, done.stderr)
