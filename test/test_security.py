"""SECURITY.md promises what these tests, and those that it names, check.

The library's sources are read as syntax trees: an import inside a function counts too.
"""

from __future__ import annotations

import ast
import functools
import re

from fresh import ROOT

# Modules that run what a file says, start programs or open connections, and calls that do.
MODULES = {"ctypes", "dill", "ftplib", "http", "marshal", "multiprocessing", "pickle", "requests"}
MODULES |= {"runpy", "shelve", "smtplib", "socket", "ssl", "subprocess", "urllib", "webbrowser"}
CALLS = {"__import__", "eval", "exec", "os.popen", "os.system", "torch.hub.load", "torch.load"}

# What float8 adds to the functions and types that torch.load(weights_only=True) may call.
SAFE = {
    "float8/tensor/tensor.py": ["Float8Tensor", "_rebuild"],
    "float8/distributed/sharded_weight.py": ["ShardedWeight", "_rebuild"],
    "float8/optim/gradients.py": ["HeldGradient"],
    "float8/optim/moment.py": ["_rebuild"],
    "float8/unit_scaling/parameter.py": ["_rebuild"],
}


def sources(*folders: str) -> dict[str, str]:
    """Path -> text of every Python file in these folders of the repository."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    """Every node of a source file."""
    return list(ast.walk(ast.parse(source)))


def calls(source: str) -> list[tuple[str, ast.Call]]:
    """Name, as written, and node of every call of a function by its name."""
    nodes = [node for node in nodes_of(source) if isinstance(node, ast.Call)]
    return [(ast.unparse(node.func), node) for node in nodes]


def executes(source: str) -> list[str]:
    """The forbidden modules that a source imports, and the forbidden functions that it calls."""
    imported = []
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append(node.module or "")
    found = [name for name in imported if name.partition(".")[0] in MODULES]
    return found + [name for name, _ in calls(source) if name in CALLS]


def unsafe_loads(source: str) -> list[int]:
    """Lines that call ``torch.load`` without ``weights_only=True``."""
    loads = [node for name, node in calls(source) if name == "torch.load"]
    kept = [{k.arg: ast.unparse(k.value) for k in node.keywords} for node in loads]
    return [
        node.lineno
        for node, keywords in zip(loads, kept, strict=True)
        if keywords.get("weights_only") != "True"
    ]


def test_the_library_reads_no_code_and_opens_no_connection():
    for planted in ("def f():\n    import pickle", "from urllib.request import x", "eval(text)"):
        assert executes(planted)
    found = {path: executes(source) for path, source in sources("float8").items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_scripts_and_benchmarks_load_weights_only():
    files = sources("scripts", "benchmarks")
    assert any("torch.load(" in source for source in files.values())
    found = {path: unsafe_loads(source) for path, source in files.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert unsafe_loads("torch.load(a)\ntorch.load(b, weights_only=False)") == [1, 2]


def test_torch_load_may_call_these_and_nothing_else():
    found: dict[str, list[str]] = {}
    for path, source in sources("float8").items():
        for name, node in calls(source):
            if name.endswith("add_safe_globals"):
                (added,) = node.args
                assert isinstance(added, ast.List)
                items = [x.elts[0] if isinstance(x, ast.Tuple) else x for x in added.elts]
                found[path] = found.get(path, []) + [ast.unparse(x) for x in items]
    assert found == SAFE


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(test/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text("utf-8"))
    assert len(named) >= 15
    missing = [
        f"{path}::{name}"
        for path, name in named
        if f"\ndef {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert missing == []
