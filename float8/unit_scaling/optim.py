"""Optimizers with u-muP's learning rate for each parameter.

One learning rate ``lr`` is tuned on a small model and serves every width and depth::

    model = uu.TransformerDecoder(
        hidden_size=256, vocab_size=1000, layers=4, heads=4, rotary_base=10_000.0
    )
    optimizer = uu.optim.AdamW(model.parameters(), lr=0.5, weight_decay=2**-13)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)

A parameter trains with ``lr * scale(parameter)``. Adam's updates have unit scale for gradients of
any scale. Its table is that of arXiv 2407.17465, table 2, but the "fan-in" of an embedding is the
width of its output, which the paper calls fan-out:

    mup_type               scale                    reason
    "weight"               1 / sqrt(fan_in)         forward multiplies by 1 / sqrt(fan_in), and the
                                                    fan_in products of an update add up coherently
    "output"               1                        forward multiplies by 1 / fan_in already
    "bias", "norm"         1                        each element acts on one feature
    in a stack of depth L  all of these / sqrt(L)   the updates of L residual layers add up

SGD's updates are as large as its gradients. If the readout's backward has its own scale
(``LinearReadout(constraint=None)``, the default) gradients have unit scale and the table above
holds. If it is constrained to the output's (``constraint="to_output_scale"``), all gradients before
it shrink like 1 / width, and these scales restore the width:

    "weight"               sqrt(fan_in)             = fan_in * 1 / sqrt(fan_in)
    "bias", "norm"         the number of elements, which is the width
    "output"               1                        its own gradient does not pass through itself

**Weight decay** is *independent* of the learning rate in u-muP, so that learning rates transfer
(arXiv 2407.17465; the form of decay is that of arXiv 1711.05101): a step multiplies a weight by
``1 - weight_decay * schedule``. PyTorch multiplies by ``1 - lr * schedule * weight_decay``, so
the optimizer passes it ``weight_decay / (lr * scale(parameter))``.

**Parameter groups.** An optimizer has one group per distinct learning rate, so that its fast paths
process many tensors at once. A scheduler must multiply learning rates, as most do. `OneCycleLR` and
`CyclicLR` set them, so they need
``max_lr=[group["lr"] for group in optimizer.param_groups]``: a single number would give all
parameters the same learning rate. Other optimizers take the groups of `scaled_parameters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from float8.unit_scaling.parameter import ParameterData, has_parameter_data

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "lr_scale_for_depth",
    "lr_scale_func_adam",
    "lr_scale_func_sgd",
    "scaled_parameters",
]

LrScale: TypeAlias = Callable[[Any], float]
# As torch's optimizers take: tensors, (name, tensor) pairs, or groups of either; or a whole module.
Params: TypeAlias = nn.Module | Iterable[Any]


# --- the learning rate of a parameter


def lr_scale_for_depth(param: ParameterData) -> float:
    """``1 / sqrt(depth)`` in a stack of residual layers, else 1 (u-muP, table 2, "residual")."""
    return 1.0 if param.mup_scaling_depth is None else float(param.mup_scaling_depth**-0.5)


def lr_scale_func_adam(param: ParameterData) -> float:
    """The factor of a parameter's learning rate in Adam and AdamW (u-muP, table 2).

    ``1 / sqrt(fan_in)`` for a "weight" and 1 for the others; in a stack also `lr_scale_for_depth`.

    Args:
        param: a `Parameter`.
    """
    scale = lr_scale_for_depth(param)
    return scale * _fan_in(param) ** -0.5 if param.mup_type == "weight" else scale


def lr_scale_func_sgd(readout_constraint: str | None) -> LrScale:
    """The factor of a parameter's learning rate in SGD, as a function like `lr_scale_func_adam`.

    Args:
        readout_constraint: the ``constraint`` of the model's `LinearReadout`, None or
            "to_output_scale".

    Raises:
        ValueError: another constraint.
    """
    if readout_constraint not in (None, "to_output_scale"):
        raise ValueError(
            'readout_constraint must be None or "to_output_scale", the constraint of the model\'s '
            f"LinearReadout; got {readout_constraint!r}"
        )
    return lr_scale_func_adam if readout_constraint is None else _sgd_behind_constrained_readout


def _sgd_behind_constrained_readout(param: ParameterData) -> float:
    scale = lr_scale_for_depth(param)
    if param.mup_type == "output":
        return scale
    width = _fan_in(param)
    return scale * (width**0.5 if param.mup_type == "weight" else width)


def _fan_in(param: ParameterData) -> int:
    """The terms that one output element sums: of (out, in, *kernel) all sizes but the first.

    For an embedding (tokens, width) this is the width, as in table 2, and so it is for vectors.
    """
    shape = param.shape
    whole = len(shape) < 2 or param.mup_type in ("bias", "norm")
    return max(1, (shape if whole else shape[1:]).numel())


# --- parameter groups


def scaled_parameters(
    params: Params,
    lr_scale_func: LrScale,
    lr: float | Tensor | None = None,
    weight_decay: float = 0,
    independent_weight_decay: bool = True,
    allow_non_unit_scaling_params: bool = False,
) -> list[dict[str, Any]]:
    """Parameter groups with u-muP's learning rates, for any optimizer.

    Example: ``torch.optim.NAdam(scaled_parameters(model, lr_scale_func_adam, lr=0.1))``.

    Args:
        params: a module, or what torch's optimizers take: an iterable of parameters, of (name,
            parameter) pairs, or of groups of either (dicts with "params").
        lr_scale_func: the factor of a parameter, for instance `lr_scale_func_adam`.
        lr: the global learning rate, for groups without their own. A tensor gives each resulting
            group a tensor of its own.
        weight_decay: the weight decay, for groups without their own.
        independent_weight_decay: divide the weight decay by the learning rate, so that the decay
            of a step does not depend on it. The rate is not 0 then: let a scheduler begin at 0.
        allow_non_unit_scaling_params: let parameters without ``mup_type`` train with ``lr``.

    Returns:
        One group per given group and distinct learning rate, in order of appearance, with the
        options of the given group.

    Raises:
        ValueError: parameters have no ``mup_type``; the message names them. Other errors are those
            of torch's optimizers.
    """
    named = params.named_parameters() if isinstance(params, nn.Module) else params
    given = torch.optim.Optimizer(named, {"lr": lr, "weight_decay": weight_decay}).param_groups
    result = []
    without = []
    for group in given:
        names = group.pop("param_names", None)
        by_scale: dict[float, list[Any]] = {}
        for place, param in enumerate(group["params"]):
            is_scaled = has_parameter_data(param)
            without += [] if is_scaled else [(names[place] if names else "a parameter", param)]
            scale = lr_scale_func(param) if is_scaled else 1.0
            by_scale.setdefault(scale, []).append((names[place], param) if names else param)
        for scale, members in by_scale.items():
            own, decay = group["lr"] * scale, group["weight_decay"]
            if independent_weight_decay and decay != 0:
                decay = decay / float(own)
            result.append({**group, "params": members, "lr": own, "weight_decay": decay})
    if without and not allow_non_unit_scaling_params:
        is_sharded = any(hasattr(p, "device_mesh") for _, p in without)
        why = " (FSDP2 replaces the parameters that unit_scale has marked)" if is_sharded else ""
        first, param = without[0]
        raise ValueError(
            f"{len(without)} parameters without mup_type{why}, first {first} of shape "
            f"{tuple(param.shape)}: use unit-scaled modules, or uu.Parameter in modules that "
            "derive from uu.parameter.MupModule, or allow_non_unit_scaling_params=True"
        )
    return result


# --- the optimizers


class _Scaled(torch.optim.Optimizer):
    """Abstract: one of torch's optimizers, with the groups of `scaled_parameters`."""

    # The further arguments of `scaled_parameters`; None while torch's __init__ runs.
    _scaling: tuple[Any, ...] | None = None
    _lr_scale_func: LrScale = staticmethod(lr_scale_func_adam)

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
        options = independent_weight_decay, allow_non_unit_scaling_params
        scaling = (self._lr_scale_func, lr, weight_decay, *options)
        groups = scaled_parameters(params, *scaling)
        kwargs["weight_decay"] = weight_decay
        super().__init__(groups, lr, *args, **kwargs)  # type: ignore[arg-type]
        self._scaling = scaling

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which is scaled first and may become several groups."""
        groups = [param_group]
        if self._scaling is not None:
            groups = scaled_parameters(groups, *self._scaling)
        for group in groups:
            super().add_param_group(group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_scaling": self._scaling}


class SGD(_Scaled, torch.optim.SGD):
    """``torch.optim.SGD`` with the learning rates of u-muP.

    Args:
        params: see `scaled_parameters`.
        lr: the learning rate, which is multiplied by each parameter's scale; a float, or a tensor
            of one element.
        args, kwargs: torch's further arguments, in its order (momentum, dampening, ...).
        weight_decay: see `scaled_parameters`.
        independent_weight_decay: see `scaled_parameters`.
        allow_non_unit_scaling_params: see `scaled_parameters`.
        readout_constraint: the ``constraint`` of the model's `LinearReadout`.
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
        self._lr_scale_func = lr_scale_func_sgd(readout_constraint)
        super().__init__(
            params, lr, *args, weight_decay=weight_decay,
            independent_weight_decay=independent_weight_decay,
            allow_non_unit_scaling_params=allow_non_unit_scaling_params, **kwargs,
        )  # fmt: skip


class Adam(_Scaled, torch.optim.Adam):
    """``torch.optim.Adam`` with the learning rates of u-muP; adds weight decay to the gradient.

    Its arguments are those of `SGD`, without ``readout_constraint``.
    """


class AdamW(Adam, torch.optim.AdamW):
    """``torch.optim.AdamW`` with the learning rates of u-muP; arguments as of `Adam`.

    A step multiplies a weight by ``1 - weight_decay * schedule``, where the schedule is the factor
    that a scheduler has put on the learning rate. The default is no decay; torch's default is 0.01.
    """
