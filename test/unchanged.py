"""The state of a model that a function which runs it must not change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from assertions import assert_bitwise
from torch import nn


@contextmanager
def assert_model_unchanged(model: nn.Module) -> Iterator[None]:
    """Check after a block that it changed no value, gradient, buffer, mode, hook or random state.

    Gradients and buffers must also be the same objects as before.
    """
    gradients = {name: p.grad for name, p in model.named_parameters()}
    buffers, modes = dict(model.named_buffers()), [m.training for m in model.modules()]
    values = {n: t.clone() for n, t in _tensors(model, gradients).items()}
    states = torch.get_rng_state(), random.getstate()
    yield
    now = {name: p.grad for name, p in model.named_parameters()}
    assert all(now[name] is gradient for name, gradient in gradients.items())
    assert all(b is buffers[name] for name, b in model.named_buffers())
    for name, value in _tensors(model, now).items():
        assert_bitwise(value, values[name], name)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert getattr(module, "high_precision", 0) == 0
    assert not any(p._backward_hooks for p in model.parameters())


def _tensors(
    model: nn.Module, gradients: dict[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    found = {f"gradient of {name}": g for name, g in gradients.items() if g is not None}
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **found}
