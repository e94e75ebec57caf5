"""Registration points: how packages above extend layers, `sync` and conversion.

Imports point down, so a package cannot import what extends it. It reads these tables instead, which
packages above fill when they are imported:

- ``MODULE_RULES``: `float8.convert` registers ``nn.Linear``, `float8.unit_scaling` and
  `float8.distributed` their layers, and users their own types; conversion and `float8.estimate`
  read it.
- ``WEIGHT_RULES``: `float8.distributed.gathered_weights` registers one; conversion reads it for
  ``enable_fsdp_float8_all_gather``, and layers when they load and save checkpoints.
- ``FIRST_SYNC_CHECKS``: `float8.distributed.rank_comparison` registers one; the first ``sync`` of a
  model calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from float8.config import Float8LinearConfig


@dataclass(frozen=True)
class ModuleRule:
    """The conversion of one module type.

    Args:
        refuses: (module, config) -> the reason why it cannot be converted, or None.
        convert: (module, config, fqn) -> the float8 module, parameters shared.
        unit_scaled: whether the type keeps its operands near unit scale by itself, so that recipe
            ``unit`` suits it.
        stacked: whether the module has stacks of weights (E, N, K), those of experts, instead of
            one ``weight`` (N, K).
    """

    refuses: Callable[[nn.Module, Float8LinearConfig], str | None]
    convert: Callable[[nn.Module, Float8LinearConfig, str], nn.Module]
    unit_scaled: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class WeightRule:
    """The storage of weights for ``enable_fsdp_float8_all_gather``; checkpoints have plain tensors.

    Args:
        refuses: (layer, config) -> the reason why its weight cannot be stored so, or None.
        wrap: (model, name -> converted layer) -> name -> the reason, for weights left as they were.
        unwrap: (model): the inverse of ``wrap``.
        is_stored: (weight) -> whether it is stored so.
        to_plain: (weight) -> the same data as an ordinary tensor.
        from_plain: (tensor) -> the same data as a stored weight.
    """

    refuses: Callable[[nn.Module, Float8LinearConfig], str | None]
    wrap: Callable[[nn.Module, dict[str, nn.Module]], dict[str, str]]
    unwrap: Callable[[nn.Module], None]
    is_stored: Callable[[Tensor], bool]
    to_plain: Callable[[Tensor], Tensor]
    from_plain: Callable[[Tensor], Tensor]


MODULE_RULES: dict[type[nn.Module], ModuleRule] = {}
WEIGHT_RULES: list[WeightRule] = []  # at most one
# (model, the ranks that take part, their groups): raises where ranks disagree.
FIRST_SYNC_CHECKS: list[Callable[[nn.Module, list[int], list[Any]], None]] = []


def register_module_rule(module_type: type[nn.Module], rule: ModuleRule) -> None:
    """Let conversion handle modules whose type is exactly ``module_type``.

    Args:
        module_type: subclasses are not meant.
        rule: how to convert them.

    Raises:
        ValueError: the type has a rule already.
    """
    if module_type in MODULE_RULES:
        raise ValueError(f"{module_type.__name__} already has a conversion rule")
    MODULE_RULES[module_type] = rule


def stacked_weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module, by name, that are stacks of the matrices of experts: (E, N, K).

    ``is_transposed``, where a module has it, says that they are (E, K, N).
    """
    own = module._parameters.items()
    # A lazy one has no shape yet.
    return {n: p for n, p in own if p is not None and not is_lazy(p) and p.dim() == 3}


def weights_of(layer: nn.Module) -> dict[str, Any]:
    """The weights of a layer or of experts, by name: ``weight``, or the stacks."""
    weight = layer._parameters.get("weight")  # a wrapper may have put a property in its place
    return stacked_weights(layer) or ({} if weight is None else {"weight": weight})


def stored_by(weight: Tensor) -> WeightRule | None:
    """The rule by which a weight is stored, or None for an ordinary one."""
    return next((rule for rule in WEIGHT_RULES if rule.is_stored(weight)), None)


def register_weight_rule(rule: WeightRule) -> None:
    """Let conversion store weights so that FSDP2 gathers them in float8.

    The library registers its own rule when it is imported, so there is no place for another.

    Args:
        rule: how to store them.

    Raises:
        ValueError: there is a rule already.
    """
    if WEIGHT_RULES:
        raise ValueError("there is a rule for enable_fsdp_float8_all_gather already")
    WEIGHT_RULES.append(rule)
