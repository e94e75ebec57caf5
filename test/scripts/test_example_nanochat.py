"""The nanochat-style example trains in float8 and evaluates without, in a separate process."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from fresh import ROOT

SCRIPT = ROOT / "scripts/example_nanochat.py"


@pytest.mark.slow
def test_it_learns_to_count() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, "--steps", "25"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "float8 layers: 4\n" in done.stdout
    loss, without = map(float, re.findall(r"(?:loss|float8) ([\d.]+)", done.stdout))
    assert loss < 1  # from log(64) = 4.2
    assert abs(loss - without) < 0.1
    assert done.stdout.endswith(
        "swapped back: Linear(in_features=128, out_features=128, bias=False)\n"
    )
