"""The float8 layers that `convert_to_float8_training` makes of `Linear` and `LinearReadout`.

A unit-scaled layer divides each of its three products by the factor by which the product multiplies
scales. A float8 GEMM multiplies its result by the scales of its operands anyway, and with recipe
``unit`` these are 1. The layer's factors take their place, so unit scaling costs no kernel::

    output      = float8(x) @ float8(w).T  * (1 * 1 * factor_output)
    grad_input  = float8(g) @ float8(w)    * (1 * 1 * factor_grad_input)
    grad_weight = float8(g).T @ float8(x)  * (1 * 1 * factor_grad_weight)

With a dynamic or delayed recipe the factors multiply the measured scales, so that recipes can be
compared on one model. Importing this file registers the two types for conversion.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from float8.linear.autograd import Call
from float8.linear.layer import Float8Linear
from float8.linear.module import ModuleRule, register_module_rule
from float8.linear.refusals import reason_against_layer
from float8.unit_scaling import functional as U
from float8.unit_scaling.functional.products import linear_factors
from float8.unit_scaling.modules.layers import Linear, LinearReadout


class Float8UnitLinear(Float8Linear, Linear):
    """A `float8.unit_scaling.Linear` whose three products run in float8.

    Parameters, their u-muP data, ``constraint`` and ``scale_power`` are those of the plain layer.
    """

    plain_type = Linear

    def __getstate__(self) -> dict[str, Any]:
        return Linear.__getstate__(self) | super().__getstate__()  # parameters' roles first

    def begin_call(self, input: Tensor, weight: Tensor) -> Call:
        """As that of `Float8Linear`, with the factors of the layer's constraint."""
        call = super().begin_call(input, weight)
        call.factors = linear_factors(input, weight, self.constraint, self.scale_power)
        return call

    def _plain_forward(self, input: Tensor) -> Tensor:
        return U.linear(input, self._plain_weight(), self.bias, self.constraint, self.scale_power)


class Float8UnitLinearReadout(Float8UnitLinear, LinearReadout):
    """A `float8.unit_scaling.LinearReadout` whose three products run in float8."""

    plain_type = LinearReadout


for _float8 in (Float8UnitLinear, Float8UnitLinearReadout):
    register_module_rule(
        _float8.plain_type,
        ModuleRule(
            refuses=lambda module, config: reason_against_layer(module.weight, config),  # type: ignore[arg-type]
            convert=_float8.from_float,  # type: ignore[arg-type]
            unit_scaled=True,
        ),
    )
