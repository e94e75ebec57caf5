"""Modules that leave float8.

A forward asks ``module.high_precision``. `float8.high_precision` sets the flag that it reads, for
all threads: autograd recomputes checkpointed regions in threads of its own. Such a region runs as
the model is then: call backward inside the context in which forward ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

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
        return next((t for t in self.transforms if hasattr(t, "switch")), None)


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
