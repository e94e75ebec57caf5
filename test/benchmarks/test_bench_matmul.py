"""`bench_matmul`: its command line, on small sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median

import pytest

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
