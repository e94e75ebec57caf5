"""`Float8Module`: a module that computes in float8, and how it comes and goes.

It comes by a rule of conversion. Imports point down, so a package above `float8.convert` registers
the rule of its module types: `MODULE_RULES`. Users register their own types too.
`float8.estimate` reads the table as well.

It goes by `to_float`; and it leaves float8 for a while where a forward finds
``module.high_precision`` set. `float8.high_precision` sets the flag that it reads, for all threads:
autograd recomputes checkpointed regions in threads of its own. Such a region runs as the model is
then: call backward inside the context in which forward ran.
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
        # Whether the module has run in float8, and in a compiled graph; no forward reads them.
        self.was_on = self.was_traced = False

    def note_call(self, traced: bool) -> None:
        """Note that the module runs in float8.

        torch.compile runs this while it traces, as a constant: no guard, no side effect of a graph.
        """
        self.was_on = True
        self.was_traced |= traced

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
        float8_config: of the module's products; None where it has none.
        plain_type: the type of the plain module.
        own_names: the attributes and children that the plain module has not.
    """

    float8_config: Float8LinearConfig | None = None
    plain_type: type[nn.Module]
    own_names: tuple[str, ...]

    @property
    def _name(self) -> str:
        return type(self).__name__

    def to_float(self) -> Any:
        """The plain module, of its own type; parameters, hooks and attributes are shared.

        Raises ValueError if something has wrapped ``forward``, which would still run in float8.
        """
        if "forward" in self.__dict__:
            raise ValueError(
                f"{self._name}: its forward was replaced after the conversion, by what would still "
                "run in float8: evaluate under float8.high_precision(model), or load a checkpoint "
                "into the plain model"
            )
        plain = with_state_of(self, self.plain_type)
        of_all = ("switch", "evaluates_in_high_precision", "plain_type", "own_names")
        for name in (*of_all, *self.own_names):
            plain._modules.pop(name, None)
            plain.__dict__.pop(name, None)
        return plain


def with_state_of(source: nn.Module, cls: Any) -> Any:
    """A ``cls`` with the parameters, buffers, hooks and attributes of ``source``."""
    new = cls.__new__(cls)
    new.__dict__ = dict(source.__dict__)
    # Each module may replace entries of these dicts, so each has its own. The dicts of hooks stay
    # shared, because the handles of users remove hooks from them.
    for name in ("_parameters", "_buffers", "_modules"):
        new.__dict__[name] = dict(source.__dict__[name])
    return new


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


MODULE_RULES: dict[type[nn.Module], ModuleRule] = {}


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


def modules_under_fsdp(model: nn.Module) -> set[nn.Module]:
    """The modules whose parameters ``fully_shard`` (FSDP2) shards and gathers."""
    units = [
        m for m in model.modules() if any([b.__name__ == "FSDPModule" for b in type(m).__mro__])
    ]
    return {module for unit in units for module in unit.modules()}


def own_config(module: nn.Module) -> Float8LinearConfig | None:
    """The config of a converted layer or of converted experts, or None for other modules."""
    return module.float8_config if isinstance(module, Float8Module) else None


def modules_by_name(model: nn.Module, kind: Any = nn.Module) -> list[tuple[str, Any]]:
    """Each module of a type, or of several types, once, in alphabetical order of the names.

    A module with several names gets the first of them. The list does not depend on the order of
    registration. Names leave out the wrappers of compilation and checkpointing, in which ranks may
    differ.
    """
    named = [
        (name_in_model(fqn), module)
        for fqn, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, kind)
    ]
    found, seen = [], set()
    for name, module in sorted(named, key=lambda item: item[0]):
        if id(module) not in seen:
            seen.add(id(module))
            found.append((name, module))
    return found


# Of torch.compile, FSDP1, checkpoint_wrapper and Lightning's Fabric.
_WRAPPERS = {
    "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module",
}  # fmt: skip


def name_in_model(fqn: str) -> str:
    """A module's name without the parts that wrappers add."""
    return ".".join([part for part in fqn.split(".") if part not in _WRAPPERS])
