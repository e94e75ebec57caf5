"""`bench_matmul`: its command line, on small sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from types import SimpleNamespace

import pretend
import pytest
from pretend import ROW, PretendCuda, assert_product_of, install_torch_scaled_mm, plain

from benchmarks import bench_matmul
from benchmarks.measuring import report

M, K, N = 48, 128, 64
TINY = ["--device", "cpu", "--shapes", f"{M},{K},{N}", "--repeats", "3", "--warmup", "1"]


def test_every_granularity_is_measured(tmp_path):
    file = tmp_path / "out.json"
    assert bench_matmul.main([*TINY, "-o", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["granularity"] for row in rows] == list(bench_matmul.GRANULARITIES)
    for row in rows:
        pairs = zip(row["samples_s"], row["baseline_samples_s"], strict=True)
        assert row["ratio"] == median(mine / base for mine, base in pairs)
        assert row["tflops"] == pytest.approx(2 * M * K * N / row["ms"] / 1e9)
        assert 24 < row["sqnr_db"] < 40


@pytest.mark.parametrize("name", bench_matmul.ROWWISE)
def test_other_ways_to_run_a_rowwise_product_have_its_numbers(name, monkeypatch):
    """On tensors that say they are on a GPU, where cuBLASLt multiplies as documented."""
    install_torch_scaled_mm(monkeypatch)
    monkeypatch.setattr(bench_matmul.scaled_mm, "architecture", lambda index=None: "sm_90")
    parts = pretend.operands(48, 272, 160, pretend.ROW, pretend.ROW)
    a, b = (
        SimpleNamespace(
            float8_data=data.as_subclass(PretendCuda),
            scale=scale.as_subclass(PretendCuda),
            block=ROW,
        )
        for data, scale in (parts[:2], parts[2:])
    )
    out = plain(bench_matmul.rowwise(a, b, *bench_matmul.ROWWISE[name])())
    assert_product_of(out, parts, ROW, ROW, None, name)


def test_on_a_cpu_there_is_one_way(tmp_path):
    file = tmp_path / "out.json"
    assert bench_matmul.main([*TINY, "--granularities", "rowwise_fast", "-o", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["refused"] and "a choice between GEMMs of a GPU" in row["error"]


def test_an_unknown_granularity_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as exit_:
        bench_matmul.main([*TINY, "--granularities", "int8"])
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert [name for name in ("int8", "rowwise", "tensorwise") if name not in message] == []


def test_a_benchmark_runs_as_a_file_from_anywhere(tmp_path):
    script = report.ROOT / "benchmarks" / "bench_matmul.py"
    command = [sys.executable, str(script), *TINY, "--granularities", "tensorwise"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tensorwise" in done.stdout
