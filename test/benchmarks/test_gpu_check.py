"""`scripts/gpu_check.sh`, with a python3 that records the commands that it is given."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.measuring import report

SCRIPT = report.ROOT / "scripts" / "gpu_check.sh"
# What it is told to fail and to lack comes from the environment.
PYTHON = """#!/usr/bin/env bash
echo "$@" >>"$NOTES"
case "$*" in
    "-c import $LACKS") exit 1 ;;
    *"$FAILS"*) exit 1 ;;
esac
echo "output of $1"
"""


class Run:
    """One run: its exit status, the programs that python3 was given, what it printed."""

    def __init__(self, tmp_path: Path, **environment: str) -> None:
        python, notes, self.out = tmp_path / "bin" / "python3", tmp_path / "notes", tmp_path / "out"
        python.parent.mkdir()
        python.write_text(PYTHON)
        python.chmod(0o755)
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        asked = {"FAILS": "nothing", "LACKS": "nothing", "PATH": path, "NOTES": str(notes)}
        done = subprocess.run(
            ["bash", str(SCRIPT), str(self.out)], env={**os.environ, **asked, **environment},
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        self.status, self.said = done.returncode, done.stdout
        said = [line.split() for line in notes.read_text().splitlines() if line]
        self.commands = [words for words in said if words[0][0] != "-" or words[0] == "-m"]
        self.programs = {words[1] if words[0] == "-m" else words[0] for words in self.commands}

    @property
    def tests(self) -> list[str]:
        (command,) = (words for words in self.commands if words[0] == "-m")
        return command


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A run in which nothing goes wrong."""
    return Run(tmp_path_factory.mktemp("run"))


def test_first_numbers_tests_and_what_is_left_of_nine_minutes_for_the_queue(run):
    assert run.status == 0 and "gpu_check: all passed" in run.said
    assert run.programs == {"scripts/gpu_first.py", "pytest", "benchmarks/gpu.py"}
    last = run.commands[-1]
    assert last[:2] == ["benchmarks/gpu.py", "run"] and last[-2:] == ["-o", str(run.out)]
    assert 500 < int(last[last.index("--seconds") + 1]) <= 540


@pytest.mark.parametrize("part", ["gpu_first", "-m pytest", "benchmarks/gpu.py"])
def test_a_part_that_fails_is_named_and_costs_no_other_part(part, tmp_path):
    run = Run(tmp_path, FAILS=part)
    name = {"gpu_first": "first numbers", "-m pytest": "tests", "benchmarks/gpu.py": "queue"}[part]
    assert run.status == 1 and f"gpu_check: failed: {name}" in run.said
    assert run.programs == {"scripts/gpu_first.py", "pytest", "benchmarks/gpu.py"}


def test_a_missing_package_costs_its_own_part_alone(tmp_path):
    run = Run(tmp_path, LACKS="pytest")
    assert run.status == 1 and "no tests: python3 lacks pytest" in run.said
    assert run.programs == {"scripts/gpu_first.py", "benchmarks/gpu.py"}


def test_every_file_with_cuda_tests_is_named_once(run):
    """Named, because collecting the whole suite in every worker takes longer than its tests."""
    named = [word for word in run.tests if word.startswith("test/")]
    marked = r"pytest\.mark\.cuda|^from shapes import .*\bDEVICES\b"
    files = {
        str(path.relative_to(report.ROOT))
        for path in (report.ROOT / "test").rglob("test_*.py")
        if re.search(marked, path.read_text(), re.M)
    }
    assert set(named) == files and len(named) == len(files)


def test_an_amd_gpu_is_not_asked_for_what_is_not_launched_there(run, tmp_path):
    ignored = "--ignore=test/kernels/gpu"
    assert ignored not in run.tests
    assert ignored in Run(tmp_path, FAILS="torch.version.hip is None").tests
