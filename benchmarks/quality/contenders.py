"""The arithmetic that a model of a study trains in: bf16, float8, or torchao's float8.

============================ ======================================================================
name                         the linear layers of the blocks
============================ ======================================================================
``bf16``                     as they are
``bf16 rounded``             the same, its initial weights rounded to bf16. It differs from
                             ``bf16`` by one rounding and has no other reason to be better or worse:
                             how far the two end apart is the noise of the study
a recipe of float8           converted; ``unit`` is unit-scaled first
`SAVING`                     recipe ``tensorwise``; what other operations save for backward, and
                             the states of AdamW, are float8 too
``unit_bf16``                unit-scaled, in bf16: the base of all that are unit-scaled
``unit_bf16 rounded``        the same, its initial weights rounded to bf16
``unit, dynamic inputs``     unit-scaled, by the transform's default: recipe ``unit``, but inputs
                             have a dynamic scale, so that values which grow do not saturate
``torchao tensorwise``,      converted by torchao's own function; on a CPU with ``emulate``
``torchao rowwise``
============================ ======================================================================

The output head keeps its precision in all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.measuring.contenders import torchao_model
from benchmarks.measuring.report import PEER
from float8 import (
    Float8LinearConfig,
    after_step,
    convert_to_float8_training,
    high_precision,
)
from float8.activations import saved_activations
from float8.config import RECIPES
from float8.unit_scaling.transforms import float8, unit_scale

BASE, NOISE = "bf16", "bf16 rounded"
UNIT_BASE, UNIT_NOISE, UNIT_DYNAMIC = "unit_bf16", "unit_bf16 rounded", "unit, dynamic inputs"
CONTROLS = {BASE: NOISE, UNIT_BASE: UNIT_NOISE}  # of each base
SAVING = "tensorwise+saved_activations+float8_adamw"


@dataclass(frozen=True)
class Contender:
    """A model in the arithmetic of its name.

    Attributes:
        model: tokens (B, T), targets (B, T) -> the mean loss.
        unit_scaled: it takes u-muP's optimizer and no clipping.
        after_step: to call after the optimizer's step.
        in_bf16: a context in which a float8 model runs in bf16; None for bf16, and for layers of
            torchao's, which have no such switch.
        float8_states: of AdamW.
    """

    model: nn.Module
    unit_scaled: bool = False
    after_step: Callable[[], object] = lambda: None
    in_bf16: Callable[[], AbstractContextManager[object]] | None = None
    float8_states: bool = False

    @property
    def clipped(self) -> list[nn.Parameter]:
        """The parameters whose gradients are clipped."""
        return [] if self.unit_scaled else list(self.model.parameters())


def contender(name: str, model: nn.Module) -> Contender:
    """The model in the arithmetic that `name` says; its parameters start as they are.

    Raises:
        ValueError: for an unknown name.
    """
    is_unit = base_of(name) == UNIT_BASE
    if is_unit:
        model = unit_scale(model)
    if name in CONTROLS.values():
        round_parameters(model)
    if name in (*CONTROLS, *CONTROLS.values()):
        return Contender(model, is_unit)
    if name.startswith(PEER):
        return Contender(torchao_model(model, name.removeprefix(PEER), all_but_the_head))
    if name == UNIT_DYNAMIC:
        model = float8(model, module_filter_fn=all_but_the_head)
    elif is_unit:
        model = float8(model, RECIPES[name], module_filter_fn=all_but_the_head)
    else:
        model = convert(model, RECIPES["tensorwise" if name == SAVING else name])
    if name == SAVING:
        saved_activations(model).__enter__()  # for the model's life: nothing here would end it
    return Contender(
        model, is_unit, lambda: after_step(model), lambda: high_precision(model), name == SAVING
    )


def convert(model: nn.Module, config: Float8LinearConfig) -> nn.Module:
    """The model with its layers in float8, but for the head."""
    with warnings.catch_warnings():  # of a model that is not unit-scaled, as intended
        warnings.filterwarnings("ignore", 'recipe "unit" casts with a scale of 1')
        return convert_to_float8_training(model, config=config, module_filter_fn=all_but_the_head)


@torch.no_grad()
def round_parameters(model: nn.Module) -> None:
    """To bf16; they stay float32."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def base_of(name: str) -> str:
    """The contender that another is compared with."""
    return UNIT_BASE if name.startswith("unit") else BASE


def all_but_the_head(_: nn.Module, fqn: str) -> bool:
    """The layers that are converted."""
    return fqn != "head"
