"""What a GPT with an outlier of SwiGLU is trained in.

Each contender has two configs, of ``down``, which reads the outlier, and of the other linear layers
of the blocks; None leaves a layer in bf16.

======================== ===========================================================================
name                     differs from a recipe of float8 by
======================== ===========================================================================
``bf16 rounded``         bf16, its weights rounded to bf16 once: the noise of the study
``down in bf16``         ``tensorwise``, but ``down`` is not converted
``smooth ...``           ``down`` gives each channel of its input a scale (Smooth-SwiGLU, arXiv
                         2409.12517, section 4.4), and a dynamic scale to its weight
``history H``            ``delayed``, with scales from the amaxes of H steps; the recipe has 16
``margin M``             ``delayed``, with amaxes multiplied by ``2^M``
======================== ===========================================================================
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.quality.contenders import BASE, NOISE, Contender, contender
from benchmarks.quality.delayed import config_of, name_of
from float8 import (
    CastConfig,
    Float8LinearConfig,
    after_step,
    convert_to_float8_training,
)
from float8.config import RECIPES
from scripts.training import gpt

Configs = tuple[Float8LinearConfig | None, Float8LinearConfig | None]  # of down, of the others


def _smooth(recipe: str) -> Configs:
    config = RECIPES[recipe]
    return replace(config, cast_config_weight=_WEIGHT[recipe], smooth_input=True), config


_WEIGHT = {recipe: config.cast_config_weight for recipe, config in RECIPES.items()}
_WEIGHT["delayed"] = CastConfig()

CONTENDERS: dict[str, Configs] = {
    BASE: (None, None),
    NOISE: (None, None),
    **{
        recipe: (RECIPES[recipe], RECIPES[recipe])
        for recipe in ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
    },
    "down in bf16": (None, RECIPES["tensorwise"]),
    "smooth tensorwise": _smooth("tensorwise"),
    "smooth delayed": _smooth("delayed"),
    "history 1": (config_of(name_of(1)),) * 2,
    "history 1024": (config_of(name_of(1024)),) * 2,
    "margin 4": (config_of(name_of(16, 4)),) * 2,
}


def in_arithmetic(name: str, model: gpt.GPT) -> Contender:
    """The model in the arithmetic of a contender; it is converted in place."""
    if name in (BASE, NOISE):
        return contender(name, model)
    down, others = CONTENDERS[name]
    if down is not None:
        convert_to_float8_training(
            model, config=down, module_filter_fn=lambda _, fqn: fqn.endswith("down")
        )
    if others is not None:
        convert_to_float8_training(
            model,
            config=others,
            module_filter_fn=lambda _, fqn: fqn != "head" and not fqn.endswith("down"),
        )
    return Contender(model, after_step=lambda: after_step(model))
