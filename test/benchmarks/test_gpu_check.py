"""`scripts/gpu_check.sh`, with a python3 that records the commands that it is given."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from benchmarks import bench_grouped_mm, bench_linear, bench_model
from benchmarks.measuring import report

SCRIPT = report.ROOT / "scripts" / "gpu_check.sh"
NINE_MINUTES = 9 * 60
# What it is told to fail, to lack, to write and to hang on comes from the environment.
PYTHON = """#!/usr/bin/env bash
echo "$@" >>"$NOTES"
case "$*" in
    "-c import $LACKS") exit 1 ;;
    *"benchmarks/$HANGS.py"*) trap '' INT; sleep 60 & wait ;;
    *"$FAILS"*) exit 1 ;;
esac
if [ "$1" = scripts/gpu_first.py ]; then echo "0 of 2 rows failed"; fi
if [ "${@: -2:1}" = -o ]; then echo >"${@: -1}"; fi
echo "output of $1"
"""


class Run:
    """One run: its exit status, the commands that python3 was given, its report, its archive."""

    def __init__(self, tmp_path: Path, script: Path = SCRIPT, **environment: object) -> None:
        python, notes, self.out = tmp_path / "bin" / "python3", tmp_path / "notes", tmp_path / "out"
        python.parent.mkdir()
        python.write_text(PYTHON)
        python.chmod(0o755)
        asked = {"FAILS": "nothing", "LACKS": "nothing", "HANGS": "nothing"}
        env = {
            **os.environ,
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "NOTES": str(notes),
            **{key: str(value) for key, value in (asked | environment).items()},
        }
        done = subprocess.run(
            ["bash", str(script), str(self.out)],
            env=env, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        self.status = done.returncode
        said = [line.split() for line in notes.read_text().splitlines()]
        said = [words for words in said if words[0][0] != "-" or words[0] == "-m"]
        self.commands = [words for words in said if "--warmup 1" not in " ".join(words)]
        self.report = (self.out / "report.txt").read_text()

    def options_of(self, script: str) -> list[list[str]]:
        """What a benchmark is called with, each time."""
        return [rest for program, *rest in self.commands if program == f"benchmarks/{script}.py"]

    def archived(self) -> dict[str, int]:
        with tarfile.open(self.out / "results.tar.gz") as archive:
            return {Path(member.name).name: member.size for member in archive if member.isfile()}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A run in which nothing goes wrong."""
    return Run(tmp_path_factory.mktemp("run"))


def files_of(command: list[str]) -> list[str]:
    return [word for word in command if word.startswith("test/")]


def test_it_attempts_every_part_and_the_most_important_first(run):
    assert run.status == 0
    assert "all parts passed" in run.report
    benchmarks = [command[0] for command in run.commands if command[0].startswith("benchmarks/")]
    assert benchmarks[:2] == ["benchmarks/bench_linear.py", "benchmarks/bench_grouped_mm.py"]
    assert {Path(name).stem for name in benchmarks} == {
        "bench_grouped_mm",
        "bench_linear",
        "bench_matmul",
        "bench_casts",
        "bench_memory",
        "bench_model",
        "bench_numerics",
        "bench_optim",
        "check_estimate",
    }


def test_its_limits_together_stay_under_nine_minutes():
    parts = r'^(?:tests \w+|benchmark \w+|part ".*"|part \w+) (\d+)'
    limits = re.findall(parts, SCRIPT.read_text(), re.M)
    assert len(limits) == 16
    assert sum(map(int, limits)) <= NINE_MINUTES
    assert f"seconds_in_all={NINE_MINUTES}" in SCRIPT.read_text()


def test_a_part_that_hangs_is_killed_and_the_next_ones_run_in_what_is_left(tmp_path):
    """It ignores the interrupt; what it had written down is in the report and the archive."""
    text = SCRIPT.read_text()
    text = text.replace("kill-after=10", "kill-after=1").replace(
        "seconds_in_all=540", "seconds_in_all=12"
    )
    text = re.sub(r"^benchmark bench_matmul 20", "benchmark bench_matmul 1", text, flags=re.M)
    run = Run(tmp_path, changed(tmp_path, text), HANGS="bench_matmul")
    assert run.status == 1
    assert "== bench_matmul: FAILED: stopped after 1 s" in run.report
    assert run.options_of("bench_optim")
    assert "gpu_check: failed: bench_matmul" in run.report


def changed(tmp_path: Path, text: str) -> Path:
    script = tmp_path / "scripts" / "gpu_check.sh"
    script.parent.mkdir()
    script.write_text(text)
    return script


def test_a_missing_package_costs_its_own_part_alone(tmp_path):
    run = Run(tmp_path, LACKS="pytest")
    assert run.status == 1
    assert "not installed: pytest" in run.report and "left out, python3 lacks pytest" in run.report
    assert run.options_of("bench_linear")
    assert not any(command[:2] == ["-m", "pytest"] for command in run.commands)


def test_every_file_with_cuda_tests_is_named_once(run):
    """Named, because collecting the whole suite in every worker takes longer than its tests."""
    on_gpu = [c for c in run.commands if c[:2] == ["-m", "pytest"]]
    named = [file for command in on_gpu for file in files_of(command)]
    inside = {
        str(path.relative_to(report.ROOT))
        for path in (report.ROOT / "test").rglob("test_*.py")
        if re.search(
            r"pytest\.mark\.cuda|^from shapes import .*\bDEVICES\b", path.read_text(), re.M
        )
    }
    inside -= {"test/benchmarks/test_gpu_check.py"}
    covered = {file for file in inside if any(file.startswith(name) for name in named)}
    assert covered == inside
    assert len(named) == len(set(named))


def test_an_amd_gpu_is_not_asked_for_what_is_not_launched_there(tmp_path):
    run = Run(tmp_path, FAILS="torch.version.hip is None")
    assert run.status == 0
    assert "== bench_casts: left out" in run.report
    assert not run.options_of("bench_casts") + run.options_of("bench_grouped_mm")
    (linear, _) = run.options_of("bench_linear")
    assert bench_linear.parse(linear).recipes == ["tensorwise", "delayed", "static", "rowwise"]
    (tests, _) = (c for c in run.commands if c[:2] == ["-m", "pytest"])
    assert "--ignore=test/kernels/gpu" in tests and "test/test_kernel_path.py" not in tests


def test_a_second_gpu_trains_too(run, tmp_path):
    def trainings(run: Run) -> list[str]:
        given = [rest for program, *rest in run.commands if program == "scripts/train_gpt.py"]
        return [options[options.index("--nproc") + 1] for options in given]

    assert trainings(run) == []
    assert trainings(Run(tmp_path, FAILS="device_count")) == ["1", "2"]


def test_its_options_are_understood(run):
    first, sweep = (bench_linear.parse(o) for o in run.options_of("bench_linear"))
    assert [shape.name for shape in first.shapes] == ["70b.attn.wo"]
    assert first.modes == ["eager", "compiled"]
    assert str(sweep.shapes[-1]) == "(16384,16384,16384)"
    model, unit = (bench_model.parse(o) for o in run.options_of("bench_model"))
    assert model.modes == ["eager", "compiled"] and not model.unit
    assert unit.unit and "unit" in unit.recipes
    (grouped,) = (bench_grouped_mm.parse(o) for o in run.options_of("bench_grouped_mm"))
    assert len(grouped.shapes) == 2
    (casts,) = run.options_of("bench_casts")
    assert "--casts" not in casts, "all of them"
