"""Problems of a cast, and their remedies, in plain words; alarms: problems that last.

**Problems.** The loss of a cast of a well-scaled operand depends on the format's mantissa only. A
relative error that is uniform over half a step, 2^-(m+1), gives E4M3 (m = 3) about 32 dB and E5M2
about 26 dB. The thresholds are relative to that, not fixed numbers of dB::

    inf or NaN      any in the operand
    saturation      more than 1 in 1,000 elements beyond the range; bad from 1 in 100
    flush           more than 14 % of the elements became zero, bad from 50 %; of a gradient one
                    level lower where the SQNR is as expected, as in the gradient of a softmax: the
                    lost elements were small. In an input or a weight few outliers then have nearly
                    all of the power, and the model needs the rest (docs/quality.md). Up to 11 %
                    were lost behind a healthy SwiGLU, whose gate closes; 14 % and more with an
                    outlier
    noise           an SQNR 6 dB below that of the format, which is twice its error; bad from 15 dB;
                    not where saturation or flush of the same level is the reason
    gradient noise  the casts' error in the weight's gradient is 1/sqrt(3) of it (`gradient_error`)
    stale scale     a delayed or static scale half an octave too small, or a delayed one six too
                    large

The thresholds are a matter of judgement; the page also shows the numbers.

**Alarms** come from the sequence of a run's reports. A single bad look is often nothing: a delayed
scale is late by a step, a batch is unusual. An alarm starts when a cast has a problem, suspicious
or bad, at so many looks in a row, and ends after as many looks in a row at which it has not:
`ProblemKind.looks`, which is 3, for inf and NaN 1, and in a gradient 2. Saturation of more than
10 % is one at the first look.

Why so many looks: inf and NaN do not go away by themselves. In a gradient, a GradScaler makes them
on purpose and skips the step. The others happen at single looks of healthy runs, above all while
the learning rate rises; ``benchmarks/bench_alarms.py`` found none at three in a row, 10 steps
apart. Looks at consecutive steps are like one look. Saturation above 10 % starts an alarm at once:
healthy runs had at most 0.9 % at any step, and weights that start at zero up to 83 % under delayed
scales that were dynamic in one step only.

A run that resumes has the alarms of its file, and counts looks in the reports of that file. A cast
that a report lacks, as of a layer that was not called, changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from float8.formats import FORMATS
from float8.numerics.statistics import CastLabels, CastStatistics

if TYPE_CHECKING:
    from float8.numerics.snapshot import Report

FINE, SUSPICIOUS, BAD = 0, 1, 2
# Of a well-scaled operand, in dB.
EXPECTED_SQNR = {f.name: 32.0 if f.name.startswith("e4m3") else 26.0 for f in FORMATS.values()}
# The values above which a cast is suspicious, and bad.
SATURATED = 1e-3, 1e-2  # fractions of the elements
FLUSHED = 0.14, 0.5
MISSING_SQNR = 6.0, 15.0  # dB below what is expected
STALE_ABOVE, STALE_BELOW = 0.5, -6.0  # octaves; outside of them a cast is suspicious
DROWNED_BELOW = 10 * math.log10(3)  # dB, of the weight's gradient: see gradient_error.py
MANY_OUTLIERS = 30.0  # a kurtosis: no problem by itself, but the reason for a low SQNR


class Seen(NamedTuple):
    """A problem of a cast: its level, how bad it is among its kind, and a message with numbers."""

    level: int
    value: float
    message: str


class ProblemKind(NamedTuple):
    """One thing that can be wrong with a cast.

    Args:
        name: such as "saturation".
        column: of the table of casts, in which it is seen.
        see: what is wrong with a cast, or None.
        advice: what to do about it.
        looks: in a row that start and end an alarm; of a gradient at least 2.
    """

    name: str
    column: str
    see: Callable[[CastStatistics], Seen | None]
    advice: str
    looks: int = 3


class Problem(NamedTuple):
    """A kind of problem, and the casts that have it, the worst first, with what was seen of it."""

    kind: ProblemKind
    level: int
    casts: list[CastStatistics]
    title: str
    text: str


def problems_of(casts: Sequence[CastStatistics]) -> list[Problem]:
    """The problems of these casts, the worst kind first."""
    found = []
    for kind in PROBLEM_KINDS:
        pairs = [(seen, cast) for cast in casts if (seen := kind.see(cast)) is not None]
        if pairs:
            pairs.sort(key=lambda pair: pair[0][:2], reverse=True)
            (worst, first), is_one = pairs[0], len(pairs) == 1
            title = kind.name if is_one else f"{kind.name} of {len(pairs)} casts"
            text = f"{'' if is_one else 'The worst: '}{first.place}. {worst.message}"
            found.append(Problem(kind, worst.level, [cast for _, cast in pairs], title, text))
    return sorted(found, key=lambda problem: -problem.level)


def kinds_of(cast: CastStatistics) -> list[ProblemKind]:
    """One cast's problems."""
    return [problem.kind for problem in problems_of([cast])]


def level_of(cast: CastStatistics) -> int:
    """The worst level of a cast."""
    return max((problem.level for problem in problems_of([cast])), default=FINE)


def wrong_columns(cast: CastStatistics) -> set[str]:
    """The columns in which something is wrong; SQNR also where another problem explains it."""
    return {kind.column for kind in kinds_of(cast)} | ({"sqnr"} if _sqnr_level(cast) else set())


def _level(value: float | None, limits: tuple[float, float]) -> int:
    """FINE where the value is not known."""
    return sum(value > limit for limit in limits) if value is not None else FINE


def _seen(level: int, value: float | None, message: str) -> Seen | None:
    return Seen(level, value or 0.0, message) if level else None


def _is_lost(cast: CastStatistics) -> bool:
    """Whether nothing finite was left, as after an inf in the operand made its scale inf."""
    return cast.sqnr == -math.inf


def _sqnr_level(cast: CastStatistics) -> int:
    missing = None if cast.sqnr is None else EXPECTED_SQNR[cast.format] - cast.sqnr
    return _level(missing, MISSING_SQNR)


def _nonfinite(cast: CastStatistics) -> Seen | None:
    level = BAD if cast.nonfinite or _is_lost(cast) else FINE
    text = f"{cast.nonfinite:,} of {cast.elements:,} elements are not finite."
    # inf and NaN spread: their first layer says more than that with most of them.
    return _seen(level, None, text)


def _saturated(cast: CastStatistics) -> Seen | None:
    level, share = _level(cast.saturated, SATURATED), 100 * (cast.saturated or 0.0)
    text = f"{share:.3g} % of its elements lie beyond the format's range."
    return _seen(level, cast.saturated, text)


def _flushed(cast: CastStatistics) -> Seen | None:
    level, is_noisy = _level(cast.flushed, FLUSHED), _sqnr_level(cast) > FINE
    if _is_lost(cast) or (cast.operand == "grad_output" and not is_noisy):
        level = FINE if _is_lost(cast) else max(level - 1, FINE)
    text = f"{100 * (cast.flushed or 0.0):.3g} % of its elements became zero"
    if cast.sqnr is not None and is_noisy:
        text += f"; its SQNR is {cast.sqnr:.1f} dB"
    elif cast.sqnr is not None:
        text += (
            f". Its SQNR of {cast.sqnr:.1f} dB does not show them: it follows the large elements"
        )
    return _seen(level, cast.flushed, f"{text}.")


def _noisy(cast: CastStatistics) -> Seen | None:
    level = FINE if _is_lost(cast) else _sqnr_level(cast)
    if cast.sqnr is None or any(s and s.level >= level for s in (_saturated(cast), _flushed(cast))):
        return None  # the advice against noise does not help against these
    expected = EXPECTED_SQNR[cast.format]
    outliers = (cast.kurtosis or 0.0) > MANY_OUTLIERS
    why = f"; a kurtosis of {cast.kurtosis:.3g} says outliers" if outliers else ""
    text = f"Its SQNR is {cast.sqnr:.1f} dB, where {expected:.0f} dB is what "
    text += f"{cast.format.upper()} gives by itself{why}."
    return _seen(level, expected - cast.sqnr, text)


def _stale(cast: CastStatistics) -> Seen | None:
    stale = cast.staleness or 0.0
    # A static scale is larger on purpose, and its flushed elements are another problem.
    is_too_large = cast.scaling == "delayed" and stale < STALE_BELOW
    level = SUSPICIOUS if stale > STALE_ABOVE or is_too_large else FINE
    octaves = f"{abs(stale):.1f} octaves {'above' if stale > 0 else 'below'}"
    text = f"Its amax lies {octaves} what its {cast.scaling} scale was made for."
    return _seen(level, abs(stale), text)


def _drowned(cast: CastStatistics) -> Seen | None:
    sqnr = math.inf if cast.gradient_sqnr is None else cast.gradient_sqnr
    text = (
        f"The casts of its layer leave the weight's gradient an SQNR of {sqnr:.1f} dB; below "
        f"{DROWNED_BELOW:.1f} dB training gains little from it."
    )
    return _seen(SUSPICIOUS if sqnr < DROWNED_BELOW else FINE, -sqnr, text)


NONFINITE = ProblemKind(
    "inf or NaN",
    "sqnr",
    _nonfinite,
    "float8.find_nan(model, batch) names the first module that made one. A cast never makes "
    "inf or NaN of finite values: look for the cause in the model, the data or the step size.",
    looks=1,
)
SATURATES = ProblemKind(
    "saturation",
    "saturated",
    _saturated,
    "A delayed scale lags behind: DelayedScalingConfig(margin=2) leaves a factor of 4 for values "
    "that grow, and float8.after_step(model) must follow each step. A static scale needs to be "
    'calibrated again. A dynamic scale never saturates: in recipe "unit" give inputs one, '
    "cast_config_input=CastConfig().",
)
FLUSHES = ProblemKind(
    "flush",
    "flushed",
    _flushed,
    "Its values span more octaves than the format has: let fewer of them share a scale (recipe "
    '"rowwise" or "blockwise"), give the layer behind a SwiGLU smooth_input=True, or keep '
    "gradients in E5M2, which reaches further down. A static scale is too large for them: "
    "calibrate it, or take a dynamic recipe. In a gradient whose SQNR is as expected the lost "
    "elements are small, and often harmless.",
)
NOISY = ProblemKind(
    "noise",
    "sqnr",
    _noisy,
    "Leave the layers out, module_filter_fn=float8.accurate_layers(report, min_sqnr=20), or "
    'let fewer elements share a scale (recipe "rowwise" or "blockwise"). A static scale, or a '
    "scale of 1, may fit no longer: calibrate it, or take a dynamic recipe. Whether it hurts the "
    "result: float8.compare(model, batch).",
)
STALE = ProblemKind(
    "stale scale",
    "staleness",
    _stale,
    "Above, values saturate: add margin, or take a dynamic recipe while training is unstable. "
    "Below, the upper end of the format is unused: a shorter history forgets old peaks sooner. A "
    "delayed scale that stays stale is not updated: call float8.after_step(model) in every step.",
)
DROWNS = ProblemKind(
    "gradient noise",
    "sqnr",
    _drowned,
    'Let fewer elements share a scale (recipe "rowwise" or "blockwise"), compute this gradient in '
    'high precision (recipe "rowwise_with_gw_hp"), or leave the layer out. With healthy casts the '
    "gradient itself has become small: a larger batch, or the end of what float8 can train.",
)
PROBLEM_KINDS = (NONFINITE, SATURATES, FLUSHES, NOISY, DROWNS, STALE)  # the worst first

# --- alarms

MASSIVE = 0.1  # a saturated fraction of the elements: one look is enough
KEPT_ALARMS = 1000  # of those that have ended, the newest


@dataclass(frozen=True)
class Alarm(CastLabels):
    """A problem of a cast that lasted.

    Args:
        layer, operand, gemm, format, scaling, granularity: which cast; see `CastStatistics`.
        rule: the name of its kind of problem, as "saturation".
        first: the step of the first look at which the cast was wrong.
        started: the step of the look at which the alarm started.
        last: the step of the last look so far at which the cast was wrong.
        ended: the step of the look at which the alarm ended, or None.
        message: what was measured when it started.
        advice: what to do about it.
    """

    rule: str
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

    def __str__(self) -> str:
        since = "" if self.first == self.started else f" It has been so since step {self.first}."
        return f"{self.rule}: {self.place}. {self.message}{since} {self.advice}"


class Changes(NamedTuple):
    """What one look changed, the worst first, and the alarms that are active after it."""

    started: list[Alarm]
    ended: list[Alarm]
    active: list[Alarm]


class AlarmWatch:
    """Applies the rules to one report after the other.

    Args:
        reports: of a run that resumes, in the order of the steps.
        stored: the alarms of its file, of which those count that started at one of these steps or
            before; None finds them again in the reports.
    """

    def __init__(
        self, reports: Sequence[Report] = (), stored: Iterable[Alarm] | None = None
    ) -> None:
        self._active: dict[tuple[object, ...], Alarm] = {}  # by cast and rule
        self._ended: list[Alarm] = []
        # Of a cast and a rule: how many of the newest looks in a row were wrong, or minus how many
        # were not; and the step of the first of them.
        self._rows: dict[tuple[object, ...], tuple[int, int]] = {}
        for report in reports:
            self.see(report)
        if stored is not None:
            newest = max((r.step for r in reports if r.step is not None), default=-1)
            self._active, self._ended = {}, []
            for alarm in stored:
                if alarm.ended is not None and alarm.ended <= newest:
                    self._ended.append(alarm)
                elif alarm.started <= newest:
                    key, last = (*alarm.labels, alarm.rule), min(alarm.last, newest)
                    self._active[key] = replace(alarm, last=last, ended=None)

    @property
    def active(self) -> list[Alarm]:
        """Those that have not ended."""
        return list(self._active.values())

    @property
    def alarms(self) -> list[Alarm]:
        """All, in the order in which they started."""
        return sorted([*self._ended, *self.active], key=lambda alarm: alarm.started)

    def see(self, report: Report) -> Changes:
        """Apply the rules to the next report; one without a step is left out."""
        started: list[tuple[int, float, Alarm]] = []
        ended: list[Alarm] = []
        step = -1 if report.step is None else report.step
        for cast in report.casts if report.step is not None else ():
            least = 2 if cast.operand == "grad_output" else 1
            for place, kind in enumerate(PROBLEM_KINDS):
                key, seen = (*cast.labels, kind.name), kind.see(cast)
                looks = max(kind.looks, least)
                sign = -1 if seen is None else 1
                count, first = self._rows.get(key, (0, step))
                count, first = (count + sign, first) if count * sign > 0 else (sign, step)
                self._rows[key] = count, first
                alarm = self._active.get(key)
                if seen is None:
                    if alarm is not None and count <= -looks:
                        ended.append(replace(self._active.pop(key), ended=step))
                elif alarm is not None:
                    self._active[key] = replace(alarm, last=step)
                elif count >= looks or (kind is SATURATES and seen.value > MASSIVE):
                    what: dict[str, Any] = cast.named | {"rule": kind.name, "first": first}
                    what |= {"message": seen.message, "advice": kind.advice}
                    alarm = Alarm(**what, started=step, last=step, ended=None)
                    self._active[key] = alarm
                    started.append((place, -seen.value, alarm))
        self._ended = [*self._ended, *ended][-KEPT_ALARMS:]
        started.sort(key=lambda each: each[:2])
        return Changes([alarm for *_, alarm in started], ended, self.active)
