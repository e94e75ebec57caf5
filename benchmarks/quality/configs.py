"""Configs of float8 that studies give a name: a recipe with one setting changed.

============================ ======================================================================
name                         differs from
============================ ======================================================================
``only GEMM``,               ``tensorwise`` by the casts of one GEMM alone, or of all but that one
``all but GEMM``             (`ablated.py`)
``history H``                ``delayed`` by a history of H steps; 16 is the recipe's
``history H, margin M``      the same by amaxes multiplied by ``2^M``; ``margin M`` has 16 steps
``gradients dynamic``        ``delayed`` by dynamic scales of grad_output
``late``                     ``delayed`` by `LATE` more dynamic steps at the start: nothing is
                             synced in them
``down in bf16``             ``tensorwise`` by ``down``, which is not converted
``smooth ...``               the recipe by ``down``, which gives each channel of its input a scale
                             (Smooth-SwiGLU, arXiv 2409.12517, section 4.4), and a dynamic scale to
                             its weight
============================ ======================================================================
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from benchmarks.quality import ablated
from float8 import CastConfig, DelayedScalingConfig, Float8LinearConfig
from float8.config import RECIPES

LATE = 24  # steps
HISTORIES, MARGINS = (1, 16, 1024), (0, 1, 2)
GRADIENTS, LATER = "gradients dynamic", "late"


class Configs(NamedTuple):
    """Of ``down``, which reads SwiGLU, and of the blocks' other linear layers; None is bf16."""

    down: Float8LinearConfig | None
    others: Float8LinearConfig


def name_of(history: int, margin: int = 0) -> str:
    """The variant of ``delayed`` with this history and margin."""
    return f"history {history}" + (f", margin {margin}" if margin else "")


def _delayed(history: int, margin: int) -> Float8LinearConfig:
    settings = DelayedScalingConfig(history_len=history, margin=margin)
    return replace(RECIPES["delayed"], delayed_scaling=settings)


def _smooth(recipe: str, weight: CastConfig) -> Configs:
    config = RECIPES[recipe]
    return Configs(replace(config, cast_config_weight=weight, smooth_input=True), config)


GRID = tuple(name_of(history, margin) for history in HISTORIES for margin in MARGINS)
DEFAULT = name_of(DelayedScalingConfig().history_len, DelayedScalingConfig().margin)
_OF_ALL_LAYERS = {
    **{
        name: ablated.config_of(ablated.casts_in(name))
        for name in ablated.ABLATIONS
        if ablated.part_of(name) in ablated.GEMMS
    },
    **{name_of(H, M): _delayed(H, M) for H in HISTORIES for M in MARGINS},
    "margin 4": _delayed(DelayedScalingConfig().history_len, 4),
    GRADIENTS: replace(RECIPES["delayed"], cast_config_grad_output=CastConfig()),
    LATER: RECIPES["delayed"],
}
CONFIGS = {
    **{name: Configs(config, config) for name, config in _OF_ALL_LAYERS.items()},
    "down in bf16": Configs(None, RECIPES["tensorwise"]),
    "smooth tensorwise": _smooth("tensorwise", RECIPES["tensorwise"].cast_config_weight),
    "smooth delayed": _smooth("delayed", CastConfig()),
}
