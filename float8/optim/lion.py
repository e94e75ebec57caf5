"""Lion with its momentum in 8 bits: 1.03 bytes of state per parameter.

Lion (arXiv 2302.06675, algorithm 2) moves every weight by the learning rate, in the direction of
the sign of a momentum. Only signs are used, so that a momentum of few bits costs it little.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from float8.kernels import moments, optimizer_step
from float8.kernels.optimizer_step import Rule
from float8.optim import checks
from float8.optim.core import QuantizedOptimizer


class Lion(QuantizedOptimizer):
    """Lion, its momentum in float8.

    Args:
        params: see `float8.optim.AdamW`.
        lr: learning rate, a float or a tensor with one element; 3 to 10 times less than AdamW's.
        betas: of the direction and of the momentum, in [0, 1).
        weight_decay: decoupled; 3 to 10 times AdamW's.
        maximize, capturable, fused, first_moment, group_size, min_size, stochastic_rounding,
            state_rounding: see `float8.optim.AdamW`.

    Raises:
        ValueError, TypeError: for values and parameters that are not supported.
    """

    moment_options: ClassVar[dict[str, str]] = {"exp_avg": "first_moment"}

    update = staticmethod(moments.lion)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
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
            "betas": betas,
            "weight_decay": weight_decay,
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
        """Beta2."""
        return group["betas"][1]

    def check_group(self, group: dict[str, Any]) -> None:
        """As the core's, and betas."""
        super().check_group(group)
        checks.check_betas(group["betas"])

    def rule(self, group: dict[str, Any], step: float | Tensor) -> Rule:
        """As `float8.kernels.moments.lion` takes them."""
        beta1, beta2 = group["betas"]
        return optimizer_step.Lion(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )
