"""Frameworks stay outside: nobody pays for one that is not used, and a missing one is named.

Facts about imports are those of fresh processes: one that imports the core and blocks every
framework, and one for each integration whose framework is installed.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from fresh import ROOT, facts_of

FRAMEWORKS = ("accelerate", "lightning", "torchao", "torchtitan", "transformers")
# What a framework brings along by itself.
BRINGS = {"torchtitan": {"torchao"}, "transformers": {"accelerate", "torchao"}}
BRINGS["accelerate"] = {"transformers", "torchao"}
BRINGS["lightning"] = {"accelerate", "transformers", "torchao", "torchtitan"}
NOT_INTEGRATIONS = {"__init__.py", "versions.py"}
INTEGRATIONS = sorted(
    path.stem
    for path in (ROOT / "float8/integrations").glob("*.py")
    if path.name not in NOT_INTEGRATIONS
)

WITHOUT = """
import sys, importlib
from importlib import metadata
frameworks, integrations = {frameworks}, {integrations}
import float8, float8.numerics, float8.integrations.versions
facts["core"] = [name for name in frameworks if name in sys.modules]
version = metadata.version
def missing(package):
    if package in frameworks:
        raise metadata.PackageNotFoundError(package)
    return version(package)
metadata.version = missing
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in frameworks:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
for name in integrations:
    try:
        importlib.import_module(f"float8.integrations.{{name}}")
        facts[name] = "no error"
    except ImportError as error:
        facts[name] = str(error)
""".format(frameworks=FRAMEWORKS, integrations=INTEGRATIONS)


@pytest.fixture(scope="module")
def without():
    return facts_of(WITHOUT)


def test_the_core_imports_no_framework(without):
    assert without["core"] == []


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_a_missing_framework_is_named_with_the_line_that_installs_it(without, name):
    assert f"pip install 'float8[{name}]'" in without[name]


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_an_integration_names_no_other_framework(name):
    tree = ast.parse((ROOT / f"float8/integrations/{name}.py").read_text())
    assert imported_by(tree) & set(FRAMEWORKS) <= {name}


def imported_by(tree: ast.AST) -> set[str]:
    """The packages that a file imports, anywhere in it."""
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    return {name.partition(".")[0] for name in names}
