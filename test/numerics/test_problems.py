"""Every kind of problem is found, with its number; a healthy cast has none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from runs import HEALTHY

from float8.numerics.problems import BAD, SUSPICIOUS, problems_of
from float8.numerics.snapshot import Report


@pytest.mark.parametrize(
    ("change", "level", "title", "text"),
    [
        ({"nonfinite": 3}, BAD, "One cast met inf or NaN", "3 of 1,000 elements are not finite"),
        ({"saturated": 0.002}, SUSPICIOUS, "One cast saturates", "0.2 % of its elements"),
        ({"saturated": 0.03}, BAD, "One cast saturates", "3 % of its elements"),
        (
            {"flushed": 0.3, "sqnr": 25.0},
            SUSPICIOUS,
            "One cast flushes to zero",
            "30 % of its elements became zero; its SQNR is 25.0 dB",
        ),
        ({"flushed": 0.6, "sqnr": 5.0}, BAD, "One cast flushes to zero", "60 % of its elements"),
        ({"flushed": 0.3}, SUSPICIOUS, "One cast flushes to zero", "30 % of its elements"),
        ({"flushed": 0.6}, BAD, "One cast flushes to zero", "60 % of its elements"),
        (
            {"sqnr": 25.5},
            SUSPICIOUS,
            "One cast loses precision",
            "25.5 dB, where 32 dB is what",
        ),
        ({"sqnr": 16.0, "kurtosis": 90.0}, BAD, "One cast loses precision", "90 says outliers"),
        ({"staleness": 0.8}, SUSPICIOUS, "One cast has a stale scale", "0.8 octaves above"),
        ({"staleness": -7.0}, SUSPICIOUS, "One cast has a stale scale", "7.0 octaves below"),
    ],
)
def test_each_rule_finds_what_it_is_for(change, level, title, text):
    row = replace(HEALTHY, layer="head", **change)
    (found,) = problems_of([HEALTHY, row])
    assert (found.level, found.title, found.casts) == (level, title, (row,))
    assert found.text.startswith("head, input. ")
    assert text in found.text


def test_rows_and_text_of_a_report_name_what_its_sqnr_hides():
    report = Report([HEALTHY, replace(HEALTHY, layer="down", flushed=0.98, sqnr=84.6)])
    assert [row["problems"] for row in report.rows()] == [["flushes to zero"], []]
    said = (
        "One cast flushes to zero: down, input. 98 % of its elements became zero. Its SQNR of 84.6"
    )
    assert said in " ".join(str(report).split())
    assert str(report) == report.table()


def test_a_cast_that_left_nothing_finite_is_not_called_imprecise():
    (found,) = problems_of([replace(HEALTHY, sqnr=-math.inf, flushed=0.9)])
    assert found.kind.one == "met inf or NaN"


def test_a_gradient_that_flushes_without_a_loss_of_sqnr_weighs_less():
    softmax = replace(HEALTHY, operand="grad_output", format="e5m2", sqnr=25.9, flushed=0.4)
    assert problems_of([softmax]) == []
    worse = [replace(softmax, flushed=0.9), replace(softmax, flushed=0.6, sqnr=9.0)]
    (found,) = problems_of(worse)
    assert (found.level, found.casts) == (BAD, tuple(reversed(worse)))


def test_the_worst_kind_and_the_worst_row_come_first():
    rows = [replace(HEALTHY, layer=str(i), flushed=0.3 + i / 100, sqnr=20.0) for i in range(3)]
    rows.append(replace(HEALTHY, layer="small ones", flushed=0.6))
    rows.append(replace(HEALTHY, layer="nan", nonfinite=1))
    first, second = problems_of(rows)
    assert first.casts[0].layer == "nan"
    assert second.title == "4 casts flush to zero"
    assert [row.layer for row in second.casts] == ["small ones", "2", "1", "0"]
    assert second.text.startswith("The worst: small ones, input.")
