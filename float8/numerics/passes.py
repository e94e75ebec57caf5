"""One forward and backward of a model on one batch, without a lasting change to the model.

**The batch.** `run_model` runs ``model(**batch)`` for a mapping, ``model(*batch)`` for a tuple or a
list, and ``model(batch)`` for anything else. Tensors of an output are found in tuples, lists,
mappings and dataclasses (the outputs of Transformers are both).

**Where backward starts.** In this order: at the value of ``loss_fn(output)``; at ``output.loss`` or
``output["loss"]``; at the output itself if it is a scalar; at the first floating point tensor of
the output times a random cotangent drawn from the seed. It is random because many errors of a
backward cancel under a constant cotangent, such as that of ``sum()``.

Tensors of a batch that require a gradient get it on copies. Parameters that ``loss_fn`` reads and
that are not the model's keep the gradients that they get.

**No lasting change.** Inside `model_unchanged` gradients are set aside and come back as the same
objects, copies stand in for buffers (running statistics, the records of delayed casts), random
states are restored, and hooks on finished gradients (an optimizer that steps inside backward,
gradients held in float8) do not run. Compiled models run eagerly inside it: compiled graphs do not
call hooks that were added later.

**The result** is a `RunResult`: output, loss and gradients. A `LayerObserver` passes on the outputs
and input gradients of single layers meanwhile. `Noise` compares two computations of one quantity.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8.arguments import check_function, check_module
from float8.kernels.sqnr import decibels, power
from float8.linear.switch import Float8Module, switched_off
from float8.tensor import Float8Tensor

LossFn = Callable[[Any], Tensor]


def check_run(model: object, loss_fn: object, caller: str) -> None:
    """Raise TypeError unless these are a module, and a function or None."""
    check_module(model, caller)
    if loss_fn is not None:
        check_function(loss_fn, caller, "loss_fn")


def has_other_ranks() -> bool:
    """Whether other ranks run too: a rank that stopped early would leave them waiting."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# --- batches and outputs


def local_part(value: Tensor) -> Tensor:
    """This rank's part of a DTensor; a sparse tensor with its zeros."""
    # By name: DTensor takes long to import.
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.to_dense() if value.is_sparse else value


def run_model(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a nested structure, in its order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):  # before dataclasses: a mapping leaves out fields that are None
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors_of(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for item in fields(tree):
            yield from tensors_of(getattr(tree, item.name))


def own_batch(batch: Any) -> Any:
    """A deep copy of a batch: gradients and writes in place do not reach the caller's."""
    copies = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in tensors_of(batch)}
    return copy.deepcopy(batch, copies)  # the tensors it has to copy are given


def main_tensor(output: Any) -> Tensor:
    """The first floating point tensor of an output that is not a scalar, or the first scalar.

    Raises:
        TypeError: there is none.
    """
    found = [t for t in tensors_of(output) if t.is_floating_point()]
    if not found:
        raise TypeError(
            f"the model returned a {type(output).__name__} without a floating point tensor: there "
            "is nothing to measure"
        )
    return next((t for t in found if t.numel() != 1), found[0])


class BackwardStart(NamedTuple):
    """A tensor and its cotangent, None for a scalar (the loss)."""

    tensor: Tensor
    cotangent: Tensor | None

    @property
    def loss(self) -> float | None:
        """The loss, if there is one."""
        return float(self.tensor.detach()) if self.cotangent is None else None

    def backward(self) -> bool:
        """Run backward; False if nothing requires a gradient."""
        if not self.tensor.requires_grad:
            return False
        self.tensor.backward(self.cotangent)
        return True


def start_of_backward(output: Any, loss_fn: LossFn | None, seed: int) -> BackwardStart:
    """Where the backward of an output starts; see the top of this file.

    The random cotangent of a seed is the same on every device.

    Raises:
        TypeError: ``loss_fn`` did not return a scalar tensor.
    """
    if loss_fn is not None:
        return BackwardStart(_checked_loss(loss_fn(output)), None)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return BackwardStart(loss, None)
    main = main_tensor(output)
    if main.numel() == 1:
        return BackwardStart(main, None)
    generator = torch.Generator().manual_seed(seed)
    return BackwardStart(main, torch.randn(main.shape, generator=generator).to(main))


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r}"
        raise TypeError(f"loss_fn must return a scalar tensor, the loss of the output; got {what}")
    return loss


# --- no lasting change


@contextmanager
def model_unchanged(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, modes and random states of ``model`` when the block ends."""
    with ExitStack() as stack:
        stack.enter_context(_random_numbers_restored(model))
        stack.enter_context(_gradients_restored(model))
        stack.enter_context(_buffers_restored(model))
        stack.enter_context(_modes_restored(model))
        if "torch._dynamo" in sys.modules:  # nothing was compiled without it
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def seed_everything(seed: int, model: nn.Module | None = None) -> None:
    """Seed torch, Python, NumPy, and the ``torch.Generator`` attributes of a model's modules.

    Runs that start from one seed have the same dropout masks.
    """
    # Not torch.manual_seed: it would also seed a CUDA that is not initialised yet, for good.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    for generator in _generators(model):
        generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _generators(model: nn.Module | None) -> list[torch.Generator]:
    modules = () if model is None else model.modules()
    return [g for m in modules for g in vars(m).values() if isinstance(g, torch.Generator)]


@contextmanager
def _random_numbers_restored(model: nn.Module) -> Iterator[None]:
    # All devices, also for a model on the CPU: `seed_everything` seeds them all.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    states = [(generator, generator.get_state()) for generator in _generators(model)]
    python = random.getstate()
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)


@contextmanager
def _gradients_restored(model: nn.Module) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    hooks = [
        (own, dict(own))
        for parameter, _ in gradients
        if (own := parameter._post_accumulate_grad_hooks) is not None
    ]
    for parameter, _ in gradients:
        parameter.grad = None
    for own, _ in hooks:
        own.clear()
    try:
        yield
    finally:
        for own, saved in hooks:
            own.update(saved)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def _buffers_restored(model: nn.Module) -> Iterator[None]:
    saved = [
        (module, dict(module._buffers), set(module._non_persistent_buffers_set))
        for module in model.modules()
    ]
    # Copies replace the buffers, because restoring the bits in place would disturb a graph that has
    # saved the buffers for a backward. Two names of one buffer get one copy.
    copies: dict[int, Tensor] = {}
    try:
        for module, buffers, _ in saved:
            for name, buffer in buffers.items():
                if buffer is not None:
                    if id(buffer) not in copies:
                        copies[id(buffer)] = buffer.detach().clone()
                    module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, buffers, not_persistent in saved:  # which removes those that a forward added
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(not_persistent)


@contextmanager
def _modes_restored(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


# --- results


@dataclass
class Noise:
    """Sums over the elements of a reference, and of another value for the same quantity."""

    signal: float = 0.0
    noise: float = 0.0
    is_comparable: bool = True

    def add(self, reference: Tensor | None, other: Tensor | None) -> None:
        """Add two tensors of one quantity; None stands for zeros."""
        if reference is None:
            self.noise += 0.0 if other is None else power(other)
        elif other is None:
            self.signal += power(reference)
            self.noise += power(reference)
        elif reference.shape != other.shape:  # tokens were routed differently
            self.is_comparable = False
        else:
            exact = reference.detach().to(other.device).double()
            self.signal += power(exact)
            self.noise += power(exact - other.detach())

    @property
    def sqnr(self) -> float | None:
        """In dB; None without a finite signal, -inf where the other value is not finite."""
        if not self.is_comparable or not self.signal or not math.isfinite(self.signal):
            return None
        return decibels(self.signal, self.noise)


def sqnr_of(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> float | None:
    """The SQNR of (reference, other) pairs as one vector; see `Noise`."""
    noise = Noise()
    for reference, other in pairs:
        noise.add(reference, other)
    return noise.sqnr


@dataclass
class RunResult:
    """The results of a forward and backward.

    Attributes:
        output: its main tensor.
        loss: None where backward started from a random cotangent.
        gradients: of every parameter by its id (of this rank's shards), and of the tensors of the
            batch that require one; empty where nothing requires a gradient.
    """

    output: Tensor
    loss: float | None
    gradients: dict[Any, Tensor] = field(default_factory=dict)

    def sqnr_of_output(self, other: RunResult) -> float | None:
        """The SQNR of another output against this one."""
        return sqnr_of([(self.output, other.output)])

    def sqnr_of_gradients(self, other: RunResult) -> float | None:
        """The SQNR of all gradients as one vector against these."""
        keys = self.gradients | other.gradients
        return sqnr_of((self.gradients.get(key), other.gradients.get(key)) for key in keys)

    @property
    def is_finite(self) -> bool:
        """Whether output and gradients are."""
        return all(bool(t.isfinite().all()) for t in (self.output, *self.gradients.values()))


def run_pass(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None,
    seed: int,
    observer: LayerObserver | None = None,
) -> RunResult:
    """Run a model forward and backward, inside `model_unchanged`."""
    seed_everything(seed, model)
    batch = own_batch(batch)
    if observer is not None:
        observer.in_forward = True
    output = run_model(model, batch)
    start = start_of_backward(output, loss_fn, seed)
    if observer is not None:
        observer.in_forward = False
    found = RunResult(local_part(main_tensor(output)).detach().clone(), start.loss)
    del output
    if not start.backward():
        return found
    for parameter in model.parameters():
        if parameter.grad is not None:
            found.gradients[id(parameter)] = local_part(parameter.grad)
            parameter.grad = None
    leaves = enumerate(tensors_of(batch))
    found.gradients |= {f"input {i}": t.grad for i, t in leaves if t.grad is not None}
    return found


@contextmanager
def only_in_float8(model: nn.Module, layers: Set[nn.Module]) -> Iterator[None]:
    """Switch all float8 modules of a model but ``layers`` to high precision."""
    others = [m for m in model.modules() if isinstance(m, Float8Module) and m not in layers]
    with switched_off(others):
        yield


class LayerObserver:
    """Passes on ``(layer, "output" | "grad_input", tensor)`` of layers while a model runs.

    The gradient of a layer's input is taken as it leaves the layer, before contributions of other
    layers that read the same tensor are added. A recomputation (activation checkpointing) is not
    passed on a second time.

    Args:
        layers: name -> module.
        receive: is called; the tensor may be written to after it returns.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], receive: Callable[[str, str, Tensor], None]
    ) -> None:
        self.layers = layers
        self.receive = receive
        self.in_forward = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Add the hooks for the time of a block."""
        with ExitStack() as stack:
            for name, layer in self.layers.items():
                self._attach(stack, name, layer)
            yield

    def _attach(self, stack: ExitStack, name: str, layer: nn.Module) -> None:
        def on_gradient(gradient: Tensor) -> None:
            self.receive(name, "grad_input", local_part(gradient))

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return with_gradient_hooks(args, kwargs, on_gradient)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self.in_forward:
                self.receive(name, "output", local_part(main_tensor(output)))

        # The last hook on the input and the first on the output, beside the user's own hooks.
        handles = (
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(after, prepend=True),
        )
        for handle in handles:
            stack.callback(handle.remove)


def with_gradient_hooks(
    args: tuple[Any, ...], kwargs: dict[str, Any], on_gradient: Callable[[Tensor], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, with ``on_gradient`` called with the gradient that each one gets.

    It is the gradient from this callee only, because the callee gets an alias of the tensor. There
    is no alias of tensors in lists, mappings and objects, to which the callee may write, or of an
    unknown type (DTensor): ``on_gradient`` gets the gradient from all readers of these.
    """
    aliases: dict[int, Tensor] = {}  # one for each tensor: attention compares its arguments

    def alias(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(alias(item) for item in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(alias(item) for item in value))
        if type(value) in (Tensor, nn.Parameter, Float8Tensor):
            if not value.requires_grad or not torch.is_grad_enabled():
                return value
            if id(value) not in aliases:
                aliases[id(value)] = value.view_as(value)
                aliases[id(value)].register_hook(on_gradient)
            return aliases[id(value)]
        for t in tensors_of(value):
            if t.grad_fn is not None and torch.is_grad_enabled():  # a leaf would keep the hook
                t.register_hook(on_gradient)
        return value

    return alias(args), {name: alias(value) for name, value in kwargs.items()}
