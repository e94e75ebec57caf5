"""Reports: tables, pictures, files that are read back the same, scales, scalars."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from runs import ROW

from float8.numerics.snapshot import Report, load_run
from float8.numerics.statistics import Histogram

WEIGHT = replace(ROW, layer="b", operand="weight", sqnr=20.0)


def test_a_file_gives_the_report_back(tmp_path):
    path = tmp_path / "run.json"
    rows = [
        ROW,
        WEIGHT,
        replace(ROW, sqnr=math.inf, scale_max=math.inf),
        replace(ROW, sqnr=-math.inf, sums=(1.0, math.inf)),
        replace(ROW, flushed=None, saturated=None, sqnr=None, staleness=None, sums=()),
        replace(ROW, histogram=Histogram()),
    ]
    Report(rows, model="GPT", step=50, skipped={"head": "it was not called"}).save(path)
    (found,) = load_run(path)
    assert found._rows == rows
    assert (found.model, found.step, found.skipped) == ("GPT", 50, {"head": "it was not called"})
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (content["format"], content["version"]) == ("float8.numerics", 4)
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


def test_merged_reports_forget_what_one_of_them_saw():
    a = Report([ROW], model="M", step=3, skipped={"b": "it was not called"})
    b = Report([WEIGHT], model="M", step=3, skipped={"nan": "it was not called", "c": "meta"})
    found = a.merged(b)
    assert (found.step, found.skipped, len(found)) == (3, {"c": "meta"}, 2)
    assert a.gather()._rows == a._rows  # one process


def test_casts_come_by_severity_and_the_healthy_ones_by_sqnr():
    fine = replace(ROW, sqnr=30.0, flushed=0.0, saturated=0.0, staleness=0.0)
    by_severity = [
        replace(fine, nonfinite=1),  # the first of the model, not that with most of them
        replace(fine, layer="later", nonfinite=9, sqnr=None),
        replace(fine, saturated=0.02),
        replace(fine, flushed=0.9999, sqnr=92.0),  # one element has the power
        replace(fine, sqnr=12.0),
        replace(fine, flushed=0.41, sqnr=44.0),
        replace(fine, flushed=0.15, sqnr=28.0),
        replace(fine, sqnr=24.0),
        replace(fine, gradient_sqnr=1.0, sqnr=31.0),
        replace(fine, staleness=-9.0),
        *(replace(fine, staleness=i / 10 - 9, sqnr=27.0) for i in range(1, 20)),
        replace(fine, format="e5m2", sqnr=25.5),
        replace(fine, sqnr=None),
    ]
    assert Report(by_severity[:2] + by_severity[:1:-1]).casts == by_severity
