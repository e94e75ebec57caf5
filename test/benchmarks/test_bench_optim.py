"""`bench_optim`: every option is compared with torch's AdamW."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import bench_optim
from benchmarks.measuring import harness


def test_eager_steps_are_timed_and_weighed(tmp_path):
    file = tmp_path / "out.json"
    assert (
        bench_optim.main(["--quick", "--modes", "eager", "--device", "cpu", "-o", str(file)]) == 0
    )
    rows = {row["optimizer"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {bench_optim.BASELINE, "torch fused", *bench_optim.OPTIONS}
    assert rows[bench_optim.BASELINE]["ratio"] == 1
    for name in (bench_optim.BASELINE, "float32"):
        assert rows[name]["state_bytes"] == 8
        assert rows[name]["moved_bytes"] == 28
    # Codes, and a scale and two more numbers per group of 128; ragged rows have a group more.
    assert 2.09 < rows["float8"]["state_bytes"] < 2.12
    assert 3.06 < rows["float8 + float16"]["state_bytes"] < 3.08
    assert rows["bf16 stochastic"]["moved_bytes"] < rows["float8"]["moved_bytes"]
    assert all("met" not in row for row in rows.values())  # the target is the compiled step's


def test_a_compiled_step_is_held_to_its_target():
    options = bench_optim.argparse.Namespace(device="cpu")
    samples = {"torch foreach, eager": [1.0, 1.0], "float8, compiled": [1.5, 1.9]}
    step = bench_optim.Step(torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))]), False)
    runs = dict.fromkeys(samples, step)
    rows = bench_optim.rows_of(harness.Rounds(runs, {}, samples), options)
    assert rows[1]["met"] == "yes"
    samples["float8, compiled"] = [2.5, 2.9]
    rows = bench_optim.rows_of(harness.Rounds(runs, {}, samples), options)
    assert rows[1]["met"] == "no"


def test_bandwidth_is_a_share_of_a_copys():
    """A step that moves as many bytes as the copy, in twice the time, has half of its bandwidth."""
    row = {"moved_bytes": 16.0, "parameters": 1 << 25, "ms": 2e3, "optimizer": "float8"}
    found = bench_optim.bandwidth(row, [2.0, 2.2], [1.0, 1.1])
    assert found["share_of_copy"] == pytest.approx(0.5)
    assert found["gb_per_s"] == pytest.approx(2**29 / 2 / 1e9)
    assert found["met"] == "no"
