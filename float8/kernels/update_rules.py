"""The update rules of the optimizers: what one step does to a parameter and its moments.

A rule is a NamedTuple of the numbers that a parameter group sets. Its `update` is the definition of
the step, on dense float32 tensors of one shape::

    p, *moments = rule.update(step, p, g, *moments)

Steps on a CPU, compiled steps and the tests of the CUDA kernel all run this text. The Triton kernel
(``gpu/optimizer_step.py``) repeats it in its own language, and a test holds the two equal.

Each operation rounds by itself and no compiler may contract two, in the order in which the kernel
takes them. The bits then agree, except where eager PyTorch on a CPU takes a square root with MKL,
which does not round it correctly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Number = float | Tensor  # a Python number, or a 0-dim tensor, whose value may change under a graph


class UpdateRule(Protocol):
    """The interface of an update rule, with or without a CUDA kernel."""

    @property
    def update(self) -> Callable[..., tuple[Tensor, ...]]:
        """``(step, p, g, *moments) -> (p, *moments)``; step counts from 1."""
        ...

    @property
    def decays(self) -> tuple[float, ...]:
        """The share of each moment that a step keeps."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


class AdamW(NamedTuple):
    """Adam (arXiv 1412.6980, algorithm 1); AdamW (arXiv 1711.05101) where decay is decoupled.

    Attributes:
        lr: learning rate, a number or a 0-dim tensor.
        beta1, beta2, eps, weight_decay: as in ``torch.optim``.
        decoupled: decay the parameter (AdamW), or else add ``weight_decay * p`` to g (Adam).
        maximize: ascend.
    """

    lr: Number
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool = True
    maximize: bool = False

    @property
    def decays(self) -> tuple[float, ...]:
        """Beta1 and beta2."""
        return self.beta1, self.beta2

    def update(
        self, step: Number, p: Tensor, g: Tensor, m: Tensor, v: Tensor
    ) -> tuple[Tensor, ...]:
        """New p, m and v; NaN and inf in g go where they go in ``torch.optim``."""
        g = -g if self.maximize else g
        if self.decoupled:
            p = p * (1 - self.lr * self.weight_decay)
        elif self.weight_decay != 0:
            g = g + p * self.weight_decay
        m = m + (g - m) * (1 - self.beta1)
        v = v * self.beta2 + (g * g) * (1 - self.beta2)
        step_size, root = adam_factors(self.lr, self.beta1, self.beta2, step)
        return p - (m / (v.sqrt() * root + self.eps)) * step_size, m, v


def adam_factors(lr: Number, beta1: float, beta2: float, step: Number) -> tuple[Number, Number]:
    """``lr / (1 - beta1^step)`` and ``1 / sqrt(1 - beta2^step)``, computed in float64."""
    if not isinstance(step, Tensor):
        return lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    step64 = step.to(torch.float64)
    size64 = lr / (1 - torch.pow(beta1, step64))
    root64 = (1 - torch.pow(beta2, step64)).rsqrt()
    return size64.to(torch.float32), root64.to(torch.float32)


class SGDMomentum(NamedTuple):
    """SGD with momentum, as ``torch.optim.SGD`` defines it; m is 0 before step 1.

    Attributes:
        lr, momentum, dampening, nesterov, weight_decay, maximize: as in ``torch.optim.SGD``.
    """

    lr: Number
    momentum: float
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False

    @property
    def decays(self) -> tuple[float, ...]:
        """The momentum."""
        return (self.momentum,)

    def update(self, step: Number, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        """New p and m. The gradient of step 1 enters the momentum without dampening."""
        g = -g if self.maximize else g
        if self.weight_decay != 0:
            g = g + p * self.weight_decay
        kept: Number = 1 - self.dampening
        if isinstance(step, Tensor):
            kept = torch.where(step == 1, 1.0, kept).to(torch.float32)
        elif step == 1:
            kept = 1.0
        m = m * self.momentum + g * kept
        direction = g + m * self.momentum if self.nesterov else m
        return p - direction * self.lr, m


class Lion(NamedTuple):
    """Lion (arXiv 2302.06675, algorithm 2), its decay decoupled.

    Attributes:
        lr, weight_decay: the step's length, and the decay of the parameter.
        beta1, beta2: of the step's direction and of the momentum.
        maximize: ascend.
    """

    lr: Number
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool = False

    @property
    def decays(self) -> tuple[float, ...]:
        """Beta2."""
        return (self.beta2,)

    def update(self, step: Number, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        """New p and m; a NaN stays one."""
        g = -g if self.maximize else g
        p = p * (1 - self.lr * self.weight_decay)
        mixed = m * self.beta1 + g * (1 - self.beta1)
        direction = torch.where(mixed.isnan(), mixed, mixed.sign())  # sign() makes 0 of NaN
        return p - direction * self.lr, m * self.beta2 + g * (1 - self.beta2)
