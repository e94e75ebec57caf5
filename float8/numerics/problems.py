"""Problems of a cast, and their remedies, in plain words.

The loss of a cast of a well-scaled operand depends on the format's mantissa only. A relative error
that is uniform over half a step, 2^-(m+1), gives E4M3 (m = 3) about 32 dB and E5M2 about 26 dB. The
thresholds are relative to that, not fixed numbers of dB::

    not finite   any inf or NaN in the operand
    saturated    more than 1 in 1,000 elements beyond the range; bad from 1 in 100
    flushed      more than 14 % of the elements became zero, bad from 50 %; of a gradient one level
                 lower where the SQNR is as expected, as in the gradient of a softmax: the lost
                 elements were small. In an input or a weight few outliers then have nearly all
                 of the power, and the model needs the rest (docs/quality.md). Up to 11 % were lost
                 behind a healthy SwiGLU, whose gate closes; 14 % and more with an outlier
    noisy        an SQNR 6 dB below that of the format, which is twice its error; bad from 15 dB;
                 not where saturation or flushing of the same level is the reason
    stale        a delayed or static scale half an octave too small, or a delayed one six too large
    drowns       the casts' error in the weight's gradient is 1/sqrt(3) of it (`gradient_error`)

The thresholds are a matter of judgement; the page also shows the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from float8.formats import FORMATS
from float8.numerics.statistics import CastStatistics

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


@dataclass(frozen=True)
class ProblemKind:
    """One thing that can be wrong with a cast.

    Args:
        many, one: its name after "3 casts" and after "one cast".
        level: of a cast: `FINE`, `SUSPICIOUS` or `BAD`.
        severity: orders casts of one level.
        message: about one cast.
        advice: what to do about it.
    """

    many: str
    one: str
    level: Callable[[CastStatistics], int]
    severity: Callable[[CastStatistics], float]
    message: Callable[[CastStatistics], str]
    advice: str


@dataclass(frozen=True)
class Problem:
    """A kind of problem, and the casts that have it, the worst first."""

    kind: ProblemKind
    level: int
    casts: tuple[CastStatistics, ...]

    @property
    def title(self) -> str:
        """The number of casts that have this problem."""
        count = len(self.casts)
        return f"One cast {self.kind.one}" if count == 1 else f"{count} casts {self.kind.many}"

    @property
    def text(self) -> str:
        """The message about the worst cast."""
        worst = self.casts[0]
        prefix = "The worst: " if len(self.casts) > 1 else ""
        name = worst.layer or "the module itself"
        return f"{prefix}{name}, {worst.operand}. {self.kind.message(worst)}"


def problems_of(casts: Sequence[CastStatistics]) -> list[Problem]:
    """The problems of these casts, the worst kind first."""
    found = []
    for kind in PROBLEM_KINDS:
        concerned = [cast for cast in casts if kind.level(cast) > FINE]
        if concerned:
            concerned.sort(key=lambda cast: (kind.level(cast), kind.severity(cast)), reverse=True)
            found.append(Problem(kind, kind.level(concerned[0]), tuple(concerned)))
    return sorted(found, key=lambda problem: -problem.level)


def kinds_of(cast: CastStatistics) -> list[ProblemKind]:
    """One cast's problems."""
    return [kind for kind in PROBLEM_KINDS if kind.level(cast) > FINE]


def level_of(cast: CastStatistics) -> int:
    """The worst level of a cast."""
    return max(kind.level(cast) for kind in PROBLEM_KINDS)


def noisy_below(format_name: str) -> float:
    """The SQNR in dB below which a cast of this format is noisy, for any reason."""
    return EXPECTED_SQNR[format_name] - MISSING_SQNR[0]


def _level(value: float | None, limits: tuple[float, float]) -> int:
    """FINE where the value is not known."""
    return sum(value > limit for limit in limits) if value is not None else FINE


def _missing_decibels(cast: CastStatistics) -> float | None:
    return None if cast.sqnr is None else EXPECTED_SQNR[cast.format] - cast.sqnr


def _is_lost(cast: CastStatistics) -> bool:
    """Whether nothing finite was left, as after an inf in the operand made its scale inf."""
    return cast.sqnr == -math.inf


def _sqnr_level(cast: CastStatistics) -> int:
    return _level(_missing_decibels(cast), MISSING_SQNR)


def _flush_level(cast: CastStatistics) -> int:
    level = FINE if _is_lost(cast) else _level(cast.flushed, FLUSHED)
    is_harmless = cast.operand == "grad_output" and not _sqnr_level(cast)
    return max(level - 1, FINE) if is_harmless else level


def _noise_level(cast: CastStatistics) -> int:
    level = FINE if _is_lost(cast) else _sqnr_level(cast)
    # The advice against noise does not help against these.
    return level if level > max(_level(cast.saturated, SATURATED), _flush_level(cast)) else FINE


def _staleness_level(cast: CastStatistics) -> int:
    stale = cast.staleness or 0.0
    # A static scale is larger on purpose, and its flushed elements are another problem.
    is_too_large = cast.scaling == "delayed" and stale < STALE_BELOW
    return SUSPICIOUS if stale > STALE_ABOVE or is_too_large else FINE


def _gradient_sqnr(cast: CastStatistics) -> float:
    return math.inf if cast.gradient_sqnr is None else cast.gradient_sqnr


def _flush_message(cast: CastStatistics) -> str:
    lost = f"{100 * (cast.flushed or 0.0):.3g} % of its elements became zero"
    if cast.sqnr is None or _sqnr_level(cast):
        return f"{lost}." if cast.sqnr is None else f"{lost}; its SQNR is {cast.sqnr:.1f} dB."
    return (
        f"{lost}. Its SQNR of {cast.sqnr:.1f} dB does not show them: it follows the large elements."
    )


def _noise_message(cast: CastStatistics) -> str:
    expected = f"{EXPECTED_SQNR[cast.format]:.0f} dB is what {cast.format.upper()} gives by itself"
    has_outliers = (cast.kurtosis or 0.0) > MANY_OUTLIERS
    why = f"; a kurtosis of {cast.kurtosis:.3g} says outliers" if has_outliers else ""
    return f"Its SQNR is {cast.sqnr:.1f} dB, where {expected}{why}."


def _staleness_message(cast: CastStatistics) -> str:
    stale = cast.staleness or 0.0
    octaves = f"{abs(stale):.1f} octaves {'above' if stale > 0 else 'below'}"
    return f"Its amax lies {octaves} what its {cast.scaling} scale was made for."


NONFINITE = ProblemKind(
    "met inf or NaN",
    "met inf or NaN",
    lambda cast: BAD if cast.nonfinite or _is_lost(cast) else FINE,
    lambda cast: cast.nonfinite,
    lambda cast: f"{cast.nonfinite:,} of {cast.elements:,} elements are not finite.",
    "float8.find_nan(model, batch) names the first module that made one. A cast never makes "
    "inf or NaN of finite values: look for the cause in the model, the data or the step size.",
)
SATURATES = ProblemKind(
    "saturate",
    "saturates",
    lambda cast: _level(cast.saturated, SATURATED),
    lambda cast: cast.saturated or 0.0,
    lambda cast: (
        f"{100 * (cast.saturated or 0.0):.3g} % of its elements lie beyond the format's range."
    ),
    "A delayed scale lags behind: DelayedScalingConfig(margin=2) leaves a factor of 4 for values "
    "that grow, and float8.after_step(model) must follow each step. A static scale needs to be "
    'calibrated again. A dynamic scale never saturates: in recipe "unit" give inputs one, '
    "cast_config_input=CastConfig().",
)
FLUSHES = ProblemKind(
    "flush to zero",
    "flushes to zero",
    _flush_level,
    lambda cast: cast.flushed or 0.0,
    _flush_message,
    "Its values span more octaves than the format has: let fewer of them share a scale (recipe "
    '"rowwise" or "blockwise"), give the layer behind a SwiGLU smooth_input=True, or keep '
    "gradients in E5M2, which reaches further down. A static scale is too large for them: "
    "calibrate it, or take a dynamic recipe. In a gradient whose SQNR is as expected the lost "
    "elements are small, and often harmless.",
)
NOISY = ProblemKind(
    "lose precision",
    "loses precision",
    _noise_level,
    lambda cast: _missing_decibels(cast) or 0.0,
    _noise_message,
    "Leave the layers out, module_filter_fn=float8.accurate_layers(report, min_sqnr=20), or "
    'let fewer elements share a scale (recipe "rowwise" or "blockwise"). Whether it hurts the '
    "result: float8.compare(model, batch).",
)
STALE = ProblemKind(
    "have a stale scale",
    "has a stale scale",
    _staleness_level,
    lambda cast: abs(cast.staleness or 0.0),
    _staleness_message,
    "Above, values saturate: add margin, or take a dynamic recipe while training is unstable. "
    "Below, the upper end of the format is unused: a shorter history forgets old peaks sooner. A "
    "delayed scale that stays stale is not updated: call float8.after_step(model) in every step.",
)
DROWNS = ProblemKind(
    "have errors that drown the weight's gradient",
    "has errors that drown the weight's gradient",
    lambda cast: FINE if _gradient_sqnr(cast) >= DROWNED_BELOW else SUSPICIOUS,
    lambda cast: -_gradient_sqnr(cast),
    lambda cast: (
        f"The casts of its layer leave the weight's gradient an SQNR of {_gradient_sqnr(cast):.1f} "
        f"dB; below {DROWNED_BELOW:.1f} dB training gains little from it."
    ),
    'Let fewer elements share a scale (recipe "rowwise" or "blockwise"), compute this gradient in '
    'high precision (recipe "rowwise_with_gw_hp"), or leave the layer out. With healthy casts the '
    "gradient itself has become small: a larger batch, or the end of what float8 can train.",
)
PROBLEM_KINDS = (NONFINITE, SATURATES, FLUSHES, NOISY, STALE, DROWNS)
