"""The layers compared: nn.Linear, float8 in every recipe, and torchao's float8 of the same recipe.

`static` is tensorwise scaling with constants: no amax pass at all, the fastest that a float8 layer
can be. torchao is measured where it is importable; on a CPU it needs its option to emulate.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from benchmarks.measuring import harness
from benchmarks.measuring.report import PEER
from benchmarks.measuring.step import MODES, settled
from float8 import convert_to_float8_training
from float8.config import RECIPES

BASELINE = "nn.Linear"
STATIC = "static"
# Recipe "unit" is static scaling that only a unit-scaled model gives fair numbers to.
SCALED = tuple(recipe for recipe in RECIPES if recipe != "unit")
PEER_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
COMPILERS = (os.environ.get("CXX", "g++"), "clang++")


def torchao_model(
    model: nn.Module, recipe: str, chosen: Callable[[nn.Module, str], bool] | None = None
) -> nn.Module:
    """A model with torchao's layers of a recipe, parameters shared."""
    peer: Any = importlib.import_module("torchao.float8")
    config = peer.Float8LinearConfig.from_recipe_name(recipe)
    if next(model.parameters()).device.type == "cpu":
        config = replace(config, emulate=True)
    converted: nn.Module = peer.convert_to_float8_training(
        model, config=config, module_filter_fn=chosen
    )
    return converted


def model_of(name: str, plain: nn.Module) -> nn.Module:
    """A copy of a model with a contender's layers; its parameters are those of `plain`."""
    shared = {id(parameter): parameter for parameter in plain.parameters()}
    model: nn.Module = copy.deepcopy(plain, shared)
    if name.startswith(PEER):
        return torchao_model(model, name.removeprefix(PEER))
    if name in RECIPES:
        convert_to_float8_training(model, config=settled(name))
    return model


def names(
    options: argparse.Namespace, baseline: str = BASELINE, peers: Iterable[str] = PEER_RECIPES
) -> list[str]:
    """The names of the contenders in order; the baseline of ratios comes first."""
    listed = [baseline]
    for recipe in options.recipes:
        listed += [recipe, PEER + recipe] if options.peer and recipe in peers else [recipe]
    return listed


def add_options(parser: argparse.ArgumentParser, recipes: tuple[str, ...], *more: str) -> None:
    """`--recipes` (``more`` if they are named), `--modes`, `--no-peer`, which `check` completes."""
    parser.add_argument("--recipes", nargs="+", choices=(*recipes, *more), default=list(recipes))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager"])
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave torchao out")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what this machine cannot do; leave torchao out where it is not installed.

    Eager comes before compiled, so that a compilation that is cut off costs nothing else.
    """
    options.modes = sorted(options.modes, key=MODES.index)
    if (
        "compiled" in options.modes
        and harness.on_cpu(options)
        and not any(map(shutil.which, COMPILERS))
    ):
        parser.error(
            f"compiling on a CPU needs a C++ compiler, none of {', '.join(COMPILERS)} found"
        )
    options.peer = options.peer and importlib.util.find_spec("torchao") is not None
