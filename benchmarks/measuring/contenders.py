"""The layers compared: nn.Linear, float8 in every recipe, and torchao's float8 of the same recipe.

`static` is tensorwise scaling with constants: no amax pass at all, the fastest that a float8 layer
can be. torchao is measured where it is importable; on a CPU it needs its option to emulate.

A recipe may have parts, as in ``tensorwise+fast``:

    fast          sums of gradients are fast, as those of the output
    precise       no sums are fast
    gw_hp         the weight's gradient is in high precision
    fuse_norms    norms return float8 (`float8.fuse_norms`)
    feed_forward  SwiGLU and its layers are one op of autograd (`float8.fuse_feed_forwards`)
    keep_float8   and its gate and up are kept in float8
    cached        weights are cast once per step (`float8.cached_weights`), or of experts before it
    recompute     backward casts again (`float8.kernels.recompute`), in compiled blocks
    gather        FSDP2 gathers weights in float8
    unrounded     scales are no powers of two, so that Blackwell runs no MX product
    saved_activations  ops keep float8 copies for backward (`float8.saved_activations`), by blocks
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
from functools import partial
from typing import Any

from torch import nn

from benchmarks.measuring import harness
from benchmarks.measuring.report import PEER
from benchmarks.measuring.step import MODES, settled
from benchmarks.models.transformer import SwiGLU
from float8 import (
    CastConfig,
    Float8LinearConfig,
    GemmConfig,
    ScaleFormat,
    ScalingType,
    convert_to_float8_training,
    filters,
    fuse_feed_forwards,
    fuse_norms,
    saved_activations,
)
from float8.config import RECIPES
from float8.fusion import register_feed_forward

BASELINE = "nn.Linear"
STATIC = "static"
# Recipe "unit" is static scaling that only a unit-scaled model gives fair numbers to.
SCALED = tuple(recipe for recipe in RECIPES if recipe != "unit")
PARTS = {
    *("fast", "precise", "gw_hp", "fuse_norms", "feed_forward", "keep_float8"),
    *("cached", "recompute", "gather", "unrounded", "saved_activations"),
}
PEER_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
register_feed_forward(SwiGLU, gate="gate_up", down="down")
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


def config_of(name: str) -> Float8LinearConfig:
    """The config of a recipe with parts."""
    recipe, *parts = name.split("+")
    config = settled(recipe)
    if "fast" in parts or "precise" in parts:
        sums = GemmConfig(use_fast_accum="fast" in parts)
        config = replace(config, gemm_config_grad_input=sums, gemm_config_grad_weight=sums)
    if "precise" in parts:
        config = replace(config, gemm_config_output=sums)
    if "gw_hp" in parts:
        off = CastConfig(ScalingType.DISABLED)
        config = replace(
            config,
            cast_config_input_for_grad_weight=off,
            cast_config_grad_output_for_grad_weight=off,
        )
    if "unrounded" in parts:
        casts = [f for f in vars(config) if f.startswith("cast_config") and getattr(config, f)]
        unrounded = partial(replace, scale_format=ScaleFormat.FLOAT32)
        config = replace(config, **{name: unrounded(getattr(config, name)) for name in casts})
    return replace(config, enable_fsdp_float8_all_gather="gather" in parts)


def model_of(name: str, plain: nn.Module) -> nn.Module:
    """A copy of a model with a contender's layers; its parameters are those of `plain`."""
    shared = {id(parameter): parameter for parameter in plain.parameters()}
    model: nn.Module = copy.deepcopy(plain, shared)
    if name.startswith(PEER):
        return torchao_model(model, name.removeprefix(PEER))
    recipe, *parts = name.split("+")
    if recipe not in RECIPES:
        return model
    config = config_of(name)
    # A filter, so that experts are measured where they are predicted to lose.
    convert_to_float8_training(model, config=config, module_filter_fn=filters.all_of())
    if "fuse_norms" in parts:
        fuse_norms(
            model,
            {
                "*.attention_norm": ["*.attention.qkv"],
                "*.feed_forward_norm": ["*.feed_forward.gate_up"],
            },
        )
    if "feed_forward" in parts:
        fuse_feed_forwards(model, keeps_float8="keep_float8" in parts)
    for block in model.children() if "saved_activations" in parts else ():
        saved_activations(block).__enter__()
    return model


def recipe_of(text: str, recipes: Iterable[str]) -> str:
    """A recipe with parts, for argparse."""
    recipe, *parts = text.split("+")
    if recipe not in recipes or not PARTS.issuperset(parts):
        known = f"one of {', '.join(recipes)}, and {', '.join(sorted(PARTS))} joined by +"
        raise argparse.ArgumentTypeError(f"a contender is {known}, not {text!r}")
    return text


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
    recipe, default = partial(recipe_of, recipes=(*recipes, *more)), list(recipes)
    parser.add_argument("--recipes", nargs="+", type=recipe, default=default, metavar="RECIPE")
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
