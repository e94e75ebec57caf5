"""AdamW, Adam, SGD and Lion with their moments in 8 bits.

Arguments are those of torch.optim, then the `float8.optim.options.Options` that all share. State
per parameter: 2.1 bytes of Adam's instead of 8, 1.03 of the momentum of SGD and Lion instead of 4.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from float8.kernels import update_rules
from float8.optim.optimizer import QuantizedOptimizer


class AdamW(QuantizedOptimizer):
    """``torch.optim.AdamW`` with both moments in float8.

    A gradient of NaN or inf spoils its own element for good, as in torch.optim, and no element that
    shares its scale; clip, or let `torch.amp.GradScaler` skip the step. (An element whose finite
    gradient is above 1.8e19, so that its square overflows, is NaN from the next step on;
    torch.optim's may go on.) Without a gradient a parameter and its state stay as they are. Sparse
    gradients raise an error, as do those in float64.

    Args:
        params: tensors, (name, tensor) pairs or groups: float32, bfloat16, float16, or
            `Float8Tensor`s with one scale (which get a float16 master).
        lr: learning rate, a float or a tensor with one element.
        betas: of the two averages, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient (arXiv 1711.05101).
        amsgrad: refused: the maximum of second moments would keep every rounding upwards.
        given: see `float8.optim.options.Options`.

    Raises:
        ValueError, TypeError: for values and parameters that are not supported.
    """

    moment_options: ClassVar[dict[str, str]] = {
        "exp_avg": "first_moment",
        "exp_avg_sq": "second_moment",
    }
    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **given: Any,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "amsgrad": amsgrad}, given)

    def rule(self, group: dict[str, Any]) -> update_rules.AdamWRule:
        """The update rule with the group's numbers."""
        return adamw_rule(group, self.decoupled)


def adamw_rule(group: dict[str, Any], decoupled: bool) -> update_rules.AdamWRule:
    """The update rule of `AdamW`, or of `Adam`, with the group's numbers."""
    numbers = {name: group[name] for name in ("lr", "eps", "weight_decay", "maximize")}
    beta1, beta2 = group["betas"]
    return update_rules.AdamWRule(beta1=beta1, beta2=beta2, decoupled=decoupled, **numbers)


class Adam(AdamW):
    """``torch.optim.Adam`` with both moments in float8: weight decay is added to the gradient.

    Args:
        params, lr, betas, eps, amsgrad, given: see `AdamW`.
        weight_decay: times the parameter is added to the gradient.
    """

    decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **given: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **given)


class SGD(QuantizedOptimizer):
    """``torch.optim.SGD`` with momentum, which is kept in float8.

    Args:
        params: see `AdamW`.
        lr: learning rate, a float or a tensor with one element.
        momentum: without one there is no state to keep in float8, so take torch.optim.SGD.
        dampening: of the gradient that enters the momentum, from the second step on.
        weight_decay: times the parameter is added to the gradient.
        nesterov: look ahead by one momentum; needs ``dampening=0``.
        given: see `float8.optim.options.Options`; all options except second_moment.

    Raises:
        ValueError, TypeError: for values and parameters that are not supported.
    """

    moment_options: ClassVar[dict[str, str]] = {"momentum_buffer": "first_moment"}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **given: Any,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "dampening": dampening}
        super().__init__(
            params, {**numbers, "weight_decay": weight_decay, "nesterov": nesterov}, given
        )

    def rule(self, group: dict[str, Any]) -> update_rules.SGDMomentumRule:
        """The update rule with the group's numbers."""
        numbers = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize")
        return update_rules.SGDMomentumRule(**{name: group[name] for name in numbers})


class Lion(QuantizedOptimizer):
    """Lion (arXiv 2302.06675, algorithm 2), its momentum in float8.

    It moves every weight by the learning rate, in the direction of the sign of a momentum. Only
    signs are used, so a momentum of few bits loses little.

    Args:
        params: see `AdamW`.
        lr: learning rate, a float or a tensor with one element; 3 to 10 times less than AdamW's.
        betas: of the direction and of the momentum, in [0, 1).
        weight_decay: decoupled; 3 to 10 times AdamW's.
        given: see `float8.optim.options.Options`; all options except second_moment.

    Raises:
        ValueError, TypeError: for values and parameters that are not supported.
    """

    moment_options: ClassVar[dict[str, str]] = {"exp_avg": "first_moment"}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **given: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, given)

    def rule(self, group: dict[str, Any]) -> update_rules.LionRule:
        """The update rule with the group's numbers."""
        beta1, beta2 = group["betas"]
        numbers = {name: group[name] for name in ("lr", "weight_decay", "maximize")}
        return update_rules.LionRule(beta1=beta1, beta2=beta2, **numbers)
