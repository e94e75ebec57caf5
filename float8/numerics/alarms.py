"""Alarms: problems of casts that last, from the sequence of a run's reports.

A single bad look is often nothing: a delayed scale is late by a step, a batch is unusual. An alarm
starts when a rule finds a cast wrong at so many looks in a row, and ends after as many looks in a
row at which it is not. `ALARM_RULES` is the table. Thresholds are those of
`float8.numerics.problems`, except for the fall of an SQNR::

    name                     wrong                                          looks
    inf or NaN               any, in an input or a weight                   1
    inf or NaN in gradient   any, in a gradient                             2
    saturation               more than 0.1 % of the elements                3
                             more than 10 %                                 1
    flush                    more than 14 %; more than 50 % of a gradient
                             whose SQNR is not 6 dB below the format's      3
    stale scale              amax 0.5 octaves above what the scale was made
                             for, or 6 below a delayed one                  3
    gradient noise           gradient SQNR below 4.8 dB, a ratio of sqrt(3) 3
    falling SQNR             6 dB below the median of this cast's earlier
                             looks, or below the format's SQNR less 6 dB if
                             that is lower, and nothing of the above        3

Why so many looks: inf and NaN do not go away by themselves. In a gradient, a GradScaler makes them
on purpose and skips the step. The others happen at single looks of healthy runs, above all while
the learning rate rises; ``benchmarks/bench_alarms.py`` found none at three in a row, 10 steps
apart. Looks at consecutive steps are like one look. Saturation above 10 % starts an alarm at once:
healthy runs had at most 0.9 % at any step, and weights that start at zero up to 83 % under delayed
scales that were dynamic in one step only.

An alarm depends on the reports alone, so that a resumed run finds it again in its file. A cast that
a report lacks, as of a layer that was not called, changes nothing. Earlier looks at which an SQNR
was wrong are not in the median, and neither are those that are dropped from the file.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from float8.numerics import problems
from float8.numerics.problems import EXPECTED_SQNR, FINE, SUSPICIOUS, ProblemKind
from float8.numerics.statistics import OPERANDS, CastLabels, CastStatistics

if TYPE_CHECKING:
    from float8.numerics.snapshot import Report

FALL = 6.0  # dB: twice the error
MASSIVE = 0.1  # a saturated fraction of the elements: one look is enough
LEAST_EARLIER = 3  # looks, whose median an SQNR is compared with
KEPT_LOOKS = 100  # of an SQNR: as many as a run file keeps by default
KEPT_ALARMS = 1000  # the oldest that have ended are dropped


@dataclass(frozen=True)
class Alarm:
    """A problem of a cast that lasted.

    Args:
        rule: its name in the table of `float8.numerics.alarms`, as "saturation".
        layer, operand, gemm, format, scaling, granularity: which cast; see `CastStatistics`.
        first: the step of the first look at which the cast was wrong.
        started: the step of the look at which the alarm started.
        last: the step of the last look so far at which the cast was wrong.
        ended: the step of the look at which the alarm ended, or None.
        message: what was measured when it started.
        advice: what to do about it.
    """

    rule: str
    layer: str
    operand: str
    gemm: str
    format: str
    scaling: str
    granularity: str
    first: int
    started: int
    last: int
    ended: int | None
    message: str
    advice: str

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""
        return self.ended is None

    @property
    def labels(self) -> CastLabels:
        """Which cast it is."""
        return CastLabels(*(getattr(self, name) for name in CastLabels._fields))

    @property
    def place(self) -> str:
        """Layer and operand."""
        return f"{self.layer or 'the module itself'}, {self.operand}"

    def __str__(self) -> str:
        since = "" if self.first == self.started else f" It has been so since step {self.first}."
        return f"{self.rule}: {self.place}. {self.message}{since} {self.advice}"


class AlarmRule(NamedTuple):
    """A row of the table: ``looks`` in a row start and end an alarm of a kind of problem.

    ``kind`` is None for the fall of an SQNR, which has no other problem (`_falls`).
    """

    name: str
    looks: int
    kind: ProblemKind | None
    operands: Sequence[str] = OPERANDS


ALARM_RULES = (
    AlarmRule("inf or NaN", 1, problems.NONFINITE, ("input", "weight")),
    AlarmRule("inf or NaN in gradient", 2, problems.NONFINITE, ("grad_output",)),
    AlarmRule("saturation", 3, problems.SATURATES),
    AlarmRule("flush", 3, problems.FLUSHES),
    AlarmRule("stale scale", 3, problems.STALE),
    AlarmRule("gradient noise", 3, problems.DROWNS),
    AlarmRule("falling SQNR", 3, None),
)


def _falls(earlier: Sequence[float], fmt: str) -> ProblemKind:
    """The problem of an SQNR below those of the earlier looks at a cast of this format."""
    # An operand may have been exact, as a weight of ones.
    usual = min(statistics.median(earlier or [math.nan]), EXPECTED_SQNR[fmt])

    def level(cast: CastStatistics) -> int:
        is_known = cast.sqnr is not None and cast.sqnr > -math.inf
        has_fallen = is_known and len(earlier) >= LEAST_EARLIER and (cast.sqnr or 0) < usual - FALL
        return SUSPICIOUS if has_fallen else FINE

    return ProblemKind(
        "fall",
        "falls",
        level,
        lambda cast: -(cast.sqnr or 0.0),
        lambda cast: f"Its SQNR is {cast.sqnr:.1f} dB, and was {usual:.1f} dB before.",
        "Its values drift away from the range of the format: compare the histograms of these "
        "steps on the page. A static scale, or a scale of 1, needs other values or a dynamic "
        'recipe; else let fewer elements share a scale (recipe "rowwise" or "blockwise").',
    )


@dataclass
class _Streak:
    """The newest looks at one cast by one rule."""

    wrong: int = 0  # in a row
    fine: int = 0  # in a row
    first: int = 0  # the step at which the row of wrong looks began
    alarm: int | None = None  # the number of the active alarm


class Changes(NamedTuple):
    """What one look changed, the worst first, and the alarms that are active after it."""

    started: list[Alarm]
    ended: list[Alarm]
    active: list[Alarm]


class AlarmWatch:
    """Applies the rules to one report after the other.

    Args:
        known: alarms that began before the first report that `see` will get.
    """

    def __init__(self, known: Iterable[Alarm] = ()) -> None:
        self._alarms: dict[int, Alarm] = dict(enumerate(known))
        self._count = len(self._alarms)  # with those that were dropped
        self._sqnrs: dict[CastLabels, deque[float]] = {}
        self._streaks: dict[tuple[CastLabels, str], _Streak] = {}
        for number, alarm in self._alarms.items():
            if alarm.is_active:
                self._streaks[alarm.labels, alarm.rule] = _Streak(alarm=number)

    @property
    def alarms(self) -> list[Alarm]:
        """All, in the order in which they started."""
        return list(self._alarms.values())

    def see(self, report: Report) -> Changes:
        """Apply the rules to the next report; one without a step is left out."""
        started: list[tuple[int, float, Alarm]] = []
        ended: list[Alarm] = []
        for cast in report.casts if report.step is not None else ():
            labels = cast.labels
            earlier = self._sqnrs.setdefault(labels, deque(maxlen=KEPT_LOOKS))
            is_fine = True
            for place, rule in enumerate(ALARM_RULES):
                kind = rule.kind or _falls(earlier, cast.format)
                is_wrong = cast.operand in rule.operands and kind.level(cast) > FINE
                is_wrong = is_wrong and (is_fine or rule.kind is not None)
                if is_wrong:
                    alarm = self._see_wrong(rule, kind, cast, report.step or 0)
                    # inf and NaN spread: their first layer says more than that with most of them.
                    severity = 0.0 if kind is problems.NONFINITE else -kind.severity(cast)
                    started += [] if alarm is None else [(place, severity, alarm)]
                else:
                    alarm = self._see_fine(rule, labels, report.step or 0)
                    ended += [] if alarm is None else [alarm]
                is_fine = is_fine and not is_wrong
            has_fallen = is_wrong  # the last rule's
            if not has_fallen and cast.sqnr is not None and cast.sqnr > -math.inf:
                earlier.append(cast.sqnr)
        over = len(self._alarms) - KEPT_ALARMS
        has_ended = [number for number, alarm in self._alarms.items() if not alarm.is_active]
        for number in has_ended[: max(over, 0)]:
            del self._alarms[number]
        active = [alarm for alarm in self._alarms.values() if alarm.is_active]
        started.sort(key=lambda each: each[:2])
        return Changes([alarm for *_, alarm in started], ended, active)

    def _see_wrong(
        self, rule: AlarmRule, kind: ProblemKind, cast: CastStatistics, step: int
    ) -> Alarm | None:
        """Note that a cast is wrong; the alarm, if it starts now."""
        labels = cast.labels
        streak = self._streaks.setdefault((labels, rule.name), _Streak())
        streak.first = streak.first if streak.wrong else step
        streak.wrong, streak.fine = streak.wrong + 1, 0
        is_massive = kind is problems.SATURATES and (cast.saturated or 0.0) > MASSIVE
        if streak.alarm is not None:
            self._alarms[streak.alarm] = replace(self._alarms[streak.alarm], last=step)
        elif streak.wrong >= rule.looks or is_massive:
            since, text = streak.first, kind.message(cast)
            alarm = Alarm(rule.name, *labels, since, step, step, None, text, kind.advice)
            streak.alarm, self._count = self._count, self._count + 1
            self._alarms[streak.alarm] = alarm
            return alarm
        return None

    def _see_fine(self, rule: AlarmRule, labels: CastLabels, step: int) -> Alarm | None:
        """Note that a cast is not wrong; the alarm, if it ends now."""
        streak = self._streaks.get((labels, rule.name))
        if streak is None:
            return None
        streak.wrong, streak.fine = 0, streak.fine + 1
        is_over = streak.alarm is None or streak.fine >= rule.looks
        return self.end(labels, rule.name, step) if is_over else None

    def end(self, labels: CastLabels, rule: str, step: int) -> Alarm | None:
        """End the streak of a cast and a rule; the alarm, if one was active."""
        streak = self._streaks.pop((labels, rule), None)
        if streak is None or streak.alarm is None:
            return None
        self._alarms[streak.alarm] = replace(self._alarms[streak.alarm], ended=step)
        return self._alarms[streak.alarm]


def watch_of(reports: Sequence[Report], stored: Iterable[Alarm] = ()) -> AlarmWatch:
    """The watch of a run after its reports.

    Args:
        reports: in the order of the steps.
        stored: the alarms of its file, of which those count that these reports cannot show: they
            began before them.
    """
    steps = [report.step for report in reports if report.step is not None]
    oldest, newest = min(steps, default=0), max(steps, default=0)
    earlier = [alarm for alarm in stored if alarm.first < oldest and alarm.started <= newest]
    # Those that had not ended before the reports are active in them. They end where they did, also
    # where some of the looks at which they were not wrong are no longer among the reports.
    watch = AlarmWatch(
        replace(alarm, last=min(alarm.last, newest), ended=None)
        if alarm.ended is not None and alarm.ended >= oldest
        else alarm
        for alarm in earlier
    )
    for report in reports:
        watch.see(report)
        for alarm in earlier:
            if alarm.ended is not None and alarm.ended == report.step:
                watch.end(alarm.labels, alarm.rule, alarm.ended)
    return watch
