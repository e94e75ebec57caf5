"""How a model is run on a batch, what stays as it was, and what the walk over it sees."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from assertions import assert_sqnr_at_least
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from float8.numerics import passes


@dataclass
class Plain:
    name: str
    logits: Tensor
    loss: Tensor | None = None


@pytest.mark.parametrize(
    "output",
    [
        OrderedDict(loss=torch.tensor(5.0), logits=torch.ones(2)),
        Plain("x", torch.ones(2), torch.tensor(5.0)),
        torch.tensor([5.0]),
    ],
)
def test_backward_starts_from_the_loss_where_there_is_one(output):
    assert passes.start_of_backward(output, None, 0) == (torch.tensor(5.0), None)
    if not isinstance(output, Tensor):
        assert torch.equal(passes.main_tensor(output), torch.ones(2))


def test_an_optimizer_inside_backward_does_not_step():
    model, steps = nn.Linear(8, 8), []
    model.weight.register_post_accumulate_grad_hook(steps.append)
    with passes.model_unchanged(model):
        model(torch.randn(4, 8)).sum().backward()
    assert steps == []
    model(torch.randn(4, 8)).sum().backward()
    assert len(steps) == 1


class Keeps(nn.Module):
    """Makes buffers when it is called first, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filled_later", None)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self) -> float:
        self.filled_later = torch.ones(2)
        self.register_buffer("new", torch.ones(3), persistent=False)
        return float(torch.rand((), generator=self.generator))


def draw(model: Keeps) -> tuple[float, ...]:
    return float(torch.rand(())), random.random(), float(np.random.rand()), model()


def test_numbers_that_are_drawn_and_buffers_that_a_forward_makes_are_as_before():
    model = Keeps()
    model.register_buffer("twice", torch.zeros(2))
    model.register_buffer("once_more", model.twice)
    buffers = dict(model._buffers)
    with passes.model_unchanged(model):
        first = draw(model)
        model.eval()
        model.twice += 1
        assert torch.equal(model.once_more, torch.ones(2))
    assert model.training and not model._non_persistent_buffers_set
    assert model._buffers.keys() == buffers.keys() and not model.twice.any()
    assert draw(model) == first


class Shared(nn.Module):
    """A layer called twice, and an input that two layers read; recomputed on request."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.how = nn.Linear(16, 16), nn.Linear(16, 16), how

    def inner(self, x):
        return self.b(self.a(x)) + self.b(x)

    def forward(self, x):
        x = x * 1
        if self.how == "plain":
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_the_walk_sees_every_call_once_and_its_own_modules_gradients(how):
    model = Shared(how).double()
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    outputs, gradients = {"a": [], "b": []}, {"a": [], "b": []}

    def leave(name, module, args, kwargs, output):
        if passes.in_forward():
            outputs[name].append(output)

    def enter(name, module, args, kwargs):
        return passes.with_gradient_hooks(args, kwargs, gradients[name].append)

    g = torch.randn(4, 16, dtype=torch.float64)
    with passes.watched({"a": model.a, "b": model.b}, leave, enter):
        found = passes.run_pass(model, x, lambda out: (out * g).sum(), 0)
    a, b = model.a.weight.detach(), model.b.weight.detach()
    assert [len(calls) for calls in (outputs["a"], outputs["b"], gradients["a"])] == [1, 2, 1]
    assert_sqnr_at_least(gradients["a"][0], g @ b @ a, 250, how)  # in float64
    for gradient in gradients["b"]:
        assert_sqnr_at_least(gradient, g @ b, 250, how)
    assert_sqnr_at_least(found.gradients["input 0"], g @ b @ a + g @ b, 250, how)
    assert not model.a._forward_hooks and not model.a._forward_pre_hooks
