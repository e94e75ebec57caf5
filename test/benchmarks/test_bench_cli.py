"""Both benchmarks, run as people run them, on sizes that take no time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, not installed

from benchmarks import bench_linear, bench_matmul, report
from float8.config import RECIPES

M, K, N = 48, 128, 64
TINY = ["--device", "cpu", "--shapes", f"{M},{K},{N}", "--repeats", "3", "--warmup", "1"]


def run(bench, tmp_path: Path, *arguments: str) -> dict:
    """The report that a benchmark writes when run with `arguments`."""
    file = tmp_path / "out.json"
    assert bench.main([*TINY, *arguments, "-o", str(file)]) == 0
    return json.loads(file.read_text())


def assert_ratios_are_paired(rows: list[dict], baseline: list[float]) -> None:
    for row in rows:
        pairs = zip(row["samples_s"], baseline, strict=True)
        assert row["ratio"] == median(mine / base for mine, base in pairs)


def test_linear_measures_every_recipe(tmp_path, capsys):
    rows = run(bench_linear, tmp_path, "--no-peer")["rows"]
    assert [row["layer"] for row in rows] == ["nn.Linear", *RECIPES]
    assert [row["error"] for row in rows if "error" in row] == []
    assert_ratios_are_paired(rows, rows[0]["samples_s"])
    printed = capsys.readouterr().out
    assert [row["layer"] for row in rows if row["layer"] not in printed] == []


def test_linear_weighs_what_is_saved_for_backward(tmp_path):
    plain, tensorwise = run(bench_linear, tmp_path, "--no-peer", "--recipes", "tensorwise")["rows"]
    assert plain["saved_mib"] == M * K * 2 / 2**20  # the bf16 input; the weight is a parameter
    assert M * K <= tensorwise["saved_mib"] * 2**20 <= 0.52 * M * K * 2


def test_linear_output_resembles_nn_linear(tmp_path):
    # E4M3 keeps 3 mantissa bits: a random operand is off by about 2^-5 of itself, both by 28 dB.
    plain, *rows = run(bench_linear, tmp_path, "--no-peer")["rows"]
    assert "sqnr_db" not in plain
    assert {row["layer"]: row["sqnr_db"] for row in rows if not 24 < row["sqnr_db"] < 40} == {}


def test_a_step_leaves_fresh_gradients():
    options = bench_linear.parse([*TINY, "--no-peer"])
    for name, make in bench_linear.step_makers(options.shapes[0], options).items():
        step = make()
        step()
        first = step.layer.weight.grad.clone()
        step()
        assert torch.equal(step.layer.weight.grad, first) or name == "delayed"
        assert step.layer.weight.grad.norm() < 1.5 * first.norm()  # accumulated, it would be 2


def test_only_delayed_scaling_syncs_and_in_every_step(monkeypatch):
    options = bench_linear.parse([*TINY, "--no-peer"])
    real, synced = bench_linear.sync_float8_amax_and_scale_history, []
    monkeypatch.setattr(
        bench_linear,
        "sync_float8_amax_and_scale_history",
        lambda layer: (synced.append(layer), real(layer)),
    )
    steps = {n: m() for n, m in bench_linear.step_makers(options.shapes[0], options).items()}
    for step in steps.values():
        step()
        step()
    assert synced == [steps["delayed"].layer] * 2


def test_compiled_is_compared_with_compiled(tmp_path, monkeypatch):
    compiled: list[nn.Module] = []

    def note(layer: nn.Module, **kwargs: object) -> nn.Module:
        compiled.append(layer)
        return layer

    monkeypatch.setattr(torch, "compile", note)
    rows = run(bench_linear, tmp_path, "--no-peer", "--compile", "--recipes", "rowwise")["rows"]
    assert [type(layer).__name__ for layer in compiled] == ["Linear", "Float8Linear"]
    assert [row["layer"] for row in rows] == ["nn.Linear", "rowwise"]


def broken_peer(linear: nn.Linear, recipe: str) -> nn.Module:
    raise ImportError("no such symbol")


def test_a_peer_that_fails_is_shown_and_fails_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_linear, "torchao_layer", broken_peer)
    monkeypatch.setattr(bench_linear.importlib.util, "find_spec", lambda name: object())
    rows = run(bench_linear, tmp_path, "--recipes", "tensorwise", "delayed")["rows"]
    assert [row["layer"] for row in rows] == [
        "nn.Linear",
        "tensorwise",
        "torchao tensorwise",
        "delayed",
    ]
    assert rows[2]["error"] == "ImportError: no such symbol"


def test_a_layer_of_ours_that_fails_fails_the_run(monkeypatch, capsys):
    monkeypatch.setattr(bench_linear, "float8_layer", broken_peer)
    assert bench_linear.main([*TINY, "--no-peer", "--recipes", "tensorwise"]) == 1
    assert "ImportError: no such symbol" in capsys.readouterr().out


def test_matmul_measures_every_granularity(tmp_path):
    rows = run(bench_matmul, tmp_path)["rows"]
    assert [row["granularity"] for row in rows] == list(bench_matmul.GRANULARITIES)
    for row in rows:
        assert_ratios_are_paired([row], row["baseline_samples_s"])
        assert row["tflops"] == pytest.approx(2 * M * K * N / row["ms"] / 1e9)
        assert 24 < row["sqnr_db"] < 40


@pytest.mark.parametrize(
    ("bench", "arguments"),
    [(bench_linear, ["--recipes", "int8"]), (bench_matmul, ["--granularities", "int8"])],
)
def test_an_unknown_recipe_is_refused_with_the_known_ones(bench, arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        bench.main([*TINY, *arguments])
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert [name for name in ("int8", "rowwise", "tensorwise") if name not in message] == []


def test_compiling_without_a_compiler_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(bench_linear.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit):
        bench_linear.main([*TINY, "--compile"])
    assert "needs a C++ compiler" in capsys.readouterr().err


def test_a_benchmark_runs_as_a_file_from_anywhere(tmp_path):
    script = report.ROOT / "benchmarks" / "bench_matmul.py"
    command = [sys.executable, str(script), *TINY, "--granularities", "tensorwise"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tensorwise" in done.stdout
