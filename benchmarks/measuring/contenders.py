"""The layers compared: nn.Linear, float8 in every recipe, and torchao's float8 of the same recipe.

All contenders of a shape share one weight, one input and one `grad_output`, so that they do the
same work on the same numbers. `static` is tensorwise scaling with constants: no amax pass at all,
the fastest that a float8 layer can be. Its constants are the ones that the operands need.

torchao is measured where it is importable; on a CPU it needs its option to emulate.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.measuring.shapes import Shape
from benchmarks.measuring.step import MODES, Step, settled
from float8 import CastConfig, Float8Linear, Float8LinearConfig, ScalingType
from float8.config import RECIPES

BASELINE = "nn.Linear"
STATIC = "static"
# Recipe "unit" is static scaling that only a unit-scaled model gives fair numbers to.
SCALED = tuple(recipe for recipe in RECIPES if recipe != "unit")
ALL_RECIPES = (*SCALED, STATIC)
PEER = "torchao "
PEER_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
COMPILERS = (os.environ.get("CXX", "g++"), "clang++")


@dataclass(frozen=True)
class Operands:
    """What all contenders of a shape share: x_MK, w_NK in a plain layer, g_MN."""

    x: torch.Tensor
    linear: nn.Linear
    grad_output: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, device: str, seed: int) -> Operands:
        torch.manual_seed(seed)
        random = partial(torch.randn, device=device, dtype=torch.bfloat16)
        x, grad_output = random(shape.M, shape.K, requires_grad=True), random(shape.M, shape.N)
        return cls(x, nn.Linear(shape.K, shape.N, False, device, torch.bfloat16), grad_output)


Maker = Callable[[Operands], nn.Module]


def static_config(operands: Operands) -> Float8LinearConfig:
    """The smallest constant scales for these operands, in the formats of `tensorwise`."""

    def cast(operand: torch.Tensor, dtype: torch.dtype) -> CastConfig:
        scale = operand.detach().abs().max().item() / torch.finfo(dtype).max
        return CastConfig(ScalingType.STATIC, target_dtype=dtype, static_scale=scale)

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    return Float8LinearConfig(
        cast(operands.x, e4m3),
        cast(operands.linear.weight, e4m3),
        cast(operands.grad_output, e5m2),
    )


def config_of(recipe: str, operands: Operands) -> Float8LinearConfig:
    if recipe == STATIC:
        return static_config(operands)
    return settled(recipe)


def float8_layer(operands: Operands, recipe: str) -> nn.Module:
    return Float8Linear.from_float(operands.linear, config=config_of(recipe, operands))


def torchao_layer(operands: Operands, recipe: str) -> nn.Module:
    return torchao_model(nn.Sequential(operands.linear), recipe).get_submodule("0")


def torchao_model(model: nn.Module, recipe: str) -> nn.Module:
    """A model with torchao's layers of a recipe, parameters shared."""
    peer: Any = importlib.import_module("torchao.float8")
    config = peer.Float8LinearConfig.from_recipe_name(recipe)
    if next(model.parameters()).device.type == "cpu":
        config = replace(config, emulate=True)
    converted: nn.Module = peer.convert_to_float8_training(model, config=config)
    return converted


def names(options: argparse.Namespace) -> list[str]:
    """The names of the contenders in order; the baseline of ratios comes first."""
    listed = [BASELINE]
    for recipe in options.recipes:
        listed.append(recipe)
        if options.peer and recipe in PEER_RECIPES:
            listed.append(PEER + recipe)
    return listed


def recipe_of(name: str) -> str:
    """The recipe of a contender: torchao's float8 and ours have the same names."""
    return name.removeprefix(PEER)


def maker(name: str) -> Maker:
    """Makes a contender from the shared operands."""
    if name == BASELINE:
        return lambda operands: operands.linear
    make = torchao_layer if name.startswith(PEER) else float8_layer
    return partial(make, recipe=recipe_of(name))


def step(name: str, mode: str, operands: Operands) -> Step:
    """A training step of a contender, eager or compiled."""
    layer = maker(name)(operands)
    run = torch.compile(layer, fullgraph=True, dynamic=False) if mode == "compiled" else layer
    return Step(layer, run, operands.x, operands.grad_output)


def add_options(parser: argparse.ArgumentParser, recipes: tuple[str, ...]) -> None:
    """`--recipes`, `--modes` and `--no-peer`, which `check` completes."""
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=list(recipes))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager"])
    parser.add_argument(
        "--compile",
        dest="modes",
        action="store_const",
        const=["compiled"],
        help="the same as --modes compiled",
    )
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave torchao out")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what this machine cannot do; leave torchao out where it is not installed.

    Eager comes before compiled, so that a compilation that is cut off costs nothing else.
    """
    options.modes = sorted(options.modes, key=MODES.index)
    on_cpu = torch.device(options.device).type == "cpu"
    if "compiled" in options.modes and on_cpu and not any(map(shutil.which, COMPILERS)):
        parser.error(
            f"compiling on a CPU needs a C++ compiler, none of {', '.join(COMPILERS)} found"
        )
    options.peer = options.peer and importlib.util.find_spec("torchao") is not None
