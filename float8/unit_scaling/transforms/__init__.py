"""Transforms: a model in, a copy of it out that computes with something changed.

    unit_scale         every tensor of a training step has unit scale
    simulate_fp8       products round their operands as float8 does (`simulate_format`: as any does)
    float8             products run in float8
    track_scales       records the scale of every tensor, forward and backward
    compile            torch.compile of the result

They go together, in any order: which one sees a call first is theirs to know (`transformed`).
"""

from __future__ import annotations

# At once, not when asked for: three functions have the names of their files, and the names have to
# be theirs however the files are imported afterwards.
from float8.unit_scaling.transforms.compile import compile
from float8.unit_scaling.transforms.in_float8 import float8
from float8.unit_scaling.transforms.metrics import Metrics
from float8.unit_scaling.transforms.prune import (
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
)
from float8.unit_scaling.transforms.simulate import simulate_format, simulate_fp8
from float8.unit_scaling.transforms.track_scales import track_scales
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
