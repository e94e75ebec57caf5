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

**The result** is a `RunResult`: output, loss and gradients. `watched` is the walk over a model that
`inspect`, `compare`, `find_nan` and `calibrate` share: it calls functions with what enters and
leaves modules, and with the gradients of both.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from float8.arguments import check_function, check_module

LossFn = Callable[[Any], Tensor]


def check_run(model: object, loss_fn: object, caller: str) -> None:
    """Raise TypeError unless these are a module, and a function or None."""
    check_module(model, caller)
    if loss_fn is not None:
        check_function(loss_fn, caller, "loss_fn")


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


def start_of_backward(
    output: Any, loss_fn: LossFn | None, seed: int
) -> tuple[Tensor, Tensor | None]:
    """Where the backward of an output starts, and its cotangent; None for a scalar (the loss).

    The random cotangent of a seed is the same on every device.
    """
    if loss_fn is not None:
        return loss_fn(output), None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss, None
    main = main_tensor(output)
    if main.numel() == 1:
        return main, None
    generator = torch.Generator().manual_seed(seed)
    return main, torch.randn(main.shape, generator=generator).to(main)


# --- no lasting change


_STANCES: list[Any] = []  # of `runs_eagerly`: one for each open block


@contextmanager
def runs_eagerly() -> Iterator[None]:
    """Run compiled functions eagerly; the last of overlapping blocks restores the stance."""
    _STANCES.append(_STANCES[0] if _STANCES else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        stance = _STANCES.pop()
        if not _STANCES:
            stance.__exit__(None, None, None)


# What a forward may change of a module.
_STATE = "training", "_buffers", "_non_persistent_buffers_set"


@contextmanager
def model_unchanged(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, modes and random states of ``model`` when the block ends."""
    gradients = [(p, p.grad, p._post_accumulate_grad_hooks or {}) for p in model.parameters()]
    hooks = [(own, dict(own)) for _, _, own in gradients]
    modules = [(vars(m), {name: vars(m)[name] for name in _STATE}) for m in model.modules()]
    states = [(restore, read()) for read, restore, _ in _random_sources(model)]

    @cache  # two names of one buffer get one copy
    def copied(buffer: Tensor | None) -> Tensor | None:
        return None if buffer is None else buffer.detach().clone()

    with runs_eagerly():
        try:
            for parameter, _, own in gradients:
                parameter.grad = None
                own.clear()
            # Copies replace the buffers, because restoring the bits in place would disturb a graph
            # that has saved the buffers for a backward.
            for module, saved in modules:
                buffers = {name: copied(buffer) for name, buffer in saved["_buffers"].items()}
                not_persistent = set(saved["_non_persistent_buffers_set"])
                module |= {"_buffers": buffers, "_non_persistent_buffers_set": not_persistent}
            yield
        finally:
            for module, saved in modules:
                module.update(saved)
            for parameter, gradient, _ in gradients:
                parameter.grad = gradient
            for own, saved in hooks:
                own.update(saved)
            for restore, state in states:
                restore(state)


def _random_sources(model: nn.Module) -> list[tuple[Callable[..., Any], ...]]:
    """How to read, to restore and to seed torch, Python, NumPy, and generators of modules."""
    generators: list[Any] = [torch.default_generator]
    if torch.cuda.is_initialized():  # all devices, also for a model on the CPU
        generators += torch.cuda.default_generators
    for module in model.modules():
        generators += [g for g in vars(module).values() if isinstance(g, torch.Generator)]
    found: list[tuple[Callable[..., Any], ...]]
    found = [(g.get_state, g.set_state, g.manual_seed) for g in generators]
    found.append((random.getstate, random.setstate, random.seed))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        found.append((numpy.get_state, numpy.set_state, lambda seed: numpy.seed(seed % 2**32)))
    return found


# --- results


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


def run_pass(model: nn.Module, batch: Any, loss_fn: LossFn | None, seed: int) -> RunResult:
    """Run a model forward and backward, inside `model_unchanged`."""
    for _, _, start_from in _random_sources(model):
        start_from(seed)  # runs from one seed have the same dropout masks
    batch = own_batch(batch)
    output = run_model(model, batch)
    start, cotangent = start_of_backward(output, loss_fn, seed)
    loss = float(start.detach()) if cotangent is None else None
    found = RunResult(local_part(main_tensor(output)).detach().clone(), loss)
    del output
    if start.requires_grad:
        start.backward(cotangent)
        for parameter in model.parameters():
            if parameter.grad is not None:
                found.gradients[id(parameter)] = local_part(parameter.grad)
                parameter.grad = None
        leaves = enumerate(tensors_of(batch))
        found.gradients |= {f"input {i}": t.grad for i, t in leaves if t.grad is not None}
    return found


# --- the walk


def in_forward() -> bool:
    """Whether this is no recomputation (activation checkpointing), which backward runs."""
    return torch._C._current_graph_task_id() == -1


CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
Enter = Callable[[str, nn.Module, Any, Any], CallArguments | None]
Leave = Callable[[str, nn.Module, Any, Any, Any], Callable[[Tensor], None] | None]


@contextmanager
def watched(
    modules: Mapping[str, nn.Module], leave: Leave, enter: Enter | None = None
) -> Iterator[None]:
    """Call functions when modules are called, with their names, while the block is open.

    They see arguments after the user's own hooks, and outputs before them, of recomputations too.

    Args:
        modules: by name.
        leave: called with name, module, args, kwargs and the output, None if the module raised.
            What it returns is called with the gradient of each tensor of the output, unless it is
            None.
        enter: called with name, module, args and kwargs before a call; it may return others.
    """
    with ExitStack() as stack:

        def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            see = leave(name, module, args, kwargs, output)
            for value in tensors_of(output) if see is not None else ():
                # A leaf would keep the hook; a parameter that is returned has one of its own.
                if value.grad_fn is not None and torch.is_grad_enabled():
                    # Removed: a loss that is kept would keep what the function refers to.
                    stack.callback(value.register_hook(see).remove)

        for name, module in modules.items():
            if enter is not None:
                hook: Any = Hook(partial(enter, name))
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            hook = Hook(partial(after, name))
            # Also where a module raises and the module around it handles the exception.
            handle = module.register_forward_hook(
                hook, prepend=True, with_kwargs=True, always_call=True
            )
            stack.callback(handle.remove)
        yield


class Hook:
    """A hook; copies and pickles of a watched model have one that does nothing."""

    def __init__(self, call: Callable[..., Any] = lambda *args: None) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


def with_gradient_hooks(
    args: tuple[Any, ...], kwargs: dict[str, Any], on_gradient: Callable[[Tensor], None]
) -> CallArguments:
    """Arguments of which ``on_gradient`` is called with the gradient that each one gets.

    It is the gradient from this callee only, because the callee gets an alias of the tensor. No
    gradient is seen of tensors in lists, mappings and objects, to which the callee may write.
    """
    aliases: dict[int, Tensor] = {}  # one for each tensor: attention compares its arguments

    def alias(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(alias(item) for item in value)
        if not (isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()):
            return value
        if id(value) not in aliases:
            aliases[id(value)] = value.view_as(value)
            aliases[id(value)].register_hook(on_gradient)
        return aliases[id(value)]

    return alias(args), {name: alias(value) for name, value in kwargs.items()}
