"""Predicted times beside measured ones, for files whose times the model made up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from result_files import linear_rows, matmul_rows, write

from benchmarks import check_estimate
from benchmarks.bench_casts import CASTS
from benchmarks.cost_model.beside import PASSES, tables
from float8.config import RECIPES
from float8.estimate import DEVICES
from float8.estimate.devices import Figure
from float8.estimate.roofline import layer_seconds
from float8.estimate.shapes import Shape, Use

H200 = DEVICES["H200"]
NAME = "NVIDIA H200"
LAYERS = [Shape(16384, 8192, 8192), Shape(4096, 4096, 4096)]
EXPERTS = Shape(65536, 4096, 4096, 8)


def cast_rows(slower: float) -> list[dict]:
    """A dynamic cast, in two passes."""
    seconds = sum(
        H200.pass_seconds(name, moved * 8192 * 8192)
        for name, moved in (("amax tensorwise", 2), ("cast tensorwise", 4))
    )
    rows = [
        {"shape": "(8192, 8192)", "cast": "dynamic both", "contender": who, "bytes_per_element": 6,
         "ms": slower * seconds * 1e3}
        for who in ("kernel", "eager")
    ]  # fmt: skip
    return [*rows, {"shape": "(1, 1)", "cast": "static rows", "contender": "kernel", "error": "x"}]


def grouped_rows() -> list[dict]:
    T, K, N, E = EXPERTS.M, EXPERTS.K, EXPERTS.N, EXPERTS.E
    plans = {"F.grouped_mm": None, "rowwise": RECIPES["rowwise"].plan}
    rows = [
        {"layer": name, "mode": "eager", "T": T, "K": K, "N": N, "E": E,
         "ms": layer_seconds(H200, EXPERTS, plan, Use()).total * 1e3}
        for name, plan in plans.items()
    ]  # fmt: skip
    return [*rows, {**rows[0], "layer": "torchao rowwise"}, {**rows[0], "layer": "mxfp8"}]


@pytest.fixture
def files(tmp_path):
    """The four results of a machine that is as predicted, but for casts that take twice as long."""
    return {
        name: write(tmp_path / f"{name}.json", name, rows, NAME)
        for name, rows in (
            ("bench_linear", linear_rows(H200, LAYERS)),
            ("bench_matmul", matmul_rows(H200, LAYERS)),
            ("bench_casts", cast_rows(2.0)),
            ("bench_grouped_mm", grouped_rows()),
        )
    }


def test_every_file_has_its_table_and_the_summary_its_median(files):
    said = tables(list(files.values()))
    linear, matmul = 2 * (len(RECIPES) - 1), 2 * 4
    assert said.endswith(
        f"Median error: 0% (bench_linear.json 0% of {linear}, bench_matmul.json 0% of {matmul}, "
        "bench_casts.json 50% of 1, bench_grouped_mm.json 0% of 2 rows)"
    )
    assert "8192,8192 dynamic both" in said and "-50%" in said
    assert "65536,4096,4096,8 rowwise eager" in said
    assert "torchao rowwise" not in said and "mxfp8" not in said, "these have no prediction"


def test_the_device_may_be_given(files):
    half = {name: Figure(rate.value / 2, "assumed: x") for name, rate in H200.passes.items()}
    slow = replace(H200, passes=half)
    assert tables([files["bench_casts"]], slow).endswith("(bench_casts.json 2% of 1 rows)")


def test_a_file_that_a_failed_part_left_is_named_and_the_others_are_compared(files, tmp_path):
    missing = tmp_path / "bench_linear_sweep.json"
    said = tables([missing, files["bench_casts"]])
    assert "bench_linear_sweep.json: left out: " in said
    assert said.endswith("Median error: 50% (bench_casts.json 50% of 1 rows)")


def test_casts_move_the_bytes_that_their_benchmark_counts():
    for name, passes in PASSES.items():
        assert sum(moved for _, moved in passes) == CASTS[name].bytes_per_element


@pytest.mark.parametrize("lacks", ["T", "ms", "layer"])
def test_a_row_that_lacks_a_field_is_named(files, lacks):
    fields = json.loads(files["bench_grouped_mm"].read_text())
    del fields["rows"][0][lacks]
    files["bench_grouped_mm"].write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=f"has a row that cannot be read .KeyError: '{lacks}'"):
        tables([files["bench_grouped_mm"]])


def test_the_program_takes_several_files(files, capsys):
    assert check_estimate.main([str(file) for file in files.values()]) == 0
    assert "Median error: 0% (" in capsys.readouterr().out
