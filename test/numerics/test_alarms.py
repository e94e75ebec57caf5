"""Problems of casts, each with its number; alarms start at the k-th wrong look in a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fresh import ROOT
from runs import HEALTHY

from float8.numerics import alarms
from float8.numerics.alarms import (
    BAD,
    PROBLEM_KINDS,
    SUSPICIOUS,
    AlarmWatch,
    problems_of,
)
from float8.numerics.snapshot import Report

GRADIENT = {"operand": "grad_output", "gemm": "grad_input", "format": "e5m2", "sqnr": 25.5}
LOOKS = {kind.name: kind.looks for kind in PROBLEM_KINDS}
WRONG = {
    "inf or NaN": {"nonfinite": 3, "sqnr": None},
    "saturation": {"saturated": 0.002},
    "flush": {"flushed": 0.15},
    "stale scale": {"staleness": -6.5},
    "gradient noise": GRADIENT | {"gradient_sqnr": 4.7},
    "noise": {"sqnr": 25.9},
}
NUMBERS = {
    "inf or NaN": "3 of 1,000 elements",
    "saturation": "0.2 %",
    "flush": "15 % of its elements became zero. Its SQNR of 31.0 dB does not show them",
    "stale scale": "6.5 octaves below",
    "gradient noise": "an SQNR of 4.7 dB; below 4.8 dB",
    "noise": "25.9 dB, where 32 dB is what E4M3 gives",
}


def reports(*looks, every=10):
    """One cast per look: the changes of a healthy one, or None where the layer was not called."""
    rows = [[] if look is None else [replace(HEALTHY, **look)] for look in looks]
    return [Report(row, step=i * every) for i, row in enumerate(rows)]


def healthy_like(name):
    return {key: value for key, value in GRADIENT.items() if "operand" in WRONG[name]}


def history(*looks):
    return AlarmWatch(reports(*looks)).alarms


@pytest.mark.parametrize("name", WRONG)
def test_an_alarm_starts_at_the_kth_wrong_look_and_ends_at_the_kth_good_one(name):
    k, good, bad = LOOKS[name], healthy_like(name), WRONG[name]
    assert history(*[good] * 3, *[bad] * (k - 1), good, *[bad] * (k - 1)) == []
    (alarm,) = history(*[good] * 3, *[bad] * (k + 1), *[good] * (k - 1))
    assert (alarm.rule, alarm.layer, alarm.is_active) == (name, "ffn", True)
    assert (alarm.first, alarm.started, alarm.last) == (30, 20 + 10 * k, 30 + 10 * k)
    assert NUMBERS[name] in alarm.message
    (alarm,) = history(*[good] * 3, *[bad] * k, *[good] * k)
    assert (alarm.is_active, alarm.last, alarm.ended) == (False, 20 + 10 * k, 20 + 20 * k)


def test_an_inf_in_a_gradient_is_an_alarm_at_the_second_look():
    """A gradient scaler makes the first on purpose."""
    bad = GRADIENT | {"nonfinite": 1}
    assert history(GRADIENT, bad, GRADIENT, bad, GRADIENT) == []
    (alarm,) = history(GRADIENT, bad, bad, GRADIENT, GRADIENT)
    assert (alarm.rule, alarm.first, alarm.started, alarm.ended) == ("inf or NaN", 10, 20, 40)
    assert "1 of 1,000 elements" in alarm.message


def test_single_looks_and_harmless_numbers_are_no_alarm():
    coarse = {"sqnr": 26.0}  # 6 dB below the best
    gated = {"flushed": 0.107}  # of a healthy SwiGLU
    generous = {"scaling": "static", "staleness": -12.0}
    for look in (coarse, gated, generous):
        assert history(*[look] * 6) == []
    late = [{"saturated": 0.01}, {"staleness": 2.0}, {}]  # each look another thing
    assert history(*[{}] * 4, *late * 5) == []


def test_massive_saturation_is_an_alarm_at_the_first_look():
    """As of a weight whose amax grew 2^0.49 beyond its delayed scale, at one look in five steps."""
    alarm, *others = history({}, {"saturated": 0.25, "staleness": 0.49, "sqnr": 13.0}, *[{}] * 3)
    assert not others
    assert (alarm.rule, alarm.first, alarm.started, alarm.ended) == ("saturation", 10, 10, 40)
    assert history({}, {"saturated": 0.09}, {}, {"saturated": 0.09}) == []


def test_noise_that_another_problem_explains_is_no_alarm_of_its_own():
    explained = {"sqnr": 10.0, "saturated": 0.02}
    assert [a.rule for a in history(*[explained] * 4)] == ["saturation"]
    stale = {"sqnr": 10.0, "staleness": 2.0}  # which does not explain it
    assert {a.rule for a in history(*[stale] * 4)} == {"noise", "stale scale"}


def test_a_run_that_resumes_has_the_alarms_of_one_that_did_not_stop():
    bad, good = WRONG["saturation"], {}
    looks = [*[good] * 2, *[bad] * 5, *[good] * 9, *[bad] * 7, *[good] * 4]
    whole = reports(*looks)
    expected = AlarmWatch(whole)
    assert [(a.first, a.last, a.ended) for a in expected.alarms] == [(20, 60, 90), (160, 220, 250)]
    for stop in range(1, len(whole)):
        for kept in (3, 5, 100):  # snapshots in the file
            before = AlarmWatch(whole[:stop])
            resumed = AlarmWatch(whole[max(stop - kept, 0) : stop], before.alarms)
            ended = {alarm for alarm in before.alarms if not alarm.is_active}
            assert ended <= set(resumed.alarms), (stop, kept)  # none ends a second time
            for report in whole[stop:]:
                resumed.see(report)
            if kept == 100:
                assert resumed.alarms == expected.alarms, stop
            # Good looks before the first of the file are not known: the end may come later.
            found, wanted = (
                [replace(a, ended=None) for a in w.alarms] for w in (resumed, expected)
            )
            assert found == wanted, (stop, kept)
    # Back to an earlier checkpoint: what came after it is not known, but what ended is found again.
    again = AlarmWatch(whole[4:8], expected.alarms)
    assert [(a.first, a.last, a.ended) for a in again.alarms] == [(20, 60, None)]


def test_the_table_of_the_documentation_is_that_of_the_code():
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    lines = [line.split("|") for line in page.splitlines() if line.count("|") == 5]
    named = {cells[1].strip(): cells[3].strip() for cells in lines}
    found = {name: named[name].split(",")[0] for name in LOOKS}
    assert found == {name: str(looks) for name, looks in LOOKS.items()}
    top = {line[4:20].strip() for line in alarms.__doc__.splitlines() if line[:4] == "    "}
    assert LOOKS.keys() <= top


# --- problems


@pytest.mark.parametrize(
    ("change", "level", "title", "text"),
    [
        ({"nonfinite": 3}, BAD, "inf or NaN", "3 of 1,000 elements are not finite"),
        ({"saturated": 0.002}, SUSPICIOUS, "saturation", "0.2 % of its elements"),
        ({"saturated": 0.03}, BAD, "saturation", "3 % of its elements"),
        (
            {"flushed": 0.3, "sqnr": 25.0},
            SUSPICIOUS,
            "flush",
            "30 % of its elements became zero; its SQNR is 25.0 dB",
        ),
        ({"flushed": 0.6}, BAD, "flush", "60 % of its elements"),
        ({"sqnr": 25.5}, SUSPICIOUS, "noise", "25.5 dB, where 32 dB is what"),
        ({"sqnr": 16.0, "kurtosis": 90.0}, BAD, "noise", "90 says outliers"),
        ({"staleness": 0.8}, SUSPICIOUS, "stale scale", "0.8 octaves above"),
        ({"staleness": -7.0}, SUSPICIOUS, "stale scale", "7.0 octaves below"),
    ],
)
def test_each_rule_finds_what_it_is_for(change, level, title, text):
    row = replace(HEALTHY, layer="head", **change)
    (found,) = problems_of([HEALTHY, row])
    assert (found.level, found.title, found.casts) == (level, title, [row])
    assert found.text.startswith("head, input. ")
    assert text in found.text


def test_a_gradient_that_flushes_without_a_loss_of_sqnr_weighs_less():
    softmax = replace(HEALTHY, operand="grad_output", format="e5m2", sqnr=25.9, flushed=0.4)
    assert problems_of([softmax]) == []
    worse = [replace(softmax, flushed=0.9), replace(softmax, flushed=0.6, sqnr=9.0)]
    (found,) = problems_of(worse)
    assert (found.level, found.casts) == (BAD, worse[::-1])
