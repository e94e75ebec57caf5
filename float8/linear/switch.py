"""Modules that leave float8, and the threads that have switched them off.

`float8.high_precision` opens a `Scope`. A forward asks ``module.high_precision``, a bool per module
and thread: what one thread evaluates changes nothing of what another one computes. It is kept in a
``threading.local`` and not in a ContextVar, because torch.compile (2.11 to 2.13) guards on an
attribute of the first, read in the thread that calls, and cannot trace the second.

**Recomputation.** Activation checkpointing runs a part of the forward again during backward: later,
when the scope may have ended, and on a GPU in one of autograd's own threads.
`torch.utils.checkpoint` restores autocast and random state for that, and takes nothing more from
outside. So the first scope of a process wraps the two places where it keeps the function of a
region: the recomputation of every later region runs under the scopes that were open where that
region began.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import checkpoint

from float8.config import Float8LinearConfig

# Re-entrant: garbage collection may close the scope of an abandoned generator at any time.
_LOCK = threading.RLock()


class Switch(threading.local):
    """The scopes that each thread has open, and whether that is any: what forward reads.

    Every thread starts with ``scopes``.
    """

    def __init__(self, scopes: frozenset[Scope] = frozenset()) -> None:
        self.scopes = set(scopes)
        self.is_off = bool(scopes)  # torch.compile guards on it: one graph per value

    def __reduce__(self) -> tuple[type[Switch], tuple[()]]:
        """The state of copies and pickles, which are outside of any `high_precision` context."""
        return Switch, ()


_THREAD = Switch()  # every scope of a thread, whatever its modules


class Switchable(nn.Module):
    """Abstract: a module that runs in high precision where a thread has switched float8 off."""

    switch: Switch
    # Set by `float8.integrations.conversion`: leave float8 in eval mode without gradients.
    evaluates_in_high_precision: bool = False

    def _add_switch(self) -> None:
        self.switch = Switch()

    @property
    def high_precision(self) -> bool:
        """Whether the module runs without float8 now, in the calling thread."""
        return self.switch.is_off or (
            self.evaluates_in_high_precision and not (self.training or torch.is_grad_enabled())
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of a module that was pickled before there were switches."""
        super().__setstate__(state)
        self._add_switch()

    def _replicate_for_data_parallel(self) -> Any:
        """``nn.DataParallel`` runs replicas in threads of its own, for the one that calls it."""
        replica: Any = super()._replicate_for_data_parallel()
        replica.switch = Switch(frozenset(self.switch.scopes))
        return replica


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


def switchable_parts(model: nn.Module) -> list[HasSwitch]:
    """The parts of a model that `float8.high_precision` switches off: layers and transforms."""
    layers = [module for module in model.modules() if isinstance(module, Switchable)]
    # Of the models that `float8.unit_scaling.transforms` returns.
    transforms = [getattr(module, "float8_products", None) for module in model.modules()]
    return [*layers, *(t for t in transforms if t is not None)]


class Scope:
    """Modules that one thread runs in high precision, from `open` to `close`."""

    def __init__(self, modules: Iterable[HasSwitch]) -> None:
        self.modules = tuple(modules)
        self.is_open = False
        self._switches: list[dict[str, Any]] = []

    def open(self) -> None:
        """Begin, in the calling thread."""
        # The attributes that this thread has of each switch: another thread may close the scope,
        # as where it finishes a generator that this one has begun.
        self._switches = [vars(_THREAD), *(vars(module.switch) for module in self.modules)]
        self.is_open = True
        self.resume()

    def close(self) -> None:
        """End, in any thread; once is enough."""
        self.is_open = False
        self.suspend()
        self._switches = []

    def suspend(self) -> None:
        """Take effect no more, until `resume`."""
        with _LOCK:
            for switch in self._switches:
                switch["scopes"].discard(self)
                switch["is_off"] = bool(switch["scopes"])

    def resume(self) -> None:
        """Take effect again, if not closed since."""
        with _LOCK:
            if self.is_open:
                for switch in self._switches:
                    switch["scopes"].add(self)
                    switch["is_off"] = True


@contextmanager
def switched_off(modules: Iterable[HasSwitch]) -> Iterator[None]:
    """Run modules in high precision, in this thread; contexts may nest and overlap."""
    if torch.compiler.is_compiling():  # it traces attributes only; a graph is in one thread
        switches = [(module.switch, module.switch.is_off) for module in modules]
        for switch, _ in switches:
            switch.is_off = True
        try:
            yield
        finally:
            for switch, was_off in switches:
                switch.is_off = was_off
        return
    _carry_scopes_into_recomputations()
    scope = Scope(modules)
    try:
        scope.open()
        yield
    finally:
        scope.close()


@contextmanager
def _under(scopes: frozenset[Scope]) -> Iterator[None]:
    """Run under exactly these scopes, which may be another thread's or closed by now."""
    now = frozenset(_THREAD.scopes)
    suspended = now - scopes
    again = [Scope(scope.modules) for scope in scopes - now]
    try:
        for scope in suspended:
            scope.suspend()
        for scope in again:
            scope.open()
        yield
    finally:
        for scope in again:
            scope.close()
        for scope in suspended:
            scope.resume()


def _carry_scopes_into_recomputations() -> None:
    """Once per process; composes with whatever else has wrapped these."""
    with _LOCK:
        if getattr(checkpoint, "_float8_carries_scopes", False):
            return
        checkpoint._float8_carries_scopes = True  # type: ignore[attr-defined]
        reentrant = checkpoint.CheckpointFunction.forward
        frame = checkpoint._CheckpointFrame.__init__

    def forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        return reentrant(ctx, _under_scopes_of_now(run_function), *args)

    def init(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        frame(self, _under_scopes_of_now(recompute_fn), *args, **kwargs)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    checkpoint._CheckpointFrame.__init__ = init  # type: ignore[method-assign]


def _under_scopes_of_now(function: Callable[..., Any]) -> Callable[..., Any]:
    scopes = frozenset(_THREAD.scopes)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _under(scopes):
            return function(*args, **kwargs)

    return run
