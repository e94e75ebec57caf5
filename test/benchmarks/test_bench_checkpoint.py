"""`bench_checkpoint`: peaks of fresh processes, and calls that write and read the same tensors."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
import torch
from assertions import assert_bitwise

from benchmarks import bench_checkpoint
from benchmarks.bench_checkpoint import LAYOUTS, MB, Model, resident_model
from float8.checkpoints import load
from float8.checkpoints.shards import Shards


@pytest.fixture
def small(monkeypatch):
    """Weights of 64 kB."""
    monkeypatch.setattr(bench_checkpoint, "WIDTH", 128)
    monkeypatch.setattr(bench_checkpoint, "HIDDEN", 512)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_loaded_again(layout, tmp_path, small):
    model = resident_model(1, layout)
    assert len(model.layers) == 15
    bench_checkpoint.save(model, tmp_path / "it", layout)
    loaded = load(Model(1, "meta"), tmp_path / "it", weights="float8")
    for mine, other in zip(model.layers, loaded.layers, strict=True):
        assert_bitwise(other.weight.float8_data, mine.weight.float8_data)


def test_rows_have_ratios_and_targets(tmp_path, small, monkeypatch, capsys):
    def in_child(what, folder, options):
        if what == "save":
            bench_checkpoint.save(resident_model(1, options.layout), folder, options.layout)
        return {"peak_mb": 1.1 if what == "save" else 1.3}

    monkeypatch.setattr(bench_checkpoint, "in_child", in_child)
    file = tmp_path / "out.json"
    arguments = ["--size-mb", "1", "--repeats", "2", "--folder", str(tmp_path), "-o", str(file)]
    assert bench_checkpoint.main(arguments) == 1
    found = json.loads(file.read_text())
    rows = {row["layer"]: row for row in found["rows"]}
    size = 15 * (128 * 512 + 4 * 4) / MB  # 1 x 4 scales each
    assert rows["peak of save"]["size_mb"] == pytest.approx(size)
    assert rows["peak of save"]["peak_ratio"] == pytest.approx(1.1 / size)
    assert [target["met"] for target in found["targets"]] == ["yes", "no"]
    ours, theirs = rows["save_pretrained"], rows["save_file + fsync"]
    pairs = zip(ours["samples_s"], theirs["samples_s"], strict=True)
    assert ours["ratio"] == median(mine / other for mine, other in pairs)
    assert ours["mb_per_s"] == pytest.approx(size / median(ours["samples_s"]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]
    assert "peak of load" in capsys.readouterr().out


def test_resident_memory_is_that_of_the_process():
    before = bench_checkpoint.resident_bytes("VmRSS")
    x = torch.ones(2**26, dtype=torch.uint8)
    assert bench_checkpoint.resident_bytes("VmRSS") - before > 2**25
    assert bench_checkpoint.resident_bytes("VmHWM") >= before + 2**25
    del x
    with pytest.raises(RuntimeError, match="has no VmNothing"):
        bench_checkpoint.resident_bytes("VmNothing")


def test_a_child_tells_its_peak(tmp_path):
    options = bench_checkpoint.parse(["--size-mb", "16"])
    rows, size = bench_checkpoint.memory(options, Path(tmp_path))
    shards = Shards(tmp_path / "it")
    assert size == sum(spec.nbytes for spec in shards.keys().values()) == 2**24 + 4 * 1024
    # The only weight, and at most as much again.
    assert all(0.8 < row["peak_ratio"] < 3 for row in rows), rows
