"""The demo's GPT, `GPT` of benchmarks/models/transformer.py, and its conversion to a recipe.

Parameters stay float32 and the arithmetic is `torch.autocast(bfloat16)`, the usual mixed precision;
a recipe changes only what the blocks' linear layers do inside that. The output head keeps bf16 in
every recipe, as is usual: its output feeds the loss directly, and casting it to float8 costs more
accuracy than the layer costs time.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from benchmarks.models.transformer import GPT, Sizes
from float8 import Float8LinearConfig, convert_to_float8_training
from float8.config import RECIPES
from float8.unit_scaling.transforms import float8, unit_scale

__all__ = ["GPT", "OWN", "UNIT", "Sizes", "in_recipe", "is_body"]

M = TypeVar("M", bound=nn.Module)

UNIT = ("unit_bf16", "unit")  # recipes of the unit-scaled model
OWN = ("bf16", "bf16_rounded", "naive", "unit_bf16")  # recipes that float8 does not know by name


def in_recipe(model: M, recipe: str, gathers: bool = False) -> M:
    """The model with its linear layers in `recipe`, unit-scaled if it is one of `UNIT`.

    The layer called ``head`` keeps its precision. Unit scaling copies the model; otherwise it is
    the same object, with the same parameters. ``gathers``: FSDP2 gathers its weights as float8.

    Raises:
        ValueError: for an unknown recipe.
    """
    if recipe == "bf16_rounded":  # a control: bf16 again, from weights that differ by a rounding
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
    if recipe in ("bf16", "bf16_rounded"):
        return model
    if recipe in UNIT:
        model = unit_scale(model)
        is_bf16 = recipe not in RECIPES
        return model if is_bf16 else float8(model, RECIPES[recipe], module_filter_fn=is_body)
    if recipe not in (*OWN, *RECIPES):
        raise ValueError(f"unknown recipe {recipe!r}; known recipes: {', '.join((*OWN, *RECIPES))}")
    # "naive" is a plain `.to(torch.float8_e4m3fn)` without any scale, which is
    # what recipe "unit" is where nothing is unit-scaled. The mean over B x T tokens makes gradients
    # of 1e-5 and less, which E5M2, whose smallest number is 1.5e-5, rounds to zero; weights of 0.02
    # lie where E4M3 has one or two bits left.
    config = Float8LinearConfig.from_recipe_name("unit" if recipe == "naive" else recipe)
    config = replace(config, enable_fsdp_float8_all_gather=gathers)
    with warnings.catch_warnings():
        if recipe == "naive":  # conversion warns of just that
            warnings.filterwarnings("ignore", 'recipe "unit" casts with a scale of 1')
        convert_to_float8_training(model, config=config, module_filter_fn=is_body)
    return model


def is_body(_: nn.Module, fqn: str) -> bool:
    """Whether a layer is not the output head."""
    return fqn != "head"
