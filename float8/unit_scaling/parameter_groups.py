"""Parameter groups for an optimizer: one per distinct learning rate, whatever was given.

A group holds what trains alike, so that an optimizer's fast paths see many tensors at once and a
scheduler few groups. Each group given falls apart by `learning_rates`: parameter p trains with

    lr * scale(p)        and, where decay is independent,        weight_decay / (lr * scale(p))

Weight decay is *independent* of the learning rate in u-muP, so that learning rates transfer (arXiv
2407.17465; the form of decay is that of arXiv 1711.05101): a step multiplies a weight by
``1 - weight_decay * schedule``. PyTorch multiplies by ``1 - lr * schedule * weight_decay``, hence
the division.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from float8.unit_scaling.learning_rates import LrScale
from float8.unit_scaling.parameter import has_parameter_data

# Tensors, (name, tensor) pairs or groups of them, as torch's optimizers take; or a whole module.
Params: TypeAlias = nn.Module | Iterable[Any]
_Named: TypeAlias = tuple[str | None, Tensor]

_LISTED = 8  # how many parameters an error names


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
        params: parameters, (name, parameter) pairs, groups of either (dicts with "params"), any
            iterable of these, or a module. One that occurs twice in a group counts once.
        lr_scale_func: the factor of a parameter, for instance `lr_scale_func_adam`.
        lr: the global learning rate, where a group has none of its own. A tensor stays a tensor,
            one for each group that is made.
        weight_decay: likewise.
        independent_weight_decay: divide the weight decay by the learning rate, so that what a step
            decays does not depend on it.
        allow_non_unit_scaling_params: let parameters without ``mup_type`` train with ``lr``.

    Returns:
        One group per distinct learning rate of every group given, in order of appearance, with
        the options of the group given.

    Raises:
        ValueError: there is no learning rate; or parameters have no ``mup_type``, in which case
            the message names them; or weight decay is to be divided by a learning rate of 0.
        TypeError: ``params`` holds something else, or is a set, which has no order.
    """
    groups = _groups(params)
    if not allow_non_unit_scaling_params:
        _require_parameter_data(groups)
    result = []
    for group in groups:
        options = {"lr": lr, "weight_decay": weight_decay, **group}
        members = options.pop("params")
        if options["lr"] is None:
            raise ValueError("scaled_parameters needs lr=..., or an 'lr' in every group")
        for scale, params_of_scale in _by_scale(members, lr_scale_func).items():
            result.append(
                {
                    **options,
                    "params": params_of_scale,
                    "lr": options["lr"] * scale,
                    "weight_decay": _decay(options, scale, independent_weight_decay),
                }
            )
    return result


def _by_scale(members: list[_Named], lr_scale_func: LrScale) -> dict[float, list[Any]]:
    found: dict[float, list[Any]] = {}
    for name, param in members:
        scale = lr_scale_func(param) if has_parameter_data(param) else 1.0
        found.setdefault(scale, []).append(param if name is None else (name, param))
    return found


def _decay(options: Mapping[str, Any], scale: float, independent: bool) -> float:
    decay: float = options["weight_decay"]
    if not independent or decay == 0:
        return decay
    lr = float(options["lr"]) * scale
    if lr == 0:
        raise ValueError(
            f"weight_decay={decay} cannot be made independent of lr=0: give the peak learning rate "
            "and let a scheduler start at 0, or independent_weight_decay=False"
        )
    return decay / lr


def _groups(params: Any) -> list[dict[str, Any]]:
    """Groups with lists of (name or None, parameter); loose parameters share the first one."""
    groups: list[dict[str, Any]] = []
    loose: dict[int, _Named] | None = None
    for entry in _iterate(params):
        if isinstance(entry, Mapping):
            groups.append(_normal_group(dict(entry)))
            continue
        if loose is None:
            loose = {}
            groups.append({"params": loose})
        loose.setdefault(id(_named(entry)[1]), _named(entry))
    if loose is not None:
        next(g for g in groups if g["params"] is loose)["params"] = list(loose.values())
    return groups


def _normal_group(group: dict[str, Any]) -> dict[str, Any]:
    if "params" not in group:
        raise ValueError(f"a parameter group needs 'params', got one with {sorted(group)}")
    given = group.pop("params")
    members = [_named(p) for p in ([given] if isinstance(given, Tensor) else _iterate(given))]
    names = group.pop("param_names", None)
    if names is not None:
        members = [(name, p) for name, (_, p) in zip(names, members, strict=True)]
    # Tied parameters once: the first name stays.
    return {**group, "params": list({id(p): (n, p) for n, p in reversed(members)}.values())[::-1]}


def _iterate(params: Any) -> Iterable[Any]:
    if isinstance(params, nn.Module):
        return params.named_parameters()
    if isinstance(params, (Tensor, Mapping, str, set, frozenset)) or not isinstance(
        params, Iterable
    ):
        raise TypeError(
            "params must be a module or an ordered iterable of parameters, (name, parameter) pairs "
            f"or groups; got {type(params).__name__}"
        )
    return params


def _named(entry: Any) -> _Named:
    if isinstance(entry, Tensor):
        return None, entry
    if isinstance(entry, tuple) and len(entry) == 2:
        name, param = entry
        if isinstance(name, str) and isinstance(param, Tensor):
            return name, param
    raise TypeError(
        "a parameter must be a tensor or a (name, tensor) pair, got a "
        f"{type(entry).__name__}: {entry!r:.80}"
    )


def _require_parameter_data(groups: list[dict[str, Any]]) -> None:
    without = [(n, p) for g in groups for n, p in g["params"] if not has_parameter_data(p)]
    if not without:
        return
    listed = [f"{name or 'a parameter'} of shape {tuple(p.shape)}" for name, p in without]
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    raise ValueError(
        f"parameters without mup_type: {', '.join(listed[:_LISTED])}{more}. Use unit-scaled "
        "modules, or uu.Parameter in modules that derive from uu.parameter.MupModule, or let these "
        "train with the global lr: allow_non_unit_scaling_params=True"
    )
