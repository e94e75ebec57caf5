"""Transforms: a model in, a copy of it out that computes with something changed.

    unit_scale         every tensor of a training step has unit scale
    simulate_fp8       contractions round their operands as float8 does (`simulate_format`: as any)
    float8             linear layers run in float8, as modules or as functions
    track_scales       records the scale of every tensor, forward and backward
    compile            torch.compile of the result

They compose in any order: `transformed` sorts them. Read `transformed`, then `unit_scale` and, as
it names them, `contractions`, `history`, `gradient_factors`, `decisions`. `OnProducts` is the base
of those that do something else with linear layers.
"""

from __future__ import annotations

# Two functions have the names of their modules. Importing them here, before any other import of
# those modules, makes the names of this package refer to the functions.
from float8.unit_scaling.transforms.in_float8 import float8
from float8.unit_scaling.transforms.prune import (
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
)
from float8.unit_scaling.transforms.simulate import simulate_format, simulate_fp8
from float8.unit_scaling.transforms.track_scales import Metrics, track_scales
from float8.unit_scaling.transforms.transformed import compile
from float8.unit_scaling.transforms.unit_scale import unit_scale

__all__ = [
    "Metrics",
    "compile",
    "float8",
    "prune_non_float_tensors",
    "prune_same_scale_tensors",
    "prune_selected_nodes",
    "simulate_format",
    "simulate_fp8",
    "track_scales",
    "unit_scale",
]
