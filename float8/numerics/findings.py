"""What is wrong with a cast, and what to do about it, in plain words.

A cast of a well-scaled operand loses what the format's mantissa says: a relative error uniform over
half a step, 2^-(m+1), gives E4M3 (m = 3) about 32 dB and E5M2 about 26 dB, whatever the operand's
size. So a finding is measured against that, not against a fixed number of dB::

    not finite   any inf or NaN in the operand
    saturated    more than 1 in 1,000 elements beyond the range; bad from 1 in 100
    flushed      more than 1 in 10 elements became zero, bad from 1 in 2; a level less where the
                 SQNR is as expected: what was lost was small, as in the gradient of a softmax
    noisy        an SQNR 6 dB below what the format gives: twice its error; bad from 15 dB; unless
                 saturation or flushing as bad says why
    stale        a delayed or static scale half an octave too small, or a delayed one six too large

Thresholds are judgements, not laws: they are constants here, and the page says the numbers too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from float8.formats import FORMATS
from float8.numerics.rows import Row

FINE, SUSPICIOUS, BAD = 0, 1, 2
# Of a well-scaled operand, in dB; the mantissa's.
EXPECTED_SQNR = {f.name: 32.0 if f.name.startswith("e4m3") else 26.0 for f in FORMATS.values()}


_NOISY, _VERY_NOISY = 6.0, 15.0  # dB below it


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong.

    Args:
        many, one: what several casts, or one, are said to do.
        level: of a row: `FINE`, `SUSPICIOUS` or `BAD`.
        severity: what the worst row of a level has most of.
        says: what happened to that row.
        advice: what to do about it.
    """

    many: str
    one: str
    level: Callable[[Row], int]
    severity: Callable[[Row], float]
    says: Callable[[Row], str]
    advice: str


@dataclass(frozen=True)
class Finding:
    """A rule, and the rows that it found; the worst first."""

    rule: Rule
    level: int
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """How many casts are concerned."""
        count = len(self.rows)
        return f"One cast {self.rule.one}" if count == 1 else f"{count} casts {self.rule.many}"

    @property
    def text(self) -> str:
        """What happened to the worst row."""
        worst = self.rows[0]
        of = "The worst: " if len(self.rows) > 1 else ""
        return f"{of}{worst.layer or 'the module itself'}, {worst.operand}. {self.rule.says(worst)}"


def findings(rows: Sequence[Row]) -> list[Finding]:
    """What is wrong with these rows, the worst kind first; nothing if all is well."""
    found = []
    for rule in RULES:
        concerned = [row for row in rows if rule.level(row) > FINE]
        if concerned:
            concerned.sort(key=lambda row: (rule.level(row), rule.severity(row)), reverse=True)
            found.append(Finding(rule, rule.level(concerned[0]), tuple(concerned)))
    return sorted(found, key=lambda finding: -finding.level)


def rules_broken(row: Row) -> list[int]:
    """The indices in `RULES` of what is wrong with one row."""
    return [i for i, rule in enumerate(RULES) if rule.level(row) > FINE]


def level_of(row: Row) -> int:
    """The worst level of a row."""
    return max(rule.level(row) for rule in RULES)


def noisy_below(format_name: str) -> float:
    """The SQNR in dB under which a cast of this format is noisy, for whatever reason."""
    return EXPECTED_SQNR[format_name] - _NOISY


def _between(value: float | None, suspicious: float, bad: float) -> int:
    if value is None:
        return FINE
    return BAD if value > bad else SUSPICIOUS if value > suspicious else FINE


def _missing(row: Row) -> float | None:
    """How many dB an SQNR lacks."""
    return None if row.sqnr is None else EXPECTED_SQNR[row.format] - row.sqnr


def _is_lost(row: Row) -> bool:
    """Nothing finite was left: an inf in the operand made its scale inf, and so on."""
    return row.sqnr == -math.inf


def _saturation_level(row: Row) -> int:
    return _between(row.saturated, 1e-3, 1e-2)


def _flush_level(row: Row) -> int:
    if _is_lost(row):
        return FINE
    level = _between(row.flushed, 0.1, 0.5)
    return level if _noise(row) else max(level - 1, FINE)


def _noise(row: Row) -> int:
    return _between(_missing(row), _NOISY, _VERY_NOISY)


def _noise_level(row: Row) -> int:
    if _is_lost(row):
        return FINE
    level = _noise(row)
    # What is advised against noise alone does not help against these.
    return level if level > max(_saturation_level(row), _flush_level(row)) else FINE


def _lag(row: Row) -> float:
    return 0.0 if row.staleness is None else row.staleness


def _says_flush(row: Row) -> str:
    kept = "" if row.sqnr is None else f"; its SQNR is {row.sqnr:.1f} dB"
    return f"{100 * (row.flushed or 0.0):.3g} % of its elements became zero{kept}."


def _says_noise(row: Row) -> str:
    expected = f"{EXPECTED_SQNR[row.format]:.0f} dB is what {row.format.upper()} gives by itself"
    outliers = (row.kurtosis or 0.0) > 30
    why = f"; a kurtosis of {row.kurtosis:.3g} says outliers" if outliers else ""
    return f"Its SQNR is {row.sqnr:.1f} dB, where {expected}{why}."


def _staleness_level(row: Row) -> int:
    # A static scale leaves room on purpose; what it flushes is said elsewhere.
    is_wasteful = row.scaling == "delayed" and _lag(row) < -6.0
    return SUSPICIOUS if _lag(row) > 0.5 or is_wasteful else FINE


def _staleness(row: Row) -> str:
    octaves, side = abs(_lag(row)), "above" if _lag(row) > 0 else "below"
    return f"Its amax lies {octaves:.1f} octaves {side} what its {row.scaling} scale was made for."


RULES = (
    Rule(
        "met inf or NaN",
        "met inf or NaN",
        lambda row: BAD if row.nonfinite or _is_lost(row) else FINE,
        lambda row: row.nonfinite,
        lambda row: f"{row.nonfinite:,} of {row.elements:,} elements are not finite.",
        "float8.find_nan(model, batch) names the first module that made one. A cast never makes "
        "inf or NaN of finite values: look for the cause in the model, the data or the step size.",
    ),
    Rule(
        "saturate",
        "saturates",
        _saturation_level,
        lambda row: row.saturated or 0.0,
        lambda row: (
            f"{100 * (row.saturated or 0.0):.2g} % of its elements lie beyond the format's range."
        ),
        "A delayed scale lags behind: give DelayedScalingConfig a margin or a longer history, and "
        "call float8.sync_float8_amax_and_scale_history(model) after each step. A static scale "
        "wants calibrating again. A dynamic scale never saturates.",
    ),
    Rule(
        "flush to zero",
        "flushes to zero",
        _flush_level,
        lambda row: row.flushed or 0.0,
        _says_flush,
        "Its values span more octaves than the format has: let fewer of them share a scale (recipe "
        '"rowwise" or "blockwise"), or keep gradients in E5M2, which reaches further down. A '
        "static scale is too large for them: calibrate it, or take a dynamic recipe. Where the "
        "SQNR is as expected, what was lost is small, and often harmless.",
    ),
    Rule(
        "lose precision",
        "loses precision",
        _noise_level,
        lambda row: _missing(row) or 0.0,
        _says_noise,
        "Leave the layers out, module_filter_fn=float8.accurate_layers(report, min_sqnr=20), or "
        'let fewer elements share a scale (recipe "rowwise" or "blockwise"). Whether it hurts the '
        "result: float8.compare(model, batch).",
    ),
    Rule(
        "have a stale scale",
        "has a stale scale",
        _staleness_level,
        lambda row: abs(_lag(row)),
        _staleness,
        "Above, values saturate: add margin, or take a dynamic recipe while training is unstable. "
        "Below, the upper end of the format is unused: a shorter history forgets old peaks sooner.",
    ),
)
