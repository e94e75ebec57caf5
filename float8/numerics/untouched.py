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


def seed_everything(seed: int) -> None:
    """The same dropout masks for every run that starts from here."""
    torch.manual_seed(seed)
    random.seed(seed)


@contextmanager
def _same_random_numbers(model: nn.Module) -> Iterator[None]:
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    on_device = sorted(
        {d.index or 0 for d in devices if d.type not in ("cpu", "meta")},
    )
    kind = next((d.type for d in devices if d.type not in ("cpu", "meta")), "cuda")
    python = random.getstate()
    try:
        with torch.random.fork_rng(on_device, device_type=kind):
            yield
    finally:
        random.setstate(python)


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
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    # Copies in their places, not the bits put back: a graph that waits for its backward may have
    # saved the buffers, and would notice. What is one buffer stays one.
    copies: dict[int, Tensor] = {}
    try:
        for module, name, buffer in kept:
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
            module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer


@contextmanager
def _same_modes(model: nn.Module) -> Iterator[None]:
    kept = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in kept:
            module.training = training
