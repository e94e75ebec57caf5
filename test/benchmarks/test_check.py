"""Predictions are compared with measurements: exact where the model made the measurement."""

from dataclasses import replace
from pathlib import Path

import pytest
from result_files import linear_rows, matmul_rows, write

from benchmarks.cost_model.check import Check, Compared, predicted_against_measured
from benchmarks.cost_model.fit import fit
from float8.config import RECIPES
from float8.estimate import DEVICES
from float8.estimate.shapes import Shape
from float8.kernels.scaled_mm import SUPPORT

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
H100, B200 = DEVICES["H100"], DEVICES["B200"]
SHAPES = [Shape(16384, 8192, 28672), Shape(2048, 1024, 1024)]


def test_a_file_that_the_model_wrote_is_predicted_exactly(tmp_path):
    path = write(tmp_path / "linear.json", "bench_linear", linear_rows(B200, SHAPES), "NVIDIA B200")
    check = predicted_against_measured(path)
    assert check.device is B200, "the file's device is the default"
    assert [row.recipe for row in check.rows] == [*RECIPES, *RECIPES]
    assert check.median_error == pytest.approx(0, abs=1e-12)
    assert check.right_direction == len(check.rows)
    for row in check.rows:
        assert row.predicted_saved == pytest.approx(row.measured_saved)


def test_the_error_is_that_of_the_ratio(tmp_path):
    rows = linear_rows(H100, SHAPES[:1])
    for row, factor in zip(rows, (1.25, 0.8, 1.0, 1.0, 2.0), strict=False):
        row["ratio"] *= factor
    path = write(tmp_path / "linear.json", "bench_linear", rows)
    errors = [row.error for row in predicted_against_measured(path, "H100").rows]
    assert errors[:5] == pytest.approx([-0.2, 0.25, 0.0, 0.0, -0.5])


def test_the_median_and_the_side_of_one():
    rows = [Compared("s", "eager", "r", p, m, 1, 1) for p, m in ((0.5, 0.4), (1.1, 1), (2, 0.8))]
    check = Check("f", "h", H100, rows)
    assert check.median_error == pytest.approx(0.25)
    assert check.right_direction == 2
    assert "Median error of time: 25%; faster or slower predicted correctly in 2 of 3" in str(check)


def test_recipes_that_the_device_refuses_are_left_out(tmp_path, monkeypatch):
    path = write(tmp_path / "linear.json", "bench_linear", linear_rows(B200, SHAPES), "NVIDIA B200")
    monkeypatch.setitem(SUPPORT["sm_100"], "rowwise", "for this test")
    recipes = {row.recipe for row in predicted_against_measured(path).rows}
    assert recipes == set(RECIPES) - {"rowwise", "rowwise_with_gw_hp"}


def test_a_fitted_device_is_said_to_describe_its_own_file(tmp_path):
    path = write(tmp_path / "linear.json", "bench_linear", linear_rows(H100, SHAPES))
    matmul = write(tmp_path / "matmul.json", "bench_matmul", matmul_rows(H100, SHAPES))
    said = "fitted to this file: a description, no prediction"
    assert said in str(predicted_against_measured(path, fit(path)))
    assert said not in str(predicted_against_measured(path, fit(matmul)))
    assert said not in str(predicted_against_measured(path))


def test_the_committed_cpu_layers_are_described_by_a_fit():
    linear = RESULTS / "cpu_bench_linear.json"
    device = fit(linear, RESULTS / "cpu_bench_matmul.json")
    check = predicted_against_measured(linear, device)
    assert {row.recipe for row in check.rows} == set(RECIPES) - {"unit"}
    assert check.median_error < 1
    for row in check.rows:
        assert row.predicted_saved == pytest.approx(row.measured_saved, rel=1e-3)


def test_a_cpu_file_needs_a_device():
    with pytest.raises(ValueError, match=r"was measured on a CPU.*--device measured"):
        predicted_against_measured(RESULTS / "cpu_bench_linear.json")


def test_other_benchmarks_are_refused():
    with pytest.raises(ValueError, match="by bench_matmul; what is compared is bench_linear"):
        predicted_against_measured(RESULTS / "cpu_bench_matmul.json", H100)


def test_a_file_without_rows_of_ours_is_refused(tmp_path):
    path = write(tmp_path / "linear.json", "bench_linear", [])
    with pytest.raises(ValueError, match="has no row of a recipe that H100 SXM runs"):
        predicted_against_measured(path)
    with pytest.raises(ValueError, match="has no eager row of a recipe that some CPU runs"):
        predicted_against_measured(path, replace(H100, name="some CPU", arch="cpu"))
