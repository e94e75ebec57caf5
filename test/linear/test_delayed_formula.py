"""Delayed scales follow TransformerEngine's rule, step by step, over hundreds of random steps.

The rule is written here in plain Python, in float64 and in TransformerEngine's own layout: slot 0
of the history is the step that runs, an update takes the maximum over all slots (or slot 0), rolls
them by one and clears slot 0. Histories and scales of real casts go through real calls of ``sync``.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from unittest import mock

import pytest
import shapes
import torch
from torch import nn

from float8 import sync_float8_amax_and_scale_history
from float8.config import CastConfig, DelayedScalingConfig, Float8LinearConfig, ScalingType
from float8.formats import E4M3, E5M2
from float8.linear import delayed
from float8.linear.cast import DelayedCast, make_cast

FLOAT32_MAX, SMALLEST_SCALE = torch.finfo(torch.float32).max, 2.0**-126
ROUNDING = 2.0**-22  # two roundings to float32 of 2^-24 each, and then some
STEPS = 300


class Published:
    """One operand as TransformerEngine keeps it; ``factor`` multiplies, as its ``scale`` does."""

    def __init__(self, config: DelayedScalingConfig, format_max: float, pow2: bool) -> None:
        self.config, self.format_max, self.pow2 = config, format_max, pow2
        self.history, self.factor = [0.0] * config.history_len, 1.0
        self.steps_left = 0  # before a scale is due

    def step(self, amax: float) -> None:
        self.history[0] = amax if math.isfinite(amax) else math.inf
        found = max(self.history) if self.config.amax_compute_algo == "max" else self.history[0]
        self.history = [*self.history[1:], self.history[0]]
        self.history[0] = 0.0
        if self.steps_left > 0:
            self.steps_left -= 1
        elif 0 < found < math.inf:
            factor = min(self.format_max / found / 2.0**self.config.margin, 1 / SMALLEST_SCALE)
            if self.pow2:  # its releases before 1.0: 2^(floor(log2(max / amax)) - margin)
                factor = 2.0 ** (math.frexp(factor)[1] - 1)
            if 1 / factor <= FLOAT32_MAX:  # ours alone: there such a factor is 0, or nearly so
                self.factor, self.steps_left = factor, self.config.interval - 1

    @property
    def newest_first(self) -> list[float]:
        """The past steps that count in the next update."""
        return self.history[:0:-1]


def an_amax(draw: random.Random) -> float:
    kind = draw.random()
    if kind < 0.15:
        return 0.0
    if kind < 0.19:
        return draw.choice([math.inf, math.nan])
    if kind < 0.25:
        return draw.choice([2.0**-149, 2.0**-126, FLOAT32_MAX, 2.0**127, 448.0])
    return float(torch.tensor(math.ldexp(1 + draw.random(), draw.randint(-130, 126))))


CASES = [
    (
        DelayedScalingConfig(length, algo, margin, interval, remember_nonfinite=True),
        fmt,
        pow2,
        seed,
    )
    for seed, (length, algo, margin, interval, fmt, pow2) in enumerate(
        shapes.pairs(
            length=[1, 2, 5, 64],
            algo=["max", "most_recent"],
            margin=[-3, 0, 1, 12],
            interval=[1, 2, 7],
            fmt=[E4M3, E5M2],
            pow2=[False, True],
        ).args[1]
    )
]


def check_steps(cases=CASES, steps: int = STEPS) -> None:
    """Every case at once: one sync per step serves them all."""
    casts, published, draws = nn.ModuleList(), [], []
    for config, fmt, pow2, seed in cases:
        how = CastConfig(ScalingType.DELAYED, power_of_two_scale=pow2)
        casts.append(make_cast(how, fmt, config, amax_init=False))
        published.append(Published(config, fmt.max, pow2))
        draws.append(random.Random(seed))
    for step in range(steps):
        for cast, rule, draw in zip(casts, published, draws, strict=True):
            amax = an_amax(draw)
            cast.current_amax.fill_(amax)
            rule.step(amax)
        sync_float8_amax_and_scale_history(casts)
        for cast, rule, case in zip(casts, published, cases, strict=True):
            assert_follows(cast, rule, f"step {step} of {case}")


def assert_follows(cast: DelayedCast, rule: Published, replay: str) -> None:
    past = cast.amax_history.tolist()[: len(rule.newest_first)]
    assert past == rule.newest_first, replay
    assert cast.scale.item() == pytest.approx(1 / rule.factor, rel=ROUNDING, abs=0), replay


def test_hundreds_of_steps_follow_the_published_rule():
    check_steps()


def test_a_te_recipe_starts_from_a_factor_of_one_and_follows_it():
    arguments = {"margin": 2, "amax_history_len": 3, "interval": 2}
    config = Float8LinearConfig.from_te_recipe(**arguments)
    cast = make_cast(config.cast_config_input, E4M3, config.delayed_scaling, amax_init=False)
    assert cast.history_ready and cast.scale == 1
    check_steps([(config.delayed_scaling, E4M3, False, 7)], steps=50)


# --- the same check sees what could be wrong

_updated = delayed.updated_history


def _with(**changes):
    """Scales by another config than the one that was given."""

    def update(history, current, scale, config, format_max, pow2, age=None):
        different = replace(config, **{k: change(config) for k, change in changes.items()})
        return _updated(history, current, scale, different, format_max, pow2, age)

    return update


def _rolled_the_other_way(history, *rest):
    return _updated(history.roll(-1, 1), *rest)  # drops the newest of the past, not the oldest


def _one_step_late(history, current, scale, config, *rest):
    kept, _, _ = _updated(history, current, scale, config, *rest)
    late = history[:, 0] if config.amax_compute_algo == "most_recent" else current
    return kept, *_updated(history, late, scale, config, *rest)[1:]


FAULTS = {
    "the history rolls the other way": _rolled_the_other_way,
    "the margin has the other sign": _with(margin=lambda config: -config.margin),
    "most_recent is the step before": _one_step_late,
    "the interval is one longer": _with(interval=lambda config: config.interval + 1),
    "an infinity is forgotten": _with(remember_nonfinite=lambda config: False),
    "the other algorithm": _with(
        amax_compute_algo=lambda config: (
            "max" if config.amax_compute_algo != "max" else "most_recent"
        )
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault):
    with (
        mock.patch.object(delayed, "updated_history", FAULTS[fault]),
        pytest.raises(AssertionError),
    ):
        check_steps(steps=40)
