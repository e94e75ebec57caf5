"""What a run of a quality study trains in: bf16, float8, or torchao's float8.

============================ ======================================================================
name                         the linear layers of the blocks
============================ ======================================================================
``bf16``                     as they are
``bf16 rounded``             the same, its initial weights rounded to bf16. It differs from
                             ``bf16`` by one rounding and has no other reason to be better or worse:
                             how far the two end apart is the noise of the study
a recipe of float8           converted; ``unit`` is unit-scaled first
``down in bf16``             ``tensorwise``, but ``down`` is not converted
``smooth ...``               the recipe by ``down``, which gives each channel of its input a scale
                             (Smooth-SwiGLU, arXiv 2409.12517, section 4.4), and a dynamic scale to
                             its weight
``history H``, ``margin M``  ``delayed`` with a history of H steps, with amaxes times ``2^M``
`SAVING`                     recipe ``tensorwise``; what other operations save for backward, and
                             the states of AdamW, are float8 too
``unit_bf16``                unit-scaled, in bf16: the base of all that are unit-scaled
``unit_bf16 rounded``        the same, its initial weights rounded to bf16
``unit, dynamic inputs``     unit-scaled, by the transform's default: recipe ``unit``, but inputs
                             have a dynamic scale, so that values which grow do not saturate
``torchao tensorwise``,      converted by torchao's own function; on a CPU with ``emulate``
``torchao rowwise``
============================ ======================================================================

The output head keeps bf16 in all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from float8 import (
    CastConfig,
    DelayedScalingConfig,
    Float8LinearConfig,
    after_step,
    convert_to_float8_training,
    high_precision,
)
from float8.config import RECIPES
from float8.unit_scaling.transforms import float8
from scripts.training import gpt, savings

BASE, NOISE = "bf16", "bf16 rounded"
UNIT_BASE, UNIT_NOISE, UNIT_DYNAMIC = "unit_bf16", "unit_bf16 rounded", "unit, dynamic inputs"
CONTROLS = {BASE: NOISE, UNIT_BASE: UNIT_NOISE}  # of each base
SAVING = "tensorwise+saved_activations+float8_adamw"  # as in training/savings.py
PEER = "torchao "


def _delayed(**settings: Any) -> Float8LinearConfig:
    return replace(RECIPES["delayed"], delayed_scaling=DelayedScalingConfig(**settings))


def _smooth(recipe: str) -> Float8LinearConfig:
    return replace(RECIPES[recipe], cast_config_weight=CastConfig(), smooth_input=True)


# name -> config of ``down``, which reads SwiGLU (None is bf16), and of the other linear layers
CONFIGS = {
    "history 1": (_delayed(history_len=1),) * 2,
    "history 1024": (_delayed(history_len=1024),) * 2,
    "margin 4": (_delayed(margin=4),) * 2,
    "down in bf16": (None, RECIPES["tensorwise"]),
    "smooth tensorwise": (_smooth("tensorwise"), RECIPES["tensorwise"]),
    "smooth delayed": (_smooth("delayed"), RECIPES["delayed"]),
}


@dataclass(frozen=True)
class Contender:
    """A model in the arithmetic of its name.

    Attributes:
        model: tokens (B, T), targets (B, T) -> the mean loss.
        unit_scaled: it takes u-muP's optimizer and no clipping.
        after_step: to call after the optimizer's step.
        in_bf16: a context in which a float8 model runs in bf16; None for bf16, and for layers of
            torchao's, which have no such switch.
        optimizer: a name of `savings.OPTIMIZERS`, where the model is not unit-scaled.
    """

    model: nn.Module
    unit_scaled: bool = False
    after_step: Callable[[], object] = lambda: None
    in_bf16: Callable[[], AbstractContextManager[object]] | None = None
    optimizer: str = "adamw"


def contender(name: str, model: nn.Module) -> Contender:
    """The model in the arithmetic that `name` says; its parameters start as they are.

    The layer called ``head`` keeps bf16.

    Raises:
        ValueError: for an unknown name.
    """
    if name == NOISE:
        round_parameters(model)
    if name in (BASE, NOISE):
        return Contender(model)
    if name.startswith(PEER):
        return Contender(_by_torchao(model, name.removeprefix(PEER)))
    if name == SAVING:
        found = contender("tensorwise", model)
        savings.save_activations(found.model)
        return replace(found, optimizer="float8_adamw")
    if base_of(name) == UNIT_BASE:
        return _unit_scaled(name, model)
    if name in CONFIGS:
        converted = _by_configs(model, *CONFIGS[name])
    else:
        converted = gpt.in_recipe(model, name)
    return Contender(
        converted,
        after_step=lambda: after_step(converted),
        in_bf16=lambda: high_precision(converted),
    )


@torch.no_grad()
def round_parameters(model: nn.Module) -> None:
    """To bf16; they stay float32."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def base_of(name: str) -> str:
    """The contender that another is compared with."""
    return UNIT_BASE if name in (*gpt.UNIT, UNIT_NOISE, UNIT_DYNAMIC) else BASE


def _unit_scaled(name: str, model: nn.Module) -> Contender:
    scaled = gpt.in_recipe(model, name if name in gpt.UNIT else UNIT_BASE)
    if name == UNIT_NOISE:
        round_parameters(scaled)
    if name == UNIT_DYNAMIC:
        scaled = float8(scaled, module_filter_fn=all_but_the_head)
    in_bf16 = None if name in (UNIT_BASE, UNIT_NOISE) else lambda: high_precision(scaled)
    return Contender(scaled, unit_scaled=True, in_bf16=in_bf16)


def _by_configs(
    model: nn.Module, down: Float8LinearConfig | None, others: Float8LinearConfig
) -> nn.Module:
    def is_down(_: nn.Module, fqn: str) -> bool:
        return fqn.endswith("down")

    def is_another(module: nn.Module, fqn: str) -> bool:
        return all_but_the_head(module, fqn) and not is_down(module, fqn)

    for config, chosen in ((down, is_down), (others, is_another)):
        if config is not None:
            convert_to_float8_training(model, config=config, module_filter_fn=chosen)
    return model


def _by_torchao(model: nn.Module, recipe: str) -> nn.Module:
    peer: Any = importlib.import_module("torchao.float8")
    config = peer.Float8LinearConfig.from_recipe_name(recipe)
    if not next(model.parameters()).is_cuda:
        config = replace(config, emulate=True)
    converted: nn.Module = peer.convert_to_float8_training(
        model, config=config, module_filter_fn=all_but_the_head
    )
    return converted


def all_but_the_head(_: nn.Module, fqn: str) -> bool:
    """The layers that are converted."""
    return fqn != "head"
