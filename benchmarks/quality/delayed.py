"""Variants of delayed scaling, by name: the settings that a study compares.

============================ ======================================================================
name                         recipe ``delayed``, with
============================ ======================================================================
``history H``                a history of H steps; 16 is the default
``history H, margin M``      a factor of 2^M above the largest amax of H steps
``gradients dynamic``        dynamic scales of grad_output; input and weight stay delayed
``late``                     dynamic scales in the first `LATE` steps: nothing is synced until then
============================ ======================================================================

``bf16``, ``bf16 rounded`` and the recipes are those of `contenders.py`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace

from benchmarks.quality.contenders import Contender, all_but_the_head, contender
from float8 import (
    CastConfig,
    DelayedScalingConfig,
    Float8LinearConfig,
    after_step,
    convert_to_float8_training,
    high_precision,
)
from scripts.training import gpt

LATE = 24  # steps
HISTORIES, MARGINS = (1, 16, 1024), (0, 1, 2)
GRADIENTS, LATER = "gradients dynamic", "late"
_NAME = re.compile(r"history (\d+)(?:, margin (\d+))?")


def name_of(history: int, margin: int = 0) -> str:
    """The variant with this history and margin."""
    return f"history {history}" + (f", margin {margin}" if margin else "")


GRID = tuple(name_of(history, margin) for history in HISTORIES for margin in MARGINS)
DEFAULT = name_of(DelayedScalingConfig().history_len, DelayedScalingConfig().margin)


def config_of(name: str) -> Float8LinearConfig | None:
    """The config of a variant; None for a name that is no variant."""
    delayed = Float8LinearConfig.from_recipe_name("delayed")
    if name == GRADIENTS:
        return replace(delayed, cast_config_grad_output=CastConfig())
    if name == LATER:
        return delayed
    if found := _NAME.fullmatch(name):
        history, margin = int(found[1]), int(found[2] or 0)
        settings = DelayedScalingConfig(history_len=history, margin=margin)
        return replace(delayed, delayed_scaling=settings)
    return None


def variant(name: str, model: gpt.GPT) -> Contender:
    """The model in a variant, or else in what `contender` makes of the name."""
    config = config_of(name)
    if config is None:
        return contender(name, model)
    convert_to_float8_training(model, config=config, module_filter_fn=all_but_the_head)
    after = _after_steps(model, LATE if name == LATER else 0)
    return Contender(model, after_step=after, in_bf16=lambda: high_precision(model))


def _after_steps(model: gpt.GPT, skipped: int) -> Callable[[], object]:
    """`after_step`, but for the first so many calls."""
    calls = 0
    if skipped:  # the reminder to call it
        warnings.filterwarnings("ignore", "this model uses delayed scaling", UserWarning)

    def after() -> None:
        nonlocal calls
        calls += 1
        if calls > skipped:
            after_step(model)

    return after
