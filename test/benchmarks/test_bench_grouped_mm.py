"""`bench_grouped_mm`: its shapes, its rows on small sizes, and its targets."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import pytest
import torch

from benchmarks import bench_grouped_mm
from benchmarks.measuring import experts
from benchmarks.measuring.experts import BASELINE, MODELS, NAMED, RECIPES, Shape
from float8 import Float8LinearConfig
from float8.estimate import roofline

T, K, N, E = 192, 64, 96, 3
TINY = ["--device", "cpu", "--shapes", f"{T},{K},{N},{E}", "--repeats", "2", "--warmup", "1"]


def run(tmp_path: Path, *arguments: str) -> dict:
    file = tmp_path / "out.json"
    assert bench_grouped_mm.main([*TINY, *arguments, "-o", str(file)]) == 0
    return json.loads(file.read_text())


def test_every_recipe_is_measured_against_torchs_grouped_mm(tmp_path):
    found = run(tmp_path, "--no-peer")
    rows = {row["layer"]: row for row in found["rows"]}
    assert list(rows) == [BASELINE, *RECIPES]
    assert [row["error"] for row in rows.values() if "error" in row] == []
    base = rows[BASELINE]
    assert base["saved_mib"] * 2**20 == 2 * T * K + 4 * E  # x, and the ends of the groups
    for recipe in RECIPES:
        row = rows[recipe]
        assert (row["shape"], row["T"], row["E"]) == (f"({T},{K},{N},{E})", T, E)
        pairs = zip(row["samples_s"], base["samples_s"], strict=True)
        assert row["ratio"] == median(mine / other for mine, other in pairs)
        assert row["sqnr_db"] > 20
        plan = Float8LinearConfig.from_recipe_name(recipe).plan
        predicted = roofline.saved_bytes(roofline.Shape(T, K, N, E), plan, roofline.Use(), True)
        assert row["saved_mib"] * 2**20 == predicted + 4 * E, recipe
    assert rows["tensorwise"]["saved_ratio"] < 0.54
    assert "targets" not in found  # those are of another shape


def test_torchaos_grouped_gemm_is_a_row_that_may_fail(tmp_path):
    pytest.importorskip("torchao.prototype.moe_training")
    rows = {row["layer"]: row for row in run(tmp_path, "--recipes", "rowwise", "mxfp8")["rows"]}
    assert list(rows) == [BASELINE, "rowwise", "torchao rowwise", "mxfp8", "torchao mxfp8"]
    assert rows["torchao mxfp8"]["sqnr_db"] > 20
    assert "triton" in rows["torchao rowwise"]["error"]  # on a CPU


def test_a_failure_of_ours_is_the_exit_status(tmp_path, monkeypatch):
    def fail(*_: object, config: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(experts, "grouped_mm", fail)
    assert bench_grouped_mm.main([*TINY, "--no-peer", "--recipes", "rowwise"]) == 1


def test_shapes_are_those_of_the_models():
    assert NAMED["mixtral.gate_up"] == Shape(16384, 4096, 28672, 8, "mixtral.gate_up")
    assert NAMED["qwen3-30b.down"] == Shape(65536, 768, 2048, 128, "qwen3-30b.down")
    for shape in (*NAMED.values(), experts.TARGET):
        assert shape.K % 32 == shape.N % 32 == shape.T % 32 == 0, shape
    assert bench_grouped_mm.shapes_of("mixtral") == MODELS["mixtral"]
    assert bench_grouped_mm.shapes_of("4096,512,1024,8") == (experts.TARGET,)


@pytest.mark.parametrize("text", ["1,2,3", "1,2,3,0", "1,2,3,x", "mistral", ""])
def test_other_shapes_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="four positive numbers T,K,N,E or one of"):
        bench_grouped_mm.shapes_of(text)


@pytest.mark.parametrize("shape", [experts.TARGET, *NAMED.values()], ids=str)
def test_groups_ascend_within_the_tokens_in_multiples_of_32(shape):
    ends = experts.ends(shape, seed=0)
    assert ends.dtype == torch.int32 and ends.shape == (shape.E,)
    assert ends[-1] == shape.T and (ends % 32 == 0).all()
    assert (torch.diff(ends, prepend=ends.new_zeros(1)) >= 0).all()


def test_moved_bytes_by_hand():
    x, w, g = 4096 * 512, 8 * 512 * 1024, 4096 * 1024
    bf16 = 2 * (3 * x + 3 * w + 3 * g)
    assert experts.moved_bytes(experts.TARGET, None) == bf16
    gemms = (x + w + 2 * g) + (g + w + 2 * x) + (g + x + 2 * w)
    assert experts.moved_bytes(experts.TARGET, "tensorwise") == gemms + 6 * x + 8 * w + 6 * g


def test_targets_are_judged_where_they_were_measured():
    rows = [
        {"shape": str(experts.TARGET), "mode": "eager", "layer": "tensorwise", "ratio": 1.7,
         "saved_ratio": 0.5},
        {"shape": str(experts.TARGET), "mode": "compiled", "layer": "rowwise", "ratio": 1.0},
        {"shape": "(1,2,3,4)", "mode": "eager", "layer": "rowwise", "ratio": 1.0},
    ]  # fmt: skip
    judged = [(row["layer"], row["target"], row["met"]) for row in bench_grouped_mm.verdicts(rows)]
    assert judged == [("tensorwise", 1.6, "no"), ("tensorwise", 0.54, "yes")]
