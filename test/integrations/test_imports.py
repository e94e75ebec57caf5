"""Importing float8 imports no framework; an integration imports its own, and no other."""

from __future__ import annotations

import ast

import pytest
from fresh import ROOT, facts_of

FRAMEWORKS = ("accelerate", "lightning", "torchao", "torchtitan", "transformers")
FILES = sorted((ROOT / "float8/integrations").glob("*.py"))


def imported_by(source: str) -> set[str]:
    """The packages that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.partition(".")[0] for name in names}


def extras() -> set[str]:
    """The names in ``INTEGRATIONS`` of setup.py."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INTEGRATIONS":
            return {ast.literal_eval(key) for key in node.value.keys}
    raise AssertionError("setup.py has no INTEGRATIONS")


INTEGRATIONS = [path.stem for path in FILES if imported_by(path.read_text()) & set(FRAMEWORKS)]


def test_the_core_imports_no_framework():
    facts = facts_of(f"""
import sys
import float8, float8.numerics, float8.integrations.conversion
facts["core"] = [name for name in {FRAMEWORKS} if name in sys.modules]
""")
    assert facts["core"] == []


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_an_integration_imports_no_framework_but_its_own(name):
    source = (ROOT / f"float8/integrations/{name}.py").read_text()
    assert imported_by(source) & set(FRAMEWORKS) == {name}


def test_every_extra_has_its_file_and_every_file_its_extra():
    # The file of torchao translates configs without importing it.
    assert extras() == {*INTEGRATIONS, "torchao"} == set(FRAMEWORKS)
