"""`bench_overhead`, run as people run it: each recipe beside its layer by hand."""

from __future__ import annotations

import json
from statistics import median

import pytest

from benchmarks import bench_overhead
from benchmarks.by_hand import FUNCTIONS

TINY = ["--shapes", "16,32,48", "--repeats", "3", "--warmup", "1"]


def test_every_recipe_is_compared_with_its_layer_by_hand(tmp_path):
    file = tmp_path / "out.json"
    assert bench_overhead.main([*TINY, "-o", str(file)]) == 0
    rows = {row["layer"]: row for row in json.loads(file.read_text())["rows"]}
    for recipe in FUNCTIONS:
        ours, by_hand = rows[recipe], rows[f"by hand {recipe}"]
        pairs = zip(ours["samples_s"], by_hand["samples_s"], strict=True)
        assert ours["overhead"] == median(mine / other for mine, other in pairs)
        assert ours["met"] == ("yes" if ours["overhead"] <= 1.5 else "no")
        assert ours["us"] == ours["ms"] * 1e3
        assert "overhead" not in by_hand
    assert next(iter(rows)) == "nn.Linear"
    assert len(rows) == 1 + 2 * len(FUNCTIONS)


def test_it_is_a_question_to_the_host(capsys):
    with pytest.raises(SystemExit):
        bench_overhead.main([*TINY, "--device", "meta"])
    assert "on a CPU only" in capsys.readouterr().err
