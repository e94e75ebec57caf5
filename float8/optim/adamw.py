"""AdamW and Adam with their moments in 8 bits.

Adam (arXiv 1412.6980, algorithm 1) keeps an average of gradients and one of their squares: 8 bytes
per parameter in float32, 2.1 here. `AdamW` decays the parameter itself (arXiv 1711.05101), `Adam`
adds the decay to the gradient. Arguments are those of torch.optim; those about storage come last.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from float8.kernels import moments, optimizer_step
from float8.kernels.optimizer_step import Rule
from float8.optim import checks
from float8.optim.core import QuantizedOptimizer


class AdamW(QuantizedOptimizer):
    """``torch.optim.AdamW`` with both moments in float8.

    A gradient of NaN or inf spoils its own element for good, as in torch.optim, and none of those
    that share its scale; clip, or let `torch.amp.GradScaler` skip the step. (A finite one
    above 1.8e19, whose square overflows, is NaN from the next step on; torch.optim's element may go
    on.) Without a gradient a parameter and its state stay as they are. Sparse
    gradients and those in float64 are refused before anything changes.

    Args:
        params: tensors, (name, tensor) pairs or groups: float32, bfloat16, float16, or
            `Float8Tensor`s with one scale (which get a float16 master).
        lr: learning rate, a float or a tensor with one element.
        betas: of the two averages, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient.
        amsgrad: refused.
        maximize: ascend.
        capturable: keep ``step`` on the parameter's device, for CUDA graphs.
        fused: True asks for the CUDA kernel, False for plain PyTorch. None takes the kernel where
            it runs, on CUDA for every option but a ``group_size`` that is no power of two or is
            above 2048, and warns once on a GPU or of an option that it does not run with.
        first_moment: "float8" or "float32".
        second_moment: "float8" (with expanded range), "float16" (with a scale) or "float32".
        group_size: how many neighbours in a row share a scale.
        min_size: parameters with fewer elements keep float32 moments.
        stochastic_rounding: round bfloat16 and float16 parameters up or down at random, so that
            small updates are not lost; the same numbers in every run.
        state_rounding: of float8 moments: "nearest", "stochastic", or "auto", which rounds at
            random what changes too little in a step to move otherwise (see ``core.py``).

    Raises:
        ValueError, TypeError: for values and parameters that are not supported.
    """

    moment_options: ClassVar[dict[str, str]] = {
        "exp_avg": "first_moment",
        "exp_avg_sq": "second_moment",
    }
    decoupled = True

    update = staticmethod(moments.adamw)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
        first_moment: str = "float8",
        second_moment: str = "float8",
        group_size: int = 128,
        min_size: int = 4096,
        stochastic_rounding: bool = False,
        state_rounding: str = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "capturable": capturable,
            "fused": fused,
            "first_moment": first_moment,
            "second_moment": second_moment,
            "group_size": group_size,
            "min_size": min_size,
            "stochastic_rounding": stochastic_rounding,
            "state_rounding": state_rounding,
        }
        super().__init__(params, defaults)

    def decay(self, group: dict[str, Any], name: str) -> float:
        """Beta1 or beta2."""
        return group["betas"][0 if name == "exp_avg" else 1]

    def check_group(self, group: dict[str, Any]) -> None:
        """As the core's, and betas, eps and amsgrad."""
        super().check_group(group)
        checks.check_number("eps", group["eps"], 0.0)
        checks.check_betas(group["betas"])
        if group["amsgrad"]:
            raise ValueError(checks.AMSGRAD)

    def rule(self, group: dict[str, Any], step: float | Tensor) -> Rule:
        """As `float8.kernels.moments.adamw` takes them."""
        beta1, beta2 = group["betas"]
        return optimizer_step.AdamW(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            decoupled=self.decoupled,
            maximize=group["maximize"],
        )


class Adam(AdamW):
    """``torch.optim.Adam`` with both moments in float8, the decay a part of the gradient.

    Args:
        params, lr, betas, eps, amsgrad: see `AdamW`.
        weight_decay: times the parameter is added to the gradient.
        storage: see `AdamW`, from ``maximize`` on.
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
        **storage: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **storage)
