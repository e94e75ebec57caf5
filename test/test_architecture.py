"""The house keeps its plan: imports point down, files stay small, and importing costs little.

CONTRIBUTING.md draws the map; this file enforces it. Imports are read from the syntax tree, so that
an import inside a function counts too.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from fresh import ROOT, facts_of

FILES = sorted((ROOT / "float8").rglob("*.py"))
MAX_LINES = 400

# room -> its floor. A room imports rooms of lower floors only, and itself.
FLOORS = {
    "version": 0,
    "formats": 0,
    "granularity": 0,
    "arguments": -1,
    "config": 0.5,  # which speaks of formats and granularities
    "kernels": 1,
    "scaling": 2.0,
    "running_module": 2.0,
    "switch": 2.0,
    "tensor_parts": 2.05,
    "tensor": 2.1,
    "dispatch": 2.2,
    "cast": 2.2,
    "refusals": 3.0,
    "autograd": 3.0,
    "resident_weight": 3.02,
    "linear": 3.05,
    "filters": 3.0,
    "sync": 3.0,
    "weight_cache": 3.1,
    "conversion": 3.08,  # what a conversion did
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
    "norm_readers": 3.2,
    "norm_fusion": 3.3,
    "levels": 4.9,
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


def test_every_room_has_its_floor():
    missing = {room_of(path) for path in FILES} - FLOORS.keys()
    assert missing == set(), "give each its floor here and in CONTRIBUTING.md"


def test_imports_point_down():
    reasons = [
        f"{relative(path)}: {reason}"
        for path in FILES
        for room in rooms_imported(path.read_text())
        if (reason := why_not_allowed(room_of(path), room))
    ]
    assert reasons == []


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


def test_a_file_is_small_enough_to_be_read():
    lines = {relative(path): len(path.read_text().splitlines()) for path in FILES}
    large = {path: count for path, count in lines.items() if count > MAX_LINES}
    assert large == {}, f"over {MAX_LINES} lines: find the second idea in it"


def test_a_file_opens_by_teaching_its_idea():
    silent = [relative(p) for p in FILES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []


def test_there_are_no_drawers():
    drawers = {"utils", "util", "helpers", "common", "misc"}
    found = [relative(path) for path in FILES if drawers & set(path.with_suffix("").parts)]
    # a name of the package unit-scaling, of one function
    assert found == ["float8/unit_scaling/utils.py"]


def test_every_file_has_its_test_in_the_same_place():
    inside = [path.relative_to(ROOT / "float8") for path in FILES if path.name != "__init__.py"]
    tests = [ROOT / "test" / path.with_name(f"test_{path.name}") for path in inside]
    assert [relative(test) for test in tests if not test.is_file()] == []


# --- importing


# Without the optional packages, and noting who asks for one.
PROGRAM = """
import gc, sys, time
asked = []
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "tabulate", "torchao"):
            asked.append(name)
            raise ModuleNotFoundError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import torch
def settings():
    torch.manual_seed(7)
    return (
        str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_num_threads(),
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
    )
before, state = settings(), torch.get_rng_state()
asked.clear()
gc.disable()  # whether a collection of torch's objects falls into the import is chance
begin = time.process_time()
import float8
facts["seconds"] = time.process_time() - begin
gc.enable()
facts["same_numbers"] = torch.equal(torch.get_rng_state(), state)
facts["same_settings"] = settings() == before
layer = float8.Float8Linear(16, 16)
layer(torch.randn(4, 16)).backward(torch.randn(4, 16))
facts["trains"] = layer.weight.grad.isfinite().all().item()
facts["asked"] = asked
facts["kernels"] = [name for name in sys.modules if name.startswith("float8.kernels.gpu")]
"""


@pytest.fixture(scope="module")
def fresh():
    return facts_of(PROGRAM)


def test_float8_works_without_triton(fresh):
    assert fresh["trains"]


def test_importing_float8_and_casting_on_a_cpu_asks_for_no_triton(fresh):
    assert fresh["asked"] == []
    assert fresh["kernels"] == []


def test_importing_float8_costs_little_beside_torch(fresh):
    # The best of three: another process may have taken the processor in one of them.
    seconds = [fresh["seconds"]]
    while min(seconds) >= 0.3 and len(seconds) < 3:
        seconds.append(facts_of(PROGRAM)["seconds"])
    assert min(seconds) < 0.3, f"import float8 takes {min(seconds):.2f} s more than import torch"


def test_importing_float8_changes_no_setting_of_torch(fresh):
    assert fresh["same_settings"]
    assert fresh["same_numbers"], "importing float8 drew random numbers"
