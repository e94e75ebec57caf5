"""The cost model against measurements that others published."""

from __future__ import annotations

import json

import pytest
import torch
from result_files import linear_rows, matmul_rows, write

from benchmarks.check_estimate import (
    FILE,
    PREDICTIONS,
    beside,
    main,
    predicted_against_published,
)
from benchmarks.measure_device import fitted, measure
from benchmarks.measuring.report import ROOT
from float8.estimate import DEVICES, estimate
from float8.estimate.roofline import Shape

PUBLISHED = json.loads(FILE.read_text())
CHECK = predicted_against_published()


def test_the_median_error_of_rows_that_fitted_nothing_is_below_ten_percent():
    assert len(CHECK.tests) > 3 * (len(CHECK.rows) - len(CHECK.tests))
    assert CHECK.median_error < 0.1


def test_the_page_says_what_the_program_says():
    page = " ".join((ROOT / "docs" / "speed.md").read_text().split())
    rows, tests = len(CHECK.rows), len(CHECK.tests)
    assert f"with {rows} measurements" in page and f"{rows - tests} of them fitted" in page
    assert f"The median error of the other {tests} is {CHECK.median_error * 100:.0f} %" in page
    for row in CHECK.rows:
        if "pull request 2185" in row.source:
            assert f"| {row.predicted:.2f}x | {row.published:.2f}x |" in page


@pytest.mark.parametrize("what", PREDICTIONS)
def test_the_median_error_of_each_kind_of_row_is_below_fifteen_percent(what):
    kinds = [row["what"] for row in PUBLISHED["rows"]]
    own = [
        abs(row.error) for row, kind in zip(CHECK.rows, kinds, strict=True)
        if kind == what and not row.fits
    ]  # fmt: skip
    assert sorted(own)[len(own) // 2] < 0.15


def test_times_that_the_model_made_up_are_predicted_without_error(tmp_path):
    """Result files of a device whose times are its own predictions."""
    device, shapes = DEVICES["H100"], [Shape(4096, 4096, 4096), Shape(16384, 8192, 8192)]
    for name, rows in (
        ("matmul", matmul_rows(device, shapes)),
        ("linear", linear_rows(device, shapes)),
    ):
        file = write(tmp_path / f"{name}.json", f"bench_{name}", rows)
        found, compared = beside(file)
        assert found is device
        assert len(compared) >= len(rows)
        assert max(abs(row.error) for row in compared) < 1e-12
    assert main([str(file)]) == 0


def test_a_rate_and_a_half_size_are_fitted_to_times_that_have_them():
    flops = [1e9, 1e10, 1e11, 1e12]
    assert fitted([(f, (f + 3e9) / 5e14) for f in flops]) == pytest.approx((5e14, 3e9))
    rate, half_size = fitted([(f, f / 5e14 * (1 + f / 1e14)) for f in flops])  # half_size < 0
    assert half_size == 0 and rate == pytest.approx(5e14, rel=0.01)


def test_a_measured_device_predicts_and_is_saved(tmp_path):
    here = measure(torch.device("cpu"), ((32, 64, 64), (32, 128, 64), (64, 128, 128)), 2**20)
    here.save(tmp_path / "here.json")
    assert {figure.kind for figure in here.figures().values()} <= {"measured", "exact"}
    (row,) = estimate([(64, 256, 128)], device=str(tmp_path / "here.json")).rows
    assert row.bf16_s > 0


@pytest.mark.cuda
def test_a_gpu_is_measured(tmp_path):
    here = measure(torch.device("cuda", 0), ((512, 512, 512), (1024, 1024, 1024)), 2**26)
    assert here.products["tensorwise"].peak.value > 0
    assert here.bandwidth.value > 1e10
