"""`Float8Module`: a module that computes in float8, and how it comes and goes.

It comes by a rule of conversion. Imports point down, so a package above `float8.convert` registers
the rule of its module types: `MODULE_RULES`. Users register their own types too.
`float8.estimate` reads the table as well.

It goes by `to_float`; and it leaves float8 for a while where a forward finds
``module.high_precision`` set. `float8.high_precision` sets the flag that it reads, for all threads:
autograd recomputes checkpointed regions in threads of its own. Such a region runs as the model is
then: call backward inside the context in which forward ran.

Two more tables are filled by one package above each:

- ``WEIGHT_RULES``: `float8.distributed.gathered_weights` registers one; conversion reads it for
  ``enable_fsdp_float8_all_gather``, and layers when they load and save checkpoints.
- ``FIRST_SYNC_CHECKS``: `float8.distributed.rank_comparison` registers one; the first ``sync`` of a
  model calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from float8.config import Float8LinearConfig


class Switch:
    """Whether float8 is switched off, and in how many contexts; that of one module."""

    def __init__(self) -> None:
        self.contexts = 0
        self.is_off = False  # torch.compile guards on it: one graph per value
        self.was_on = False  # whether the module has run in float8; no forward reads it

    def note_call(self) -> None:
        """Note that the module runs in float8.

        torch.compile runs this while it traces, as a constant: no guard, no side effect of a graph.
        """
        self.was_on = True

    note_call._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[type[Switch], tuple[()]]:
        """The state of copies and pickles, which are outside of any `high_precision` context."""
        return Switch, ()


class Switchable(nn.Module):
    """Abstract: a module that runs in high precision where float8 is switched off."""

    switch: Switch
    # Set by `float8.integrations.conversion`: leave float8 in eval mode without gradients.
    evaluates_in_high_precision: bool = False

    def _add_switch(self) -> None:
        self.switch = Switch()

    @property
    def high_precision(self) -> bool:
        """Whether the module runs without float8 now."""
        return self.switch.is_off or (
            self.evaluates_in_high_precision and not (self.training or torch.is_grad_enabled())
        )


class Float8Module(Switchable):
    """Abstract: a module that computes in float8 and can become the plain module again.

    Attributes:
        float8_config: of the module's products, where ``config`` is not that: of experts.
    """

    float8_config: Float8LinearConfig | None = None

    def to_float(self) -> nn.Module:
        """The plain module, parameters shared."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")


class HasSwitch(Protocol):
    """A `Switchable`, or a transform that runs a model's products in float8."""

    switch: Switch


class HasTransforms:
    """Abstract: a model whose forward runs under transforms, such as those of unit scaling.

    ``transforms`` are in the order of their modes. The one that has a switch runs products in
    float8.
    """

    transforms: tuple[Any, ...]

    @property
    def float8_products(self) -> Any:
        """The transform that runs products in float8, or None."""
        own = [t for t in self.transforms if hasattr(t, "switch")]
        return own[0] if own else None


def switchable_parts(model: nn.Module) -> list[HasSwitch]:
    """The parts of a model that `float8.high_precision` switches off: layers and transforms."""
    layers = [module for module in model.modules() if isinstance(module, Switchable)]
    transforms = [m.float8_products for m in model.modules() if isinstance(m, HasTransforms)]
    return [*layers, *[t for t in transforms if t is not None]]


@contextmanager
def switched_off(modules: Iterable[HasSwitch]) -> Iterator[None]:
    """Run modules in high precision; contexts may nest and overlap."""
    switches = [module.switch for module in modules]
    try:
        for switch in switches:
            switch.contexts += 1
            switch.is_off = True
        yield
    finally:
        for switch in switches:
            switch.contexts -= 1
            switch.is_off = switch.contexts > 0


# --- rules


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
    return next(iter([rule for rule in WEIGHT_RULES if rule.is_stored(weight)]), None)


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
