"""Optimizers that give every parameter the learning rate that u-muP gives it.

`SGD`, `Adam` and `AdamW` are torch's, with groups made by `scaled_parameters` from the tables of
`learning_rates`: one learning rate, tuned on a small model, serves every width and depth::

    model = uu.TransformerDecoder(
        hidden_size=256, vocab_size=1000, layers=4, heads=4, rotary_base=10_000.0
    )
    optimizer = uu.optim.AdamW(model.parameters(), lr=0.5, weight_decay=2**-13)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)

A scheduler must multiply learning rates, as most do, or be given one per group. `OneCycleLR` and
`CyclicLR` set them, so they need ``max_lr=[group["lr"] for group in optimizer.param_groups]``: a
single number would give all parameters the same. Any other optimizer takes the groups that
`scaled_parameters` makes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8.unit_scaling.learning_rates import (
    lr_scale_for_depth,
    lr_scale_func_adam,
    lr_scale_func_sgd,
)
from float8.unit_scaling.parameter_groups import Params, scaled_parameters

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "lr_scale_for_depth",
    "lr_scale_func_adam",
    "lr_scale_func_sgd",
    "scaled_parameters",
]


class _Scaled(torch.optim.Optimizer):
    """Abstract: an optimizer whose groups went through `scaled_parameters`, later ones too."""

    _scaling: dict[str, Any] | None = None  # its arguments; None while torch's __init__ runs

    def _start(
        self, params: Params, scaling: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Torch's ``__init__``, on the groups that ``scaling`` makes of the parameters."""
        groups = scaled_parameters(params, **scaling)
        kwargs = {**kwargs, "weight_decay": scaling["weight_decay"]}
        super().__init__(groups, scaling["lr"], *args, **kwargs)
        self._scaling = scaling

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the group is scaled and may become several: all are added or none."""
        if self._scaling is None:
            super().add_param_group(param_group)
            return
        before = len(self.param_groups)
        try:
            for group in scaled_parameters([param_group], **self._scaling):
                super().add_param_group(group)
        except Exception:
            del self.param_groups[before:]
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_scaling": self._scaling}


class SGD(_Scaled, torch.optim.SGD):
    """``torch.optim.SGD`` with the learning rates of u-muP.

    Args:
        params: parameters, pairs, groups, or a module; see `scaled_parameters`.
        lr: the global learning rate, a float or a tensor.
        args, kwargs: torch's further arguments, in its order (momentum, dampening, ...).
        weight_decay: per step, see ``independent_weight_decay``.
        independent_weight_decay: the decay does not depend on ``lr``.
        allow_non_unit_scaling_params: let parameters without ``mup_type`` train with ``lr``.
        readout_constraint: the ``constraint`` of the model's `LinearReadout`.

    Raises:
        ValueError, TypeError: see `scaled_parameters` and `lr_scale_func_sgd`.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *args: Any,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        readout_constraint: str | None = None,
        **kwargs: Any,
    ) -> None:
        scaling = {
            "lr_scale_func": lr_scale_func_sgd(readout_constraint),
            "lr": lr,
            "weight_decay": weight_decay,
            "independent_weight_decay": independent_weight_decay,
            "allow_non_unit_scaling_params": allow_non_unit_scaling_params,
        }
        self._start(params, scaling, args, kwargs)


class Adam(_Scaled, torch.optim.Adam):
    """``torch.optim.Adam`` with the learning rates of u-muP (table 2).

    Args:
        params: parameters, pairs, groups, or a module; see `scaled_parameters`.
        lr: the global learning rate, a float or a tensor.
        args, kwargs: torch's further arguments, in its order (betas, eps, ...).
        weight_decay: added to the gradient, see ``independent_weight_decay``.
        independent_weight_decay: divide ``weight_decay`` by the learning rate.
        allow_non_unit_scaling_params: let parameters without ``mup_type`` train with ``lr``.

    Raises:
        ValueError, TypeError: see `scaled_parameters`.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *args: Any,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        **kwargs: Any,
    ) -> None:
        scaling = {
            "lr_scale_func": lr_scale_func_adam,
            "lr": lr,
            "weight_decay": weight_decay,
            "independent_weight_decay": independent_weight_decay,
            "allow_non_unit_scaling_params": allow_non_unit_scaling_params,
        }
        self._start(params, scaling, args, kwargs)


class AdamW(Adam, torch.optim.AdamW):
    """``torch.optim.AdamW`` with the learning rates of u-muP (table 2).

    Its arguments are those of `Adam`. A step multiplies a weight by ``1 - weight_decay`` times what
    a schedule makes of the learning rate; the default is no decay, where torch's is 0.01.
    """
