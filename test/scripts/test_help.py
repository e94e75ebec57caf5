"""Every program prints its help and exits with 0."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fresh import ROOT, facts_of

SHELL = sorted((ROOT / "scripts").glob("*.sh"))
PYTHON = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("scripts", "benchmarks", "float8")
    for path in (ROOT / folder).rglob("*.py")
    if re.search(r"^(if __name__|parser = argparse)", path.read_text(encoding="utf-8"), re.M)
)

# All in one interpreter, which imports torch once: how a program ended, and the beginning of what
# it printed.
PROGRAM = """
import contextlib, io, runpy, sys
def run(path):
    sys.argv, out = [path, "--help"], io.StringIO()
    before, status = list(sys.path), "it did not end"
    sys.path.insert(0, path.rpartition("/")[0])
    with contextlib.redirect_stdout(out):
        try:
            if path.startswith("float8") or path.endswith("__main__.py"):
                name = path.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
                runpy.run_module(name, run_name="__main__", alter_sys=False)
            else:
                runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            status = end.code
        except BaseException as error:
            status = repr(error)
    sys.path[:] = before
    return status, out.getvalue()
for path in PATHS:
    facts[path] = run(path)
"""


@pytest.fixture(scope="module")
def ends():
    pytest.importorskip("matplotlib")
    pytest.importorskip("tabulate")
    return facts_of(f"PATHS = {PYTHON!r}\n{PROGRAM}")


@pytest.mark.parametrize("path", PYTHON)
def test_a_program_prints_its_help_and_exits_0(path, ends):
    status, said = ends[path]
    assert status == 0
    name = path.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
    is_module = path.startswith("float8") or path.endswith("__main__.py")
    prog = f"python -m {name}" if is_module else Path(path).name
    assert said.startswith(f"usage: {prog} ")


def test_programs_are_found():
    assert {"scripts/train_gpt.py", "scripts/example_nanochat.py"} <= set(PYTHON)
    assert {"benchmarks/bench_linear.py", "float8/estimate/__main__.py"} <= set(PYTHON)
    assert [path.name for path in SHELL] == [
        *("check.sh", "demo.sh", "docs.sh", "gpu_check.sh", "setup_env.sh", "test.sh"),
        "versions.sh",
    ]


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_a_shell_script_prints_its_help_with_nothing_but_sed(path, option, tmp_path):
    os.symlink(shutil.which("sed"), tmp_path / "sed")  # no Python: nothing can be set up
    done = subprocess.run(
        [shutil.which("bash"), path, "--steps", option],
        env={"PATH": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert f"bash scripts/{path.name}" in done.stdout
    assert "set -" not in done.stdout
    assert "#!" not in done.stdout
