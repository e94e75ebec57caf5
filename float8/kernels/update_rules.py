"""The update rules of the optimizers: what one step does to a parameter and its moments.

A rule is a NamedTuple of the numbers that a parameter group sets. Its `update` is the definition of
the step, on dense float32 tensors of one shape::

    p, *moments = rule.update(step, p, g, *moments)

`decayed`, `adamw`, `sgd_momentum`, `lion`, `muon_direction` and `muon_move` are the arithmetic. The
Triton kernel (``gpu/optimizer_step.py``) compiles the source of these functions, with its own
`quotient`, `root` and `sign`; so they use nothing but arithmetic and these three.

Each operation rounds by itself and no compiler may contract two, in the order in which the kernel
takes them. The bits then agree, except where eager PyTorch on a CPU takes a square root with MKL,
which does not round it correctly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Number = float | Tensor  # a Python number, or a 0-dim tensor, whose value may change under a graph


def quotient(x: Any, y: Any) -> Any:
    """Divide, correctly rounded."""
    return x / y


def root(x: Any) -> Any:
    """Take the square root."""
    return x.sqrt()


def sign(x: Any) -> Any:
    """Return the sign, and NaN of NaN."""
    return torch.where(x.isnan(), x, x.sign())


def decayed(p: Any, g: Any, kept: Any, weight_decay: Any, decoupled: Any) -> Any:
    """p and g after weight decay, which is not 0; ``kept`` is 1 - lr * weight_decay."""
    if decoupled:
        p = p * kept
    else:
        g = g + p * weight_decay
    return p, g


def adamw(
    p: Any, g: Any, m: Any, v: Any, rest1: Any, beta2: Any, rest2: Any, eps: Any, size: Any, by: Any
) -> Any:
    """New p, m and v; ``rest`` is 1 - beta, ``size`` and ``by`` are `adam_factors`."""
    m = m + (g - m) * rest1
    v = v * beta2 + (g * g) * rest2
    return p - quotient(m, root(v) * by + eps) * size, m, v


def sgd_momentum(p: Any, g: Any, m: Any, lr: Any, beta1: Any, rest1: Any, nesterov: Any) -> Any:
    """New p and m; ``rest`` is the share of the gradient that enters the momentum."""
    m = m * beta1 + g * rest1
    return p - (g + m * beta1 if nesterov else m) * lr, m


def lion(p: Any, g: Any, m: Any, lr: Any, beta1: Any, rest1: Any, beta2: Any, rest2: Any) -> Any:
    """New p and m; ``rest`` is 1 - beta."""
    return p - sign(m * beta1 + g * rest1) * lr, m * beta2 + g * rest2


def muon_direction(g: Any, m: Any, rest1: Any, nesterov: Any) -> Any:
    """The direction and new m; ``rest`` is 1 - momentum."""
    m = m + (g - m) * rest1
    return m - (m - g) * rest1 if nesterov else m, m


def muon_move(p: Any, g: Any, size: Any) -> Any:
    """New p."""
    return p - g * size


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


class AdamWRule(NamedTuple):
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
        return adamw(*_prepared(self, p, g, self.decoupled), m, v, **self.numbers(step))

    def numbers(self, step: Number) -> dict[str, Number]:
        """The arguments of `adamw`."""
        size, by = adam_factors(self.lr, self.beta1, self.beta2, step)
        rests = {"rest1": 1 - self.beta1, "beta2": self.beta2, "rest2": 1 - self.beta2}
        return {**rests, "eps": self.eps, "size": size, "by": by}


def adam_factors(lr: Number, beta1: float, beta2: float, step: Number) -> tuple[Number, Number]:
    """``lr / (1 - beta1^step)`` and ``1 / sqrt(1 - beta2^step)``, computed in float64."""
    if not isinstance(step, Tensor):
        return lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    step64 = step.to(torch.float64)
    size64 = lr / (1 - torch.pow(beta1, step64))
    root64 = (1 - torch.pow(beta2, step64)).rsqrt()
    return size64.to(torch.float32), root64.to(torch.float32)


class SGDMomentumRule(NamedTuple):
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
        numbers = self.numbers(step)
        return sgd_momentum(*_prepared(self, p, g, False), m, **numbers, nesterov=self.nesterov)

    def numbers(self, step: Number) -> dict[str, Number]:
        """The arguments of `sgd_momentum`."""
        rest: Number = 1 - self.dampening
        if isinstance(step, Tensor):
            rest = torch.where(step == 1, 1.0, rest).to(torch.float32)
        elif step == 1:
            rest = 1.0
        return {"lr": self.lr, "beta1": self.momentum, "rest1": rest}


class LionRule(NamedTuple):
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
        return lion(*_prepared(self, p, g, True), m, **self.numbers(step))

    def numbers(self, step: Number) -> dict[str, Number]:
        """The arguments of `lion`."""
        first = {"lr": self.lr, "beta1": self.beta1, "rest1": 1 - self.beta1}
        return {**first, "beta2": self.beta2, "rest2": 1 - self.beta2}


class MuonDirection(NamedTuple):
    """The part of Muon before a matrix is orthogonalized, as ``torch.optim.Muon`` defines it.

    What it writes in place of the parameter is the direction.

    Attributes:
        momentum, nesterov: as in ``torch.optim.Muon``.
        maximize: ascend.
        lr, weight_decay: not read.
    """

    momentum: float
    nesterov: bool = True
    maximize: bool = False
    lr: Number = 0.0
    weight_decay: float = 0.0

    @property
    def decays(self) -> tuple[float, ...]:
        """The momentum."""
        return (self.momentum,)

    def update(self, step: Number, p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        """The direction and new m; p is not read."""
        return muon_direction(-g if self.maximize else g, m, 1 - self.momentum, self.nesterov)

    def numbers(self, step: Number) -> dict[str, Number]:
        """The arguments of `muon_direction`."""
        return {"rest1": 1 - self.momentum}


class MuonMove(NamedTuple):
    """The part of Muon after a matrix is orthogonalized: a step along g, without a moment.

    Attributes:
        lr, weight_decay: of the group; decay is decoupled.
        ratio: by which the learning rate of this matrix is multiplied.
        maximize: not read.
    """

    lr: Number
    ratio: float
    weight_decay: float
    maximize: bool = False

    @property
    def decays(self) -> tuple[float, ...]:
        """There is no moment."""
        return ()

    def update(self, step: Number, p: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        """New p."""
        p, g = _prepared(self, p, g, True)
        return (muon_move(p, g, self.lr * self.ratio),)

    def numbers(self, step: Number) -> dict[str, Number]:
        """The argument of `muon_move`, and its factor by which a tensor of lr is multiplied."""
        return {"size": self.lr * self.ratio, "by": self.ratio}


def _prepared(rule: Any, p: Tensor, g: Tensor, decoupled: bool) -> tuple[Tensor, Tensor]:
    """p and g after weight decay; of the gradient to ascend, the negative."""
    g = -g if rule.maximize else g
    if rule.weight_decay == 0:
        return p, g
    kept = 1 - rule.lr * rule.weight_decay
    return decayed(p, g, kept, rule.weight_decay, decoupled)


# The rules that the kernel has, by the names that its op takes.
KERNEL_RULES: dict[str, Any] = {
    **{"adamw": AdamWRule, "sgd_momentum": SGDMomentumRule, "lion": LionRule},
    **{"muon_direction": MuonDirection, "muon_move": MuonMove},
}


def packed(rule: UpdateRule) -> tuple[str, list[float], Tensor | None]:
    """A rule as an op takes it: its name, its numbers, and lr where it is a tensor."""
    fields = rule._asdict()
    name = next(name for name, kind in KERNEL_RULES.items() if kind is type(rule))
    numbers = [0.0 if isinstance(x, Tensor) else float(x) for x in fields.values()]
    return name, numbers, fields["lr"] if isinstance(fields["lr"], Tensor) else None


def unpacked(name: str, numbers: Sequence[float], lr: Tensor | None) -> Any:
    """The inverse of `packed`."""
    rule = KERNEL_RULES[name](*numbers)
    return rule if lr is None else rule._replace(lr=lr)
