"""Unit-scaled linear layers in float8: what conversion makes of `Linear` and `LinearReadout`.

A unit-scaled layer divides each of its three products by what the product is known to multiply
scales by. A float8 GEMM multiplies its result by the scales of its operands anyway, and with recipe
``unit`` those are 1: the layer's factors take their place, so unit scaling costs no kernel::

    output      = codes(x) @ codes(w).T  * (1 * 1 * factor_output)
    grad_input  = codes(g) @ codes(w)    * (1 * 1 * factor_grad_input)
    grad_weight = codes(g).T @ codes(x)  * (1 * 1 * factor_grad_weight)

With a dynamic or delayed recipe the factors multiply the scales that were found, so that policies
can be compared on one model.

Importing this file teaches `float8.convert_to_float8_training` the two types.
"""

from __future__ import annotations

from torch import Tensor

from float8.linear.autograd import Factors
from float8.linear.layer import Float8Linear
from float8.linear.refusals import refuses_layer
from float8.linear.registration import ModuleRule, register_module_rule
from float8.unit_scaling import functional as U
from float8.unit_scaling.constraints import Constraint
from float8.unit_scaling.functional.products import linear_factors
from float8.unit_scaling.modules.layers import Linear, LinearReadout
from float8.unit_scaling.parameter import MupModule


class Float8UnitLinear(MupModule, Float8Linear):
    """A `float8.unit_scaling.Linear` whose three products run in float8.

    Parameters, their u-muP data, ``constraint`` and ``scale_power`` are those of the plain layer.
    """

    plain_type = Linear
    constraint: Constraint
    scale_power: tuple[float, float, float] = Linear.scale_power

    def extra_repr(self) -> str:
        """As `Float8Linear`'s, and the constraint."""
        return f"{super().extra_repr()}, constraint={self.constraint!r}"

    def _factors(self, input: Tensor) -> Factors:
        return linear_factors(input, self.weight, self.constraint, self.scale_power)

    def _plain_forward(self, input: Tensor) -> Tensor:
        return U.linear(input, self._plain_weight(), self.bias, self.constraint, self.scale_power)


class Float8UnitLinearReadout(Float8UnitLinear):
    """A `float8.unit_scaling.LinearReadout` whose three products run in float8."""

    plain_type = LinearReadout
    scale_power: tuple[float, float, float] = LinearReadout.scale_power


for _float8 in (Float8UnitLinear, Float8UnitLinearReadout):
    register_module_rule(
        _float8.plain_type,
        ModuleRule(
            refuses=lambda module, config: refuses_layer(module.weight, config),  # type: ignore[arg-type]
            convert=_float8.from_float,  # type: ignore[arg-type]
            unit_scaled=True,
        ),
    )
