"""Reports: their order, files that are read back the same, scales, scalars."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from runs import ROW
from torch import nn

from float8 import convert_to_float8_inference
from float8.numerics import Report
from float8.numerics.snapshot import cast_from_json, strict_json
from float8.numerics.statistics import Histogram, Sums

WEIGHT = replace(ROW, layer="b", operand="weight", sqnr=20.0)


def test_a_file_gives_the_report_back(tmp_path):
    path = tmp_path / "run.json"
    rows = [ROW, replace(ROW, layer="c", sqnr=-math.inf), WEIGHT]
    Report(rows, model="GPT", step=50, skipped={"head": "it was not called"}).save(path)
    found = Report.load(path)
    assert found._rows == rows
    assert (found.model, found.step, found.skipped) == ("GPT", 50, {"head": "it was not called"})
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (content["format"], content["version"]) == ("float8.numerics", 2)
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_scalars_reach_any_writer():
    class Writer:
        def __init__(self):
            self.found = []

        def add_scalar(self, tag, value, step):
            self.found.append((tag, value, step))

    writer = Writer()
    second = replace(ROW, gemm="grad_weight", sqnr=math.inf, staleness=None)
    Report([ROW, second], step=7).add_scalars(writer)
    tags = {tag for tag, _, _ in writer.found}
    assert ("float8/nan/input/sqnr", 30.0, 7) in writer.found
    assert "float8/nan/input/grad_weight/amax" in tags
    assert "float8/nan/input/grad_weight/sqnr" not in tags
    assert "float8/nan/input/grad_weight/staleness" not in tags
    Report([ROW]).add_scalars(writer, 9)
    assert writer.found[-1][2] == 9


def test_static_scales_are_what_inference_takes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16))
    report = Report([replace(ROW, layer="0", amax=4.0)])
    scales = report.static_scales()
    assert scales == {"0": 4.0 / 448}
    convert_to_float8_inference(model, static_scales=scales)
    assert model[0].config.cast_config_input.static_scale == 4.0 / 448


def test_merged_reports_forget_what_one_of_them_saw():
    a = Report([ROW], model="M", step=3, skipped={"b": "it was not called"})
    b = Report([WEIGHT], model="M", step=3, skipped={"nan": "it was not called", "c": "meta"})
    found = a.merged(b)
    assert (found.step, found.skipped, len(found)) == (3, {"c": "meta"}, 2)
    assert a.gather()._rows == a._rows  # one process


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        replace(ROW, sqnr=math.inf, scale_max=math.inf),
        replace(ROW, sqnr=-math.inf, sums=Sums(0.0, 1.0, 0.0, 1.0, math.inf)),
        replace(ROW, flushed=None, saturated=None, sqnr=None, staleness=None, sums=None),
        replace(ROW, histogram=Histogram()),
    ],
)
def test_a_row_survives_strict_json(row):
    text = json.dumps(strict_json(row.as_dict()), allow_nan=False)
    assert cast_from_json(json.loads(text)) == row
    nan = replace(row, scale_min=math.nan)
    assert math.isnan(cast_from_json(json.loads(json.dumps(strict_json(nan.as_dict())))).scale_min)


def test_a_cast_with_a_problem_comes_before_one_with_a_lower_sqnr():
    fine = replace(ROW, format="e5m2", sqnr=25.5, flushed=0.0, saturated=0.0, staleness=0.0)
    flushed = replace(fine, format="e4m3", sqnr=92.0, flushed=0.9999)  # one element has the power
    assert Report([fine, flushed]).casts == [flushed, fine]
