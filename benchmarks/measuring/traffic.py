"""Counts the bytes and launches of a model's linear layers on CUDA, GEMMs excluded, without a GPU.

Of a layer x_MK, w_NK, g_MN in bfloat16, in eager mode, a training step moves and launches

    unit-scaled, high precision   a factor multiplies each of the three results: reads 2, writes 2
                                  bytes per element of y_MN, gx_MK and gw_NK, and 3 launches
    in float8                     the passes of its casts (`float8.estimate.roofline`, which
                                  `test/linear/test_autograd.py` counts in the ops that run).
                                  Factors join the scales of the GEMMs: constants if the scales
                                  are, else a launch each, to multiply two numbers

and three GEMMs in both. Bytes of amaxes and scales are too few to count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from float8 import Float8LinearConfig
from float8.config import LinearPlan
from float8.estimate.roofline import Use, passes_of_layer

FACTOR_BYTES = 4  # per element: bfloat16 read, bfloat16 written
GEMMS = 3


@dataclass(frozen=True)
class Traffic:
    """Bytes of device memory and launches, GEMMs' bytes not included."""

    bytes: float
    launches: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.launches + other.launches)


def of_layer(rows: int, layer: nn.Linear, config: Float8LinearConfig | None) -> Traffic:
    """The traffic of one training step of a unit-scaled layer.

    Args:
        rows: M, the tokens of a batch.
        layer: its weight gives N and K.
        config: the float8 recipe; None for high precision.
    """
    out_features, in_features = layer.weight.shape
    x, w, g = rows * in_features, out_features * in_features, rows * out_features
    if config is None:
        return Traffic(FACTOR_BYTES * (x + w + g), 3 + GEMMS)
    *operands, _ = passes_of_layer(config.plan, Use(), emulates=False)
    moved = sum(
        size * each.bytes_per_element
        for size, passes in zip((x, w, g), operands, strict=True)
        for each in passes
    )
    return Traffic(moved, sum(map(len, operands)) + _factor_launches(config.plan) + GEMMS)


def _factor_launches(plan: LinearPlan) -> int:
    gemms = (plan.output, plan.grad_input, plan.grad_weight)
    return sum(gemm.a is None or gemm.a.static_scale is None for gemm in gemms)


def of_layers(rows: int, layers: Iterable[nn.Linear], config: Float8LinearConfig | None) -> Traffic:
    """The traffic of all these layers together."""
    return sum((of_layer(rows, layer, config) for layer in layers), Traffic(0, 0))
