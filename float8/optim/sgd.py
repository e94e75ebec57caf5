"""SGD with its momentum in 8 bits: 1.03 bytes per parameter instead of 4."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from float8.kernels import moments, optimizer_step
from float8.kernels.optimizer_step import Rule
from float8.optim import checks
from float8.optim.core import QuantizedOptimizer


class SGD(QuantizedOptimizer):
    """``torch.optim.SGD`` with momentum, which is kept in float8.

    Args:
        params: see `float8.optim.AdamW`.
        lr: learning rate, a float or a tensor with one element.
        momentum: > 0; without one there is nothing to keep, and torch.optim.SGD does it.
        dampening: of the gradient that enters the momentum, from the second step on.
        weight_decay: times the parameter is added to the gradient.
        nesterov: look ahead by one momentum; needs ``dampening=0``.
        maximize, capturable, fused, first_moment, group_size, min_size, stochastic_rounding,
            state_rounding: see `float8.optim.AdamW`.

    Raises:
        ValueError, TypeError: for values and parameters that are not supported.
    """

    moment_options: ClassVar[dict[str, str]] = {"momentum_buffer": "first_moment"}

    update = staticmethod(moments.sgd_momentum)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
        first_moment: str = "float8",
        group_size: int = 128,
        min_size: int = 4096,
        stochastic_rounding: bool = False,
        state_rounding: str = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "capturable": capturable,
            "fused": fused,
            "first_moment": first_moment,
            "group_size": group_size,
            "min_size": min_size,
            "stochastic_rounding": stochastic_rounding,
            "state_rounding": state_rounding,
        }
        super().__init__(params, defaults)

    def decay(self, group: dict[str, Any], name: str) -> float:
        """The momentum."""
        return group["momentum"]

    def check_group(self, group: dict[str, Any]) -> None:
        """As the core's, and momentum, dampening and nesterov."""
        super().check_group(group)
        checks.check_number("momentum", group["momentum"], 0.0)
        if group["momentum"] == 0:
            raise ValueError("momentum=0 leaves no state to keep in float8; use torch.optim.SGD")
        if group["nesterov"] and group["dampening"] != 0:
            raise ValueError(f"nesterov needs dampening=0, got {group['dampening']}")

    def rule(self, group: dict[str, Any], step: float | Tensor) -> Rule:
        """As `float8.kernels.moments.sgd_momentum` takes them."""
        return optimizer_step.SGDMomentum(
            lr=group["lr"],
            momentum=group["momentum"],
            step=step,
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )
