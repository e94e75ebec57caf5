"""Importing float8 imports no framework, and a missing framework is named.

Facts about importing are those of fresh processes: one that imports the core and every integration
while all frameworks are missing, and one that imports each integration that is installed.
"""

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
# float8 imports the file of torchao; that imports torchao when it is asked to translate a config.
AT_IMPORT = [name for name in INTEGRATIONS if name != "torchao"]

WITHOUT = f"""
import importlib, sys
from importlib import metadata
frameworks = {FRAMEWORKS}
import float8, float8.numerics, float8.integrations.conversion
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
for name in {AT_IMPORT}:
    try:
        importlib.import_module(f"float8.integrations.{{name}}")
        facts[name] = "no error"
    except ImportError as error:
        facts[name] = str(error)
facts["after"] = [name for name in frameworks if name in sys.modules]
"""


@pytest.fixture(scope="module")
def without():
    return facts_of(WITHOUT)


def test_the_core_imports_no_framework(without):
    assert without["core"] == without["after"] == []


@pytest.mark.parametrize("name", AT_IMPORT)
def test_a_missing_framework_is_named_with_the_line_that_installs_it(without, name):
    assert f"pip install 'float8[{name}]'" in without[name]


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_an_integration_imports_no_framework_but_its_own(name):
    source = (ROOT / f"float8/integrations/{name}.py").read_text()
    assert imported_by(source) & set(FRAMEWORKS) == {name}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_integrations_do_not_import_each_other(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {f"float8.integrations.{name}" for name in INTEGRATIONS}
    assert modules & others == set()


def test_every_extra_has_its_file_and_every_file_its_extra():
    assert extras() == set(INTEGRATIONS) == set(FRAMEWORKS)
