"""Importing unit scaling costs little, and gives what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import float8.unit_scaling as uu

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_it_is_quick_and_loads_no_compiler_no_plots_and_nothing_lazy():
    code = """
import sys, time, float8
before, begin = set(sys.modules), time.process_time()
import float8.unit_scaling
took = time.process_time() - begin
new = set(sys.modules) - before
heavy = ("triton", "torch._dynamo", "torch._inductor", "matplotlib", "pandas", "einops",
         "float8.unit_scaling.transforms", "float8.unit_scaling.analysis")
print([m for m in new if m.startswith(heavy)], took)
"""
    loaded, took = run_python(code).split()
    assert loaded == "[]"
    assert float(took) < 0.3, f"import float8.unit_scaling takes {took} s more than import float8"


def test_every_public_name_is_there():
    for name in uu.__all__:
        assert getattr(uu, name) is not None, name
    assert set(uu.__all__) <= set(dir(uu))


def test_another_name_is_not():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        uu.nothing  # noqa: B018
