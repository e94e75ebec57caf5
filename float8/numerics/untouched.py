"""`untouched`: run a model as often as a question needs, and leave it as it was.

Gradients wait aside and come back as the same objects; copies stand in for buffers (running
statistics, the records of delayed casts); the random numbers that follow are those that would
have followed; hooks that act on finished gradients (an optimizer that steps inside backward,
gradients held in float8) rest. What raises inside leaves no trace either. Compiled models run
eagerly meanwhile: their graphs know nothing of hooks that were added after them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside changes no gradient, buffer, mode or random state of ``model``."""
    with ExitStack() as stack:
        stack.enter_context(_same_random_numbers(model))
        stack.enter_context(_same_gradients(model))
        stack.enter_context(_same_buffers(model))
        stack.enter_context(_same_modes(model))
        if "torch._dynamo" in sys.modules:  # nothing was compiled without it
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def seed_everything(seed: int, model: nn.Module | None = None) -> None:
    """The same dropout masks for every run that starts from here.

    Args:
        seed: of torch, Python and NumPy.
        model: its modules' own ``torch.Generator`` attributes are seeded too.
    """
    # Not torch.manual_seed: it would seed a CUDA that nobody has started yet, for good.
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
def _same_random_numbers(model: nn.Module) -> Iterator[None]:
    # All devices, whatever the model's: all are seeded.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    own = [(generator, generator.get_state()) for generator in _generators(model)]
    python = random.getstate()
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for generator, state in own:
            generator.set_state(state)
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)


@contextmanager
def _same_gradients(model: nn.Module) -> Iterator[None]:
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    hooks = [
        (own, dict(own))
        for parameter, _ in kept
        if (own := parameter._post_accumulate_grad_hooks) is not None
    ]
    for parameter, _ in kept:
        parameter.grad = None
    for own, _ in hooks:
        own.clear()
    try:
        yield
    finally:
        for own, saved in hooks:
            own.update(saved)
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    kept = [
        (module, dict(module._buffers), set(module._non_persistent_buffers_set))
        for module in model.modules()
    ]
    # Copies in their places, not the bits put back: a graph that waits for its backward may have
    # saved the buffers, and would notice. What is one buffer stays one.
    copies: dict[int, Tensor] = {}
    try:
        for module, buffers, _ in kept:
            for name, buffer in buffers.items():
                if buffer is not None:
                    if id(buffer) not in copies:
                        copies[id(buffer)] = buffer.detach().clone()
                    module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, buffers, not_saved in kept:  # those that a forward has added go
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(not_saved)


@contextmanager
def _same_modes(model: nn.Module) -> Iterator[None]:
    kept = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in kept:
            module.training = training
