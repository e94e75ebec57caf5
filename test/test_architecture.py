"""The house keeps its plan: imports point down, files stay small, and importing costs little.

CONTRIBUTING.md draws the map; this file enforces it. Imports are read from the syntax tree, so that
an import inside a function counts too.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "float8").rglob("*.py"))
MAX_LINES = 400

# room -> its floor. A room imports rooms of lower floors only, and itself.
FLOORS = {
    "formats": 0,
    "granularity": 0,
    "config": 0.5,  # which speaks of formats and granularities
    "kernels": 1,
    "scaling": 2.0,
    "tensor": 2.1,
    "dispatch": 2.2,
    "cast": 2.2,
    "refusals": 3.0,
    "autograd": 3.0,
    "linear": 3.05,
    "filters": 3.0,
    "sync": 3.0,
    "weight_cache": 3.1,
    "convert": 3.1,  # which puts layers into models
    "unit_scaling": 4,
    "distributed": 4,
    "optim": 4,
    "activations": 4,
    "estimate": 4,
    "numerics": 4,
    "inference": 3.2,
    "fused_autograd": 3.15,
    "fused": 3.2,
    "ms_amp": 5,
    "integrations": 5,
    "__init__": 6,
}
# A room that may not use all that is below it.
ONLY = {"kernels": {"formats", "granularity"}}


def room_of(path: Path) -> str:
    """The first part of a module's path in the package: ``kernels`` for kernels/reference.py."""
    return path.relative_to(ROOT / "float8").with_suffix("").parts[0]


def rooms_imported(source: str) -> set[str]:
    """The rooms of float8 that a source file imports, anywhere in it."""
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"line {node.lineno}: relative import; write `from float8...`")
        if isinstance(node, ast.ImportFrom) and node.module == "float8":
            # A name that is no room comes from the package itself, which is the top floor.
            names = {alias.name for alias in node.names}
            rooms |= {name if is_room(name) else "__init__" for name in names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("float8."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            parts = [alias.name.split(".") for alias in node.names]
            rooms |= {[*p, "__init__"][1] for p in parts if p[0] == "float8"}
    return rooms


def is_room(name: str) -> bool:
    return (ROOT / "float8" / name).is_dir() or (ROOT / "float8" / f"{name}.py").is_file()


def why_not_allowed(importer: str, imported: str) -> str | None:
    """The reason why one room may not import another, or None."""
    if importer == imported:
        return None
    if importer in ONLY and imported not in ONLY[importer]:
        return f"{importer} may import {sorted(ONLY[importer])} only"
    if FLOORS[imported] >= FLOORS[importer]:
        return f"{importer} (floor {FLOORS[importer]}) is not above {imported} ({FLOORS[imported]})"
    if imported == "dispatch" and importer != "__init__":
        return "only float8/__init__.py imports dispatch"
    return None


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


EVERY_FILE = pytest.mark.parametrize("path", FILES, ids=relative)


@EVERY_FILE
def test_imports_point_down(path):
    importer = room_of(path)
    assert importer in FLOORS, f"{importer} has no floor: give it one here and in CONTRIBUTING.md"
    reasons = [why_not_allowed(importer, room) for room in rooms_imported(path.read_text())]
    assert [reason for reason in reasons if reason] == []


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("formats", "from float8.config import CastConfig"),
        ("config", "import float8.kernels"),
        ("kernels", "from float8.config import CastConfig"),
        ("kernels", "def f():\n    from float8.tensor import Float8Tensor"),
        ("scaling", "if True:\n    from float8 import tensor"),
        ("tensor", "from float8.dispatch import views"),
        ("tensor", "from float8 import Float8Linear"),
        ("cast", "import float8.dispatch.views as v"),
        ("linear", "from float8.convert import convert_to_float8_training"),
        ("convert", "from float8 import dispatch"),
    ],
)
def test_an_import_that_points_up_is_seen(importer, line):
    assert any(why_not_allowed(importer, room) for room in rooms_imported(line))


def test_a_relative_import_is_seen():
    with pytest.raises(AssertionError, match="relative import"):
        rooms_imported("from . import tensor")


def test_the_composition_root_teaches_the_tensor_its_operations():
    assert "dispatch" in rooms_imported((ROOT / "float8/__init__.py").read_text())


@EVERY_FILE
def test_a_file_is_small_enough_to_be_read(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{relative(path)} has {lines} lines: find the second idea in it"


@EVERY_FILE
def test_a_file_opens_by_teaching_its_idea(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_there_are_no_drawers():
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert [relative(path) for path in FILES if drawers & set(path.with_suffix("").parts)] == []


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.name != "__init__.py"], ids=relative
)
def test_every_file_has_its_test_in_the_same_place(path):
    inside = path.relative_to(ROOT / "float8")
    test = ROOT / "test" / inside.with_name(f"test_{inside.name}")
    assert test.is_file(), f"{relative(path)} is tested by no {relative(test)}"


# --- importing


def run_python(code: str, *options: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_float8_works_without_triton():
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "tabulate", "torchao"):
            raise ModuleNotFoundError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import torch, float8
layer = float8.Float8Linear(16, 16)
layer(torch.randn(4, 16)).backward(torch.randn(4, 16))
print(layer.weight.grad.isfinite().all().item(), "triton" in sys.modules)
"""
    assert run_python(code).split() == ["True", "False"]


def test_importing_float8_costs_little_beside_torch():
    # The best of three: another process may have taken the processor in one of them.
    code = (
        "import time, torch\n"
        "begin = time.process_time()\n"
        "import float8\n"
        "print(time.process_time() - begin)"
    )
    best = min(float(run_python(code)) for _ in range(3))
    assert best < 0.3, f"import float8 takes {best:.2f} s more than import torch"


def test_importing_float8_changes_no_setting_of_torch():
    code = """
import torch
def settings():
    return (
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        torch.rand(()).item(),
    )
torch.manual_seed(7)
before = settings()
torch.manual_seed(7)
import float8
print(before == settings())
"""
    assert run_python(code).strip() == "True"
