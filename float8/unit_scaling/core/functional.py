"""The parts of `float8.unit_scaling.functional`, in one place.

A unit-scaled operation of your own is a function, two factors and an entry in the registry::

    from float8.unit_scaling.core.functional import scale_elementwise

    def tanh(input, constraint="to_output_scale"):
        return scale_elementwise(torch.tanh, 1.59, 1.47, constraint)(input)

    U.register(torch.tanh, tanh)

``1.59 = 1 / std(tanh(x))`` and ``1.47 = 1 / rms(tanh'(x))`` for x ~ N(0, 1).
"""

from __future__ import annotations

from float8.unit_scaling.rules import (
    ResidualScalingFn,
    logarithmic_interpolation,
    rms,
    transformer_residual_scaling_rule,
)
from float8.unit_scaling.scale import scale_elementwise

__all__ = [
    "ResidualScalingFn",
    "logarithmic_interpolation",
    "rms",
    "scale_elementwise",
    "transformer_residual_scaling_rule",
]
