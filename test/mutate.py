"""Change the library at random places and see whether a test fails: a check of the tests.

    python test/mutate.py AREA [--count 100] [--seed 0] [--workers 2] [--fast]

A *mutant* is the library with one small change: a comparison flipped, a constant plus one, a call
deleted. It is *caught* if a test fails or hangs. A mutant that survives shows a missing test, or is
*equivalent*: no caller can see the change. A reader judges that; every survivor is printed. Tests
of another area may catch it, and so may tests marked slow or ``cuda``.

Mutants live in copies of the repository in a temporary folder, one copy per worker. Each runs the
tests of its area with ``pytest -x``: first the test file named like the mutated module, then files
that import it, then those of its package, then the others; all of them must pass without a mutant.
The same seed takes the same sample of the same sources. ``--fast`` runs no test that is marked
slow.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "core": ("config", "tensor", "linear", "convert", "kernels"),
    "checkpoints": ("checkpoints",),
    "distributed": ("distributed", "experts"),
    "unit_scaling": ("unit_scaling",),
    "optim": ("optim",),
    "numerics": ("numerics",),
    "rest": ("activations", "estimate", "fusion", "integrations", "ms_amp"),
}
OPTIM_KERNELS = {"moments", "update_rules", "optimizer_step", "stochastic"}  # area optim, not core
TEXT_ONLY = {"__repr__", "__str__", "extra_repr"}  # functions that only write text
SYMMETRIC = {"isinstance", "min", "max"}  # the order of their arguments tests nothing
LOGGING = {"warn", "print", "debug", "info", "warning", "log"}
TOO_LONG = "(a test takes too long)"
FLIPPED = {
    ast.Eq: ast.NotEq, ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.In: ast.NotIn, ast.Is: ast.IsNot,
    ast.NotEq: ast.Eq, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.NotIn: ast.In, ast.IsNot: ast.Is,
}  # fmt: skip
BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change of one file: the bytes from ``start`` to ``end`` become ``after``."""

    path: str
    line: int
    start: int
    end: int
    kind: str
    before: str
    after: str


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """The changes of one node: (kind of change, node that is replaced, new source)."""

    def with_(**fields: object) -> str:
        return f"({ast.unparse(type(node)(**{**vars(node), **fields}))})"

    match node:
        case ast.Compare(ops=[op]):
            yield "comparison", node, with_(ops=[FLIPPED[type(op)]()])
            if type(op) in BOUNDARY:
                yield "boundary", node, with_(ops=[BOUNDARY[type(op)]()])
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            yield "arithmetic", node, with_(op=ARITHMETIC[type(op)]())
        case ast.BoolOp(op=op):
            yield "and/or", node, with_(op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "negation", node, f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield "constant", node, repr(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, repr(value + 1)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return", node, "return None"
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute()]):
            yield "deletion", node, "pass"
        case ast.Call(args=[a, b, *rest], func=called) if (
            (not isinstance(a, ast.Starred) and not isinstance(b, ast.Starred))
            and ast.unparse(called) not in SYMMETRIC
            and ast.dump(a) != ast.dump(b)
        ):
            yield "argument order", node, with_(args=[b, a, *rest])
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(test, ast.Compare | ast.UnaryOp):
                yield "negation", test, f"(not ({ast.unparse(test)}))"


def executable(node: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """The nodes of function bodies that run, without assertions, messages and annotations."""
    call = node.value if isinstance(node, ast.Expr) else node
    called = call.func if isinstance(call, ast.Call) else None
    if (
        isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr)
        or getattr(called, "attr", getattr(called, "id", "")) in LOGGING
        or getattr(node, "name", "") in TEXT_ONLY
        or getattr(node, "arg", "") == "strict"  # of zip: an assertion
    ):
        return
    if inside:
        yield node
    function = isinstance(node, ast.FunctionDef)
    for name, value in ast.iter_fields(node):
        if name == "body" or not (function or name == "annotation"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from executable(child, inside or function)


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Every mutant of a file."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in executable(ast.parse(source)):
        for kind, old, after in changes(node):
            start = starts[old.lineno - 1] + old.col_offset
            end = starts[old.end_lineno - 1] + old.end_col_offset
            before = source.encode()[start:end].decode()
            found.append(Mutant(path, old.lineno, start, end, kind, before, after))
    return found


def mutated(source: bytes, mutant: Mutant) -> bytes:
    """The source of a file with the change of a mutant."""
    return source[: mutant.start] + mutant.after.encode() + source[mutant.end :]


def of_area(path: Path, area: str) -> bool:
    """Whether a file of ``float8/`` or ``test/`` belongs to an area."""
    package, stem = path.parts[1], path.stem.removeprefix("test_")
    owner = "optim" if package == "kernels" and stem in OPTIM_KERNELS else package
    return owner in PACKAGES[area] and "gpu" not in path.parts


def sample(root: Path, area: str, count: int, seed: int) -> list[Mutant]:
    """``count`` mutants of an area, the same for the same seed and sources."""
    files = sorted(p.relative_to(root) for p in (root / "float8").glob("*/**/*.py"))
    found = [
        m for p in files if of_area(p, area) for m in mutants_of(str(p), (root / p).read_text())
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


def tests_of(root: Path, path: str, area: str) -> tuple[list[str], list[str]]:
    """The test files of an area, nearest first: those of a module or importing it, and others."""
    package, name = ".".join(Path(path).parts[:-1]), Path(path).stem
    imports = re.compile(rf"{package}\.{name}\b|from {package} import .*\b{name}\b")
    folder = Path("test", *Path(path).parts[1:-1])

    def distance(test: Path) -> tuple[bool, bool, bool, Path]:
        here = folder in test.parents
        same = here and test.stem == f"test_{name}"
        return not same, not imports.search((root / test).read_text()), not here, test

    files = (p.relative_to(root) for p in (root / "test").glob("*/**/test_*.py"))
    tests = sorted((p for p in files if of_area(p, area)), key=distance)
    near = [str(p) for p in tests if not all(distance(p)[:2])]
    return near, [str(p) for p in tests[len(near) :]]


def run_tests(root: Path, arguments: list[str], limit: float) -> list[str] | None:
    """Run pytest in a copy; the tests that fail, or None if the time limit ends it first.

    One test that takes more than two minutes ends the run and counts as a failure.
    """
    cache = root / ".pytest_cache"
    shutil.rmtree(cache, ignore_errors=True)
    options = ["-q", f"-ocache_dir={cache}", "-ofaulthandler_timeout=120"]
    options += ["-ofaulthandler_exit_on_timeout=true"]
    # No bytecode: a mutant of the same size and second would run the code of the one before.
    environment = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=root,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # processes that tests started and left, too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if code in (0, 5):
        return []
    if code == 4:
        raise ValueError(f"pytest does not take {arguments}")
    failed = cache / "v/cache/lastfailed"
    return list(json.loads(failed.read_text())) if failed.exists() else [TOO_LONG]


def copy_repository(root: Path, to: Path) -> Path:
    """Copy the files that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(command, cwd=root, text=True).split("\0"):
        if name and (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    return to


def failures(
    copies: list[Path], mutants: list[Mutant], area: str, arguments: list[str], limit: float
) -> dict[Mutant, list[str] | None]:
    """What `run_tests` says of each mutant."""
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def run(mutant: Mutant) -> list[str] | None:
        copy = free.get()
        file = copy / mutant.path
        source = file.read_bytes()
        result: list[str] | None = []
        try:
            file.write_bytes(mutated(source, mutant))
            for tests in tests_of(copy, mutant.path, area):  # others are imported if need be
                if tests and result == []:
                    result = run_tests(copy, ["-x", *arguments, *tests], limit)
        finally:
            file.write_bytes(source)
            free.put(copy)
        outcome = "no end" if result is None else result[0] if result else "SURVIVED"
        print(f"{mutant.path}:{mutant.line} {mutant.kind}: {outcome}", flush=True)
        return result

    with ThreadPoolExecutor(len(copies)) as pool:
        return dict(zip(mutants, pool.map(run, mutants), strict=True))


def main() -> None:
    """Print the mutants of a sample that survive, and how many each package catches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("area", choices=PACKAGES)
    parser.add_argument("--count", type=int, default=100, help="size of the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="mutants that run at a time")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one mutant")
    parser.add_argument("--fast", action="store_true", help="run no test marked slow")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copies = [copy_repository(ROOT, Path(folder, str(i))) for i in range(args.workers)]
        mutants = sample(copies[0], args.area, args.count, args.seed)
        marked = ["-m", "not slow"] if args.fast else []
        found = failures(copies, mutants, args.area, marked, args.limit)
    for m in (m for m in mutants if not found[m]):
        why = "survived until the time limit" if found[m] is None else "survived"
        print(f"\n{m.path}:{m.line}: {m.kind}, {why}\n- {m.before}\n+ {m.after}")
    total = Counter(m.path.split("/")[1] for m in mutants)
    caught = Counter(m.path.split("/")[1] for m in mutants if found[m])
    print("\npackage          caught  total")
    for name in [*sorted(total), "all"]:
        numbers = [counts[name] if name != "all" else counts.total() for counts in (caught, total)]
        print(f"{name:16}{numbers[0]:7}{numbers[1]:7}")


if __name__ == "__main__":
    main()
