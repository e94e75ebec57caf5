"""One forward and backward of a model with a chosen few of its layers in float8.

`run_pass` gives what comparisons are made of: the output, the loss, the gradients. A `Watch` hands
on what single layers compute meanwhile, so that one pass can keep it and another be held against
it. `Noise` is how two computations of one thing are compared::

    SQNR = 10 log10( sum reference^2 / sum (reference - other)^2 )       in dB, sums in float64

The gradient of a layer's input is taken where it enters the layer, before the contributions of
other layers that read the same tensor are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from float8.linear.switch import Float8Module, switched_off
from float8.numerics.batches import (
    LossFn,
    local,
    main_tensor,
    own_batch,
    run_model,
    start_of,
    tensors_of,
)
from float8.numerics.untouched import seed_everything
from float8.tensor import Float8Tensor

Sink = Callable[[str, str, Tensor], None]


@dataclass
class Noise:
    """Sums over the elements of a reference and of what should equal it."""

    signal: float = 0.0
    noise: float = 0.0
    is_comparable: bool = True

    def add(self, reference: Tensor | None, other: Tensor | None) -> None:
        """Take in two tensors of one meaning; None stands for zeros."""
        if reference is None:
            self.noise += 0.0 if other is None else _power(other)
        elif other is None:
            self.signal += _power(reference)
            self.noise += _power(reference)
        elif reference.shape != other.shape:  # tokens were routed in another way
            self.is_comparable = False
        else:
            exact = reference.detach().to(other.device).double()
            self.signal += _power(exact)
            self.noise += _power(exact - other.detach())

    @property
    def decibels(self) -> float | None:
        """The SQNR; None without a finite signal, -inf where the other is not finite."""
        if not self.is_comparable or not self.signal or not math.isfinite(self.signal):
            return None
        if not math.isfinite(self.noise):
            return -math.inf
        return 10 * math.log10(self.signal / self.noise) if self.noise else math.inf


def _power(x: Tensor) -> float:
    return float(x.detach().double().square().sum())


@dataclass
class Pass:
    """What a forward and backward gave.

    Attributes:
        output: its main tensor.
        loss: None where backward started from a random cotangent.
        gradients: of every parameter (of this rank's shards), and of the batch's tensors that
            require one; empty where nothing asks for a gradient.
    """

    output: Tensor
    loss: float | None
    gradients: dict[Any, Tensor] = field(default_factory=dict)

    def sqnr_of_output(self, other: Pass) -> float | None:
        """Of another pass's output, against this one's."""
        noise = Noise()
        noise.add(self.output, other.output)
        return noise.decibels

    def sqnr_of_gradients(self, other: Pass) -> float | None:
        """Of all gradients as one vector."""
        noise = Noise()
        for key in self.gradients | other.gradients:
            noise.add(self.gradients.get(key), other.gradients.get(key))
        return noise.decibels

    @property
    def is_finite(self) -> bool:
        """Whether output and gradients are."""
        return all(bool(t.isfinite().all()) for t in (self.output, *self.gradients.values()))


def run_pass(
    model: nn.Module, batch: Any, loss_fn: LossFn | None, seed: int, watch: Watch | None = None
) -> Pass:
    """Run a model forward and backward, as `float8.numerics.batches` says, inside `untouched`."""
    seed_everything(seed, model)
    batch = own_batch(batch)
    if watch is not None:
        watch.in_forward = True
    output = run_model(model, batch)
    start = start_of(output, loss_fn, seed)
    if watch is not None:
        watch.in_forward = False
    found = Pass(local(main_tensor(output)).detach().clone(), start.loss)
    del output
    if not start.backward():
        return found
    for parameter in model.parameters():
        if parameter.grad is not None:
            found.gradients[id(parameter)] = local(parameter.grad)
            parameter.grad = None
    leaves = enumerate(tensors_of(batch))
    found.gradients |= {f"input {i}": t.grad for i, t in leaves if t.grad is not None}
    return found


@contextmanager
def only_in_float8(model: nn.Module, layers: Set[nn.Module] | None) -> Iterator[None]:
    """All of a model's float8 modules but ``layers`` in high precision; None: all in float8."""
    others: list[Float8Module] = []
    if layers is not None:
        others = [m for m in model.modules() if isinstance(m, Float8Module) and m not in layers]
    with switched_off(others):
        yield


class Watch:
    """Hands on ``(layer, "output" | "grad_input", tensor)`` of layers while a model runs.

    A recomputation (activation checkpointing) is not handed on a second time.

    Args:
        layers: name -> module.
        sink: what is called; the tensor may be written to after it returns.
    """

    def __init__(self, layers: Mapping[str, nn.Module], sink: Sink) -> None:
        self.layers = layers
        self.sink = sink
        self.in_forward = False

    @contextmanager
    def open(self) -> Iterator[Watch]:
        """Add the hooks, and take them away again."""
        with ExitStack() as stack:
            for name, layer in self.layers.items():
                self._attach(stack, name, layer)
            yield self

    def _attach(self, stack: ExitStack, name: str, layer: nn.Module) -> None:
        def seen_gradient(gradient: Tensor) -> None:
            self.sink(name, "grad_input", local(gradient))

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return tapped(args, kwargs, seen_gradient)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self.in_forward:
                self.sink(name, "output", local(main_tensor(output)))

        # The last to see the input and the first to see the output, beside the user's own hooks.
        handles = (
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(after, prepend=True),
        )
        for handle in handles:
            stack.callback(handle.remove)


def tapped(
    args: tuple[Any, ...], kwargs: dict[str, Any], seen: Callable[[Tensor], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, with ``seen`` called with each one's gradient as it leaves the callee.

    Other readers of a tensor have no part in it, except of those in lists, mappings and objects,
    which stay what they are because the callee may write to them, and of tensors of a type that is
    not known here (DTensor): these give the gradient of all readers.
    """
    aliases: dict[int, Tensor] = {}  # what is one tensor stays one: attention asks for that

    def tap(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(tap(item) for item in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(tap(item) for item in value))
        if type(value) in (Tensor, nn.Parameter, Float8Tensor):
            if not value.requires_grad or not torch.is_grad_enabled():
                return value
            if id(value) not in aliases:
                aliases[id(value)] = value.view_as(value)
                aliases[id(value)].register_hook(seen)
            return aliases[id(value)]
        for t in tensors_of(value):
            if t.grad_fn is not None and torch.is_grad_enabled():  # a leaf would keep the hook
                t.register_hook(seen)
        return value

    return tap(args), {name: tap(value) for name, value in kwargs.items()}
