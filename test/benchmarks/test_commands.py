"""Every command runs at tiny sizes, ends with status 0, and writes a result file."""

from __future__ import annotations

import importlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import bench_alarms
from benchmarks.bench_alarms import FAULTS, HEALTHY, watch
from benchmarks.measuring.report import ROOT
from benchmarks.models import text
from benchmarks.quality import study, sums

TEXT = str(ROOT / "float8" / "numerics")
ONCE = ["--device", "cpu", "--repeats", "1", "--warmup", "1"]
OURS = ["--recipes", "tensorwise", "--no-peer"]
STUDY = ["--quick", "--jobs", "1", "--data", TEXT]
COMMANDS = {
    "bench_matmul": ["--shapes", "32,64,48", *ONCE],
    "bench_linear": ["--shapes", "32,64,48", "--recipes", "static", "--no-peer", *ONCE],
    "bench_casts": ["--shapes", "32,64", "--casts", "static both", *ONCE],
    "bench_model": ["--size", "tiny", "--blocks", "1", *OURS, *ONCE],
    "bench_grouped_mm": ["--shapes", "64,32,48,2", *OURS, *ONCE],
    "bench_memory": ["--quick", "--ways", "bf16", "tensorwise+saved_activations+float8_adamw"],
    "bench_training": [
        *("--models", "toy", "--seconds", "1", "--held-out", "4096", "--eager", "--device", "cpu"),
        *("--contenders", "bf16"),
    ],
    "bench_optim": ["--quick", "--options", "float8", "--modes", "eager", *ONCE],
    "bench_numerics": ["--size", "cpu", "--batch", "2", "-n", "2", "--recipes", "delayed", *ONCE],
    "bench_rollout": ["--steps", "1", "--recipes", "blockwise", "bfloat16"],
    "bench_sums": [*STUDY, "--seeds", "0"],
    "bench_quality": [*STUDY, "--contenders", "bf16", "tensorwise", "unit", "--seeds", "0"],
    "bench_alarms": [*STUDY, "--recipes", "--faults", "inf"],
    "bench_mup_transfer": [*STUDY, "--variant", "u-mup", "mus", "--octaves", "-1", "0"],
}
IN_A_PROCESS = "bench_alarms"  # the runs of the other studies are made here: it takes less time


@pytest.mark.filterwarnings("ignore:Using FP8 quantized models requires a GPU")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_a_result_file(name, tmp_path, monkeypatch):
    if name == "bench_rollout":
        pytest.importorskip("transformers")
    if name != IN_A_PROCESS:
        monkeypatch.setattr(study, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    monkeypatch.setattr(sums, "LARGE", math.inf)  # nothing is compiled
    monkeypatch.setattr(text, "installed", lambda: text.load(Path(TEXT)))
    file = tmp_path / "out.json"
    bench = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(bench, "alone", lambda measure, *of_it: measure(*of_it), raising=False)
    assert bench.main([*COMMANDS[name], "-o", str(file)]) in (0, 1)  # 1: a target of larger sizes
    report = json.loads(file.read_text())
    assert report["benchmark"] == name
    assert report["rows"] and not any("error" in row for row in report["rows"])
    assert len(report["table"]) > 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_within_the_looks_of_its_rule(fault):
    options = bench_alarms.STUDY.parse(["--quick", "--recipes", "--faults", fault])
    (run,) = bench_alarms.runs_of(options)
    (line,) = bench_alarms.lines([{"run": vars(run), **watch(run)}])
    assert (line["false_alarms"], line["missed"]) == (0, 0)
    assert line["looks_until"] <= line["allowed"]


def test_a_study_keeps_what_ended_and_makes_what_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    made, fails = [], {1}

    def make(run, data, device):
        made.append(run.seed)
        if run.seed in fails:
            raise RuntimeError("no such layer")
        return {"loss": float(run.seed)}

    def runs(options):
        return [study_run(seed) for seed in options.seeds]

    def study_run(seed):
        sizes = {"recipe": "delayed", "fault": HEALTHY, "steps": 1, "every": 1, "fault_step": 1}
        return bench_alarms.Watched(seed=seed, **sizes)

    columns = {"loss": ("loss", ".1f")}
    one = study.Study("x", "", columns, runs, make, lambda rows: (rows, []), {}, {}, 3, {})
    argv = ["-o", str(tmp_path / "x.json"), "--device", "cpu"]
    with pytest.raises(SystemExit, match="1 runs failed"):
        one.main(argv)
    fails.clear()
    assert one.main(argv) == 0
    rows = study.known_rows(tmp_path / "x.json", "x")
    assert [row["loss"] for row in rows] == [0.0, 1.0, 2.0]
    assert made == [0, 1, 2, 1]
    with pytest.raises(SystemExit, match="is a file of x, not of y"):
        study.known_rows(tmp_path / "x.json", "y")
