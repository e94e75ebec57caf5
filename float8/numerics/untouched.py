"""`untouched`: run a model as often as a question needs, and leave it as it was.

Gradients wait aside and come back as the same objects; buffers (running statistics, the records of
delayed casts) get their bits back in place; the random numbers that follow are those that would
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
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, copy in kept:
                _restore(buffer, copy)
                module._buffers[name] = buffer


def _restore(buffer: Tensor, copy: Tensor) -> None:
    # Only where it differs: a graph that is waiting for its backward may have saved the buffer.
    if not torch.equal(buffer, copy):
        with torch.inference_mode(buffer.is_inference()):
            buffer.copy_(copy)


@contextmanager
def _same_modes(model: nn.Module) -> Iterator[None]:
    kept = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in kept:
            module.training = training
