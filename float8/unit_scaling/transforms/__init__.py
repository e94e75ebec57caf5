"""Transforms: a model in, a copy of it out that computes with something changed.

    unit_scale         every tensor of a training step has unit scale
    simulate_fp8       products round their operands as float8 does (`simulate_format`: as any does)
    float8             products run in float8
    track_scales       records the scale of every tensor, forward and backward
    compile            torch.compile of the result

They go together, in any order: which one sees a call first is theirs to know (`transformed`).
"""

from __future__ import annotations

import importlib
from typing import Any

# public name -> the file that has it; loaded when asked for
_FILES = {
    "compile": "compile",
    "float8": "in_float8",
    "unit_scale": "unit_scale",
    "simulate_format": "simulate",
    "simulate_fp8": "simulate",
    "Metrics": "track_scales",
    "track_scales": "track_scales",
    "prune_non_float_tensors": "prune",
    "prune_same_scale_tensors": "prune",
    "prune_selected_nodes": "prune",
}

__all__ = [  # noqa: F822  names of _FILES
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


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The function takes the place of the file of its name, which importing has put there.
    found = getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
    globals()[name] = found
    return found
