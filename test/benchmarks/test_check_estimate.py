"""The cost model against measurements that others published."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median

import pytest
import torch
from result_files import linear_rows, matmul_rows, write

from benchmarks.check_estimate import (
    FILE,
    GROUPED,
    main,
    measured_files,
    of_file,
    predicted_against_published,
)
from benchmarks.measure_device import fitted, measure
from benchmarks.measuring import harness
from benchmarks.measuring.report import ROOT
from benchmarks.models.transformer import LLAMA, Stack
from float8.estimate import DEVICES, estimate
from float8.estimate.roofline import Shape

PUBLISHED = json.loads(FILE.read_text())
CHECK = predicted_against_published()
# Median errors of predictions, without the rows that determined a rate.
ERRORS = {"dense GEMMs": 0.09, "grouped GEMMs": 0.05, "casts": 0.03, "layers": 0.06, "models": 0.04}


def test_every_row_has_a_source_with_a_date():
    assert {row["source"] for row in PUBLISHED["rows"]} == set(PUBLISHED["sources"])
    for source in PUBLISHED["sources"].values():
        assert {"url", "date", "read", "hardware", "versions", "timed"} <= set(source)


def test_median_errors_are_as_small_as_they_were():
    for kind, error in ERRORS.items():
        assert median(CHECK.errors(kind)) == pytest.approx(error, abs=0.0051), kind
        assert len(CHECK.errors(kind)) >= 10
    assert {row.kind for row in CHECK.rows} == set(ERRORS)


def test_the_page_says_what_the_program_says():
    page = " ".join((ROOT / "docs" / "speed.md").read_text().split())
    rows, tests = len(CHECK.rows), len(CHECK.tests)
    assert f"with {rows} measurements" in page and f"{rows - tests} of them determined" in page
    for kind in ERRORS:
        errors = CHECK.errors(kind)
        line = (
            f"| {kind} | {len(errors)} | {median(errors) * 100:.0f} % | {max(errors) * 100:.0f} % |"
        )
        assert line in page
    for row in CHECK.rows:
        if "pull request 2185" in row.source:
            assert f"| {row.predicted:.2f}x | {row.measured:.2f}x |" in page


def test_boards_are_fitted_to_their_rows():
    """Rates of boards: the rows that fitted them have no error on average."""
    for fits in ("bf16", "tensorwise", "rowwise", "blockwise", "casts"):
        for board in {row.board for row in CHECK.rows if row.fits == fits}:
            own = [row.error for row in CHECK.rows if (row.fits, row.board) == (fits, board)]
            assert abs(sum(own) / len(own)) < 0.021, (fits, board)


def test_times_that_the_model_made_up_are_predicted_without_error(tmp_path):
    """Result files of a device whose times are its own predictions."""
    device, shapes = DEVICES["H100"], [Shape(4096, 4096, 4096), Shape(16384, 8192, 8192)]
    experts = [Shape(65536, 2048, 1536, 128)]
    for name, rows in (
        ("matmul", matmul_rows(device, shapes)),
        ("linear", linear_rows(device, shapes)),
        ("grouped_mm", linear_rows(device, experts)),
        ("model", model_rows(device)),
    ):
        options = {"size": "8b", "blocks": "2"}
        file = write(tmp_path / f"{name}.json", f"bench_{name}", rows, options=options)
        compared = of_file(file)
        assert {row.board for row in compared} == {device.name}
        assert {row.kind == GROUPED for row in compared} == {name == "grouped_mm"}
        assert len(compared) >= len(rows) / 2
        assert max(abs(row.error) for row in compared) < 1e-12
    assert main([str(file)]) == 0


def model_rows(device):
    """Of a stack in which half of the time in bfloat16 is not of linear layers."""
    sizes = replace(LLAMA["8b"], layers=2)
    with torch.device("meta"):
        stack = Stack(sizes).bfloat16()
    found = estimate(stack, sizes.batch * sizes.context, device, ["tensorwise", "blockwise"])
    plain_s = 2 * found.total("tensorwise").bf16_s
    rows = [{"layer": "nn.Linear", "mode": "eager", "ms": plain_s * 1e3, "ratio": 1.0}]
    for recipe in found.recipes:
        total = found.total(recipe)
        ratio = (plain_s - total.bf16_s + total.seconds.total) / plain_s
        rows.append({"layer": recipe, "mode": "eager", "ms": 0.0, "ratio": ratio})
    return [*rows, {"layer": "torchao rowwise", "mode": "eager", "error": "not run"}]


def test_committed_results_are_within_a_third():
    for file in measured_files():
        assert max((abs(row.error) for row in of_file(file)), default=0) < 1 / 3


def test_a_rate_and_a_ramp_are_fitted_to_times_that_have_them():
    flops = [1e9, 1e10, 1e11, 1e12]
    assert fitted([(f, f / 5e14 + 6e-6) for f in flops]) == pytest.approx((5e14, 6e-6))
    rate, ramp_s = fitted([(f, f / 5e14 * (1 + f / 1e14)) for f in flops])  # ramp_s < 0
    assert ramp_s == 0 and rate == pytest.approx(5e14, rel=0.01)


def test_a_measured_device_predicts_and_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "TARGET_S", 1e-3)
    here = measure(torch.device("cpu"), ((32, 64, 64), (32, 128, 64), (64, 128, 128)), 2**20)
    here.save(tmp_path / "here.json")
    assert [source.partition(":")[0] for source in here.sources] == ["measured"]
    shapes = [(64, 256, 128), (64, 256, 128, 4)]
    assert all(row.bf16_s > 0 for row in estimate(shapes, device=str(tmp_path / "here.json")).rows)


@pytest.mark.cuda
def test_a_gpu_is_measured(tmp_path):
    here = measure(torch.device("cuda", 0), ((512, 512, 512), (1024, 1024, 1024)), 2**26)
    assert here.products["tensorwise"].rate > 0
    assert here.bandwidth > 1e10
