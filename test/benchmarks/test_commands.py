"""Every command runs at tiny sizes, ends with status 0, and writes a result file."""

from __future__ import annotations

import importlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks import bench_alarms, plots
from benchmarks.bench_comm import DDP, FSDP2, QUICK
from benchmarks.measuring.report import ROOT
from benchmarks.models.llama import Llama
from benchmarks.quality import study
from benchmarks.quality.segments import Segment, train
from benchmarks.quality.watched import FAULTS, HEALTHY, watch

TEXT = str(ROOT / "float8")
ONCE = ["--device", "cpu", "--repeats", "1", "--warmup", "1"]
OURS = ["--recipes", "tensorwise", "--no-peer"]
STUDY = ["--quick", "--jobs", "1", "--data", TEXT]
COMMANDS = {
    "bench_matmul": ["--shapes", "32,64,48", *ONCE],
    "bench_linear": ["--shapes", "32,64,48", *OURS, *ONCE],
    "bench_casts": ["--shapes", "32,64", "--casts", "static both", "--contenders", "eager", *ONCE],
    "bench_model": ["--size", "tiny", "--blocks", "1", *OURS, *ONCE],
    "bench_grouped_mm": ["--shapes", "64,32,48,2", *OURS, *ONCE],
    "bench_memory": ["--quick", "--ways", "bf16", "tensorwise+saved_activations+float8_adamw"],
    "bench_optim": ["--quick", "--options", "float8", "--modes", "eager", *ONCE],
    "bench_numerics": ["--size", "cpu", "--batch", "2", "-n", "2", "--recipes", "delayed", *ONCE],
    "bench_unit": ["--quick", "--recipes", "tensorwise", "unit", *ONCE],
    "bench_quality": [*STUDY, "--contenders", "bf16", "tensorwise", "--seeds", "0"],
    "bench_alarms": [*STUDY, "--recipes", "--faults", "inf"],
    "bench_outliers": [*STUDY, "--outliers", "often", "--contenders", "bf16", "smooth delayed"],
    "bench_unit_gpt": [*STUDY, "--contenders", "bf16", "unit_bf16", "unit", "--steps", "2"],
    "bench_bert": [*STUDY, "--models", "unit", "--seeds", "0"],
    "bench_mup_transfer": [*STUDY, "--variant", "u-mup", "mus", "--octaves", "-1", "0"],
}
IN_A_PROCESS = "bench_alarms"  # the runs of the other studies are made here: it takes less time
MISSES = {"bench_memory", "bench_unit_gpt"}  # a target, which is for larger sizes


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_a_result_file(name, tmp_path, monkeypatch):
    if name != IN_A_PROCESS:
        monkeypatch.setattr(study, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    file = tmp_path / "out.json"
    bench = importlib.import_module(f"benchmarks.{name}")
    assert bench.main([*COMMANDS[name], "-o", str(file)]) in ((0, 1) if name in MISSES else (0,))
    report = json.loads(file.read_text())
    assert report["benchmark"] == name
    assert report["rows"] and not any("error" in row for row in report["rows"])
    assert len(report["table"]) > 2
    if name in plots.DRAWN:
        assert plots.main([str(file), "-o", str(tmp_path / "out.svg")]) == 0


def test_bytes_of_collectives_are_those_of_the_parameters(tmp_path):
    """2 bytes each; halves leave a rank of two. Gathered twice, scattered once."""
    bench_comm = importlib.import_module("benchmarks.bench_comm")
    file = tmp_path / "out.json"
    assert bench_comm.main(["--quick", "--processes", "2", "-o", str(file)]) == 0
    rows = {row["form"]: row for row in json.loads(file.read_text())["rows"]}
    sizes = [(p.dim(), p.numel()) for p in Llama(QUICK).parameters()]
    weights, all_of_them = sum(n for dim, n in sizes if dim == 2), sum(n for _, n in sizes)
    assert rows[FSDP2]["bytes"] == {"all_gather": 2 * all_of_them, "reduce_scatter": all_of_them}
    assert rows[DDP]["bytes"]["all_reduce"] == rows[DDP]["gradients"] == 2 * all_of_them
    gathered = rows[f"{FSDP2}, tensorwise, precomputed"]["bytes"]["all_gather"]
    assert gathered == weights + 2 * (all_of_them - weights)


def test_a_checkpoint_is_saved_and_loaded(tmp_path):
    pytest.importorskip("safetensors")
    bench = importlib.import_module("benchmarks.bench_checkpoint")
    file = tmp_path / "out.json"
    bench.main(["--size-mb", "17", "--repeats", "1", "-o", str(file)])
    found = {row["layer"]: row for row in json.loads(file.read_text())["rows"]}
    assert found["peak of save"]["size_mb"] == pytest.approx(16.8, abs=0.1)


def test_an_engine_with_the_trainers_float8_gives_its_probabilities(tmp_path):
    pytest.importorskip("transformers")
    bench = importlib.import_module("benchmarks.bench_rollout")
    file = tmp_path / "out.json"
    arguments = ["--steps", "2", "--batch", "4", "--tokens", "4", "-o", str(file)]
    assert bench.main(arguments) == 0
    found = {(r["weights"], r["inputs"]): r for r in json.loads(file.read_text())["rows"]}
    own = [found.pop((bench.OWN, inputs)) for inputs in ("high precision", "float8 1x128")]
    assert own[1]["largest"] < 1e-4  # rounded at the same places; sums may be in another order
    assert all(r["logp_difference"] > own[0]["logp_difference"] for r in found.values())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_within_the_looks_of_its_rule(fault):
    options = bench_alarms.parse(["--quick", "--recipes", "--faults", fault])
    (run,) = bench_alarms.runs_of(options)
    (line,) = bench_alarms.lines([{"run": vars(run), **watch(run)}])
    assert (line["false_alarms"], line["missed"]) == (0, 0)
    assert line["looks_until"] <= line["allowed"]


@pytest.mark.parametrize("recipe", ["delayed", "unit"])
def test_a_healthy_training_has_no_alarm(recipe):
    (run,) = bench_alarms.runs_of(bench_alarms.parse(["--quick", "--faults", "--recipes", recipe]))
    row = watch(run)
    assert (run.fault, row["alarms"], row["looks"]) == (HEALTHY, 0, 2)


@pytest.mark.parametrize("name", ["bf16", "unit"])
def test_segments_end_with_the_bits_of_one_piece(name, tmp_path):
    sizes = {"layers": 1, "width": 32, "heads": 1, "context": 16, "batch": 2, "held_out": 256}

    def losses(folder, *ends):
        parts = [
            Segment(contender=name, seed=0, steps=6, learning_rate=0.125, first=a, until=b, **sizes)
            for a, b in zip((0, *ends), ends, strict=False)
        ]
        rows = [train(part, folder, ROOT / "benchmarks" / "quality") for part in parts]
        return [loss for row in rows for loss in row["train_loss"]], rows[-1]["loss"]

    assert losses(tmp_path / "whole", 6) == losses(tmp_path / "pieces", 1, 4, 6)


def test_a_study_keeps_what_ended_and_makes_what_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    (run,) = bench_alarms.runs_of(bench_alarms.parse(["--quick", "--recipes", "--faults", "inf"]))
    others = [type(run)(**{**vars(run), "seed": seed}) for seed in (1, 2)]
    options = study.parser("", 1).parse_args(["-o", str(tmp_path / "x.json"), "--device", "cpu"])
    made, fails = [], {1}

    def make(run):
        made.append(run.seed)
        if run.seed in fails:
            raise RuntimeError("no such layer")
        return {"loss": float(run.seed)}

    def call():
        columns = {"loss": ("loss", ".1f")}
        return study.make("x", [], options, [run, *others], make, lambda rows: (rows, []), columns)

    with pytest.raises(SystemExit, match="1 runs failed"):
        call()
    fails.clear()
    assert [row["loss"] for row in call()] == [0.0, 1.0, 2.0]
    assert made == [0, 1, 2, 1]
    with pytest.raises(SystemExit, match="is a file of x, not of y"):
        study.known_rows(options.output, "y")


def test_gradients_in_float8_are_as_near_as_the_page_says():
    bench = importlib.import_module("benchmarks.bench_gradients")
    error = bench.error_on(8, n=4096)
    mean = torch.stack([bench.independent(rank, 4096).double() for rank in range(8)]).mean(0)
    whole, _ = bench.simulated([bench.independent(rank, 4096) for rank in range(8)])
    noise = (whole.double() - mean).square().sum()
    assert error.all_reduce == pytest.approx(float(10 * torch.log10(mean.square().sum() / noise)))
    assert 20 < error.all_reduce < error.reduce_scatter
