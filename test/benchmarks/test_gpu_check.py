"""`scripts/gpu_check.sh`, with a python3 that only notes what it is asked to run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import bench_linear, bench_model, bench_unit, report, targets

SCRIPT = report.ROOT / "scripts" / "gpu_check.sh"
NINE_MINUTES = 9 * 60
PYTHON = """#!/usr/bin/env bash
echo "$@" >>"$NOTES"
case "$*" in *"$FAILS"*) exit 1 ;; esac
"""


def run(tmp_path: Path, fails: str = "nothing") -> tuple[int, list[list[str]], str]:
    """Exit status, the commands that python3 was given, and the report."""
    python, notes, out = tmp_path / "bin" / "python3", tmp_path / "notes", tmp_path / "out"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "NOTES": str(notes), "FAILS": fails}
    command = ["bash", str(SCRIPT), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    commands = [line.split() for line in notes.read_text().splitlines()]
    return done.returncode, commands, (out / "report.txt").read_text()


def options_of(commands: list[list[str]], script: str) -> list[list[str]]:
    """What a benchmark is called with, each time."""
    return [arguments for program, *arguments in commands if program == f"benchmarks/{script}.py"]


def test_it_attempts_every_part_and_the_target_first(tmp_path):
    status, commands, written = run(tmp_path)
    assert status == 0
    assert "all parts passed" in written
    benchmarks = [command[0] for command in commands if command[0].startswith("benchmarks/")]
    assert benchmarks[0] == "benchmarks/bench_linear.py"
    assert {Path(name).stem for name in benchmarks} == {
        "bench_linear",
        "bench_matmul",
        "bench_casts",
        "bench_memory",
        "bench_model",
        "bench_numerics",
        "bench_optim",
        "bench_overhead",
        "bench_unit",
    }
    assert ["-m", "float8.estimate", "--check"] in [command[:3] for command in commands]


def test_a_part_that_fails_is_named_and_starves_no_other(tmp_path):
    status, commands, written = run(tmp_path, fails="bench_matmul")
    assert status == 1
    assert "gpu_check: failed: bench_matmul" in written
    assert options_of(commands, "bench_overhead")


def test_its_limits_together_stay_under_nine_minutes():
    limits = re.findall(r'^(?:tests \w+|benchmark \w+|part ".*") (\d+)', SCRIPT.read_text(), re.M)
    assert len(limits) == 14
    assert sum(map(int, limits)) < NINE_MINUTES


def test_its_options_are_understood_and_show_every_target(tmp_path):
    _, commands, _ = run(tmp_path)
    first, aten, sweep = (bench_linear.parse(o) for o in options_of(commands, "bench_linear"))
    assert [(shape.M, shape.K, shape.N) for shape in first.shapes] == [targets.SIZES]
    shown = {(recipe, mode) for recipe in first.recipes for mode in first.modes}
    assert {(target.layer, target.mode) for target in targets.TARGETS} - shown == {
        ("rowwise_with_gw_hp", "compiled")  # judged where it is asked for: it takes time to compile
    }
    assert (aten.shapes, aten.compiled_casts) == (first.shapes, "aten")
    assert sweep.shapes[-1].label == "16384"
    (model,) = (bench_model.parse(o) for o in options_of(commands, "bench_model"))
    assert model.modes == ["eager", "compiled"]
    (unit,) = (bench_unit.parse(o) for o in options_of(commands, "bench_unit"))
    assert "unit" in unit.recipes


@pytest.mark.parametrize("arguments", [[], ["one", "two"]])
def test_it_says_how_it_is_called(arguments):
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "usage: bash scripts/gpu_check.sh OUTDIR" in done.stderr
