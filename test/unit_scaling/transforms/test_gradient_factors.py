"""Residual layers have the gradients of hand-written splits; bridges are found as defined."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling import functional as U
from float8.unit_scaling.core.functional import transformer_residual_scaling_rule
from float8.unit_scaling.scale import scale_bwd, scale_fwd
from float8.unit_scaling.transforms.unit_scale import unit_scale

WIDTH = 6
tau = transformer_residual_scaling_rule()


class Layers(nn.Module):
    """Four linear layers for a function to put together; a transform sees what it calls."""

    def __init__(self, body):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4))
        self.body = body

    def forward(self, x):
        return self.body(x, *self.layers)


def add_(x, a):
    x = x * 1
    h = a(x)
    h += x
    return h


def in_place_method(x, a):
    h = a(x)
    h.add_(x)
    return h


ONE_LAYER = {
    "x + f(x)": lambda x, a, *_: x + a(x),
    "f(x) + x": lambda x, a, *_: a(x) + x,
    "torch.add by keyword": lambda x, a, *_: torch.add(other=a(x), input=x),
    "+=": lambda x, a, *_: add_(x, a),
    "add_ for its effect": lambda x, a, *_: in_place_method(x, a),
    "dropout of the branch": lambda x, a, *_: x + F.dropout(a(x), 0.5, training=False),
    "another view of x": lambda x, a, *_: (x.t() + a(x).t()).t(),
    "the branch reads a view": lambda x, a, *_: x + a(x.t().mT),
    "two reads in the branch": lambda x, a, b, *_: x + a(x) * b(x),
}


def one_layer(x, layers, product=False):
    residual, skip = U.residual_split(x, tau(0, 1))
    branch = linear(residual, layers[0])
    if product:
        branch = branch * linear(residual, layers[1])
    return U.residual_add(branch, skip, tau(0, 1))


def linear(x, layer):
    return U.linear(x, layer.weight, layer.bias)


def results(model, x, grad):
    """Output and all gradients."""
    x = x.clone().requires_grad_()
    out = model(x)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(out, [x, *parameters], grad, allow_unused=True)
    return [out.detach(), *(torch.zeros(()) if g is None else g for g in found)]


def assert_same_numbers(body, by_hand):
    model = unit_scale(Layers(body))
    hand = Layers(lambda x, *layers: by_hand(x, layers))
    hand.load_state_dict(model.state_dict())
    x, grad = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    expected = results(hand, x, grad)
    torch.testing.assert_close(results(model, x, grad), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spelling", ONE_LAYER)
def test_every_spelling_of_a_residual_layer_splits_and_adds(spelling):
    product = spelling == "two reads in the branch"
    assert_same_numbers(ONE_LAYER[spelling], lambda x, layers: one_layer(x, layers, product))


def test_parallel_branches_may_share_a_norm():
    def body(x, a, b, *_):
        n = F.layer_norm(x, (WIDTH,))
        return x + a(n) + b(n)

    def by_hand(x, layers):  # one residual layer with the two branches as one, equally weighted
        first, second = tau(0, 2), tau(1, 2)
        weight = second / (1 + second**2) ** 0.5
        kept = 1 / ((1 + first**2) * (1 + second**2)) ** 0.5
        n = U.layer_norm(scale_bwd(x, weight), (WIDTH,))
        skip = scale_bwd(x, kept)
        branches = linear(n, layers[0]) + linear(n, layers[1])
        return scale_fwd(branches, weight) + scale_fwd(skip, kept)

    assert_same_numbers(body, by_hand)


class TwoInputs(Layers):
    """A decoder reads a memory, in every layer."""

    def forward(self, x, memory):
        return self.body(x, memory, *self.layers)


def grads_of_both(model, x, memory, grad):
    x, memory = x.clone().requires_grad_(), memory.clone().requires_grad_()
    out = model(x, memory)
    return [
        out.detach(), *torch.autograd.grad(out, [x, memory, *model.parameters()], grad,
                                           allow_unused=True)
    ]  # fmt: skip


def cross_attends(x, memory, a, b, c, _):
    memory = memory + F.silu(a(memory))
    x = x + b(x) * c(memory.view(5, WIDTH))
    return x + c(x) * b(memory)


def private_memory(x, memory, a, b, c, _):
    keys, values = torch.cat([a(memory), b(memory)], -1).chunk(2, -1)
    return x + c(x) * keys.t().t() * values


def nested_branch(x, memory, a, b, c, d):
    h = a(x)
    h = h + b(h) * c(x) * d(memory)
    return x + h


@pytest.mark.parametrize(
    ("body", "compiled"),
    [
        (cross_attends, False),
        (cross_attends, True),
        (private_memory, False),
        (nested_branch, False),
    ],
)
def test_gradients_of_other_activations_in_a_branch_are_the_derivatives(body, compiled):
    """All layers are square and all factors those of the output, so that gradients are exact."""
    model = unit_scale(TwoInputs(body))
    x, memory, grad, *directions = torch.randn(5, 5, WIDTH, dtype=torch.float64)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    found = grads_of_both(run, x, memory, grad)[1:3]
    step = 1e-6
    for position, (gradient, direction) in enumerate(zip(found, directions, strict=True)):
        ends = [[x, memory] for _ in range(2)]
        for end, sign in zip(ends, (1, -1), strict=True):
            end[position] = end[position] + sign * step * direction
        high, low = (model(*end).detach() for end in ends)
        numeric = ((high - low) * grad).sum() / 2 / step
        torch.testing.assert_close((gradient * direction).sum(), numeric, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_one_compiled_function_may_call_several_models_and_one_twice():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6, dtype=torch.float64)

        def forward(self, x):
            return x + F.silu(self.a(x)) @ self.a.weight.T

    one, other = unit_scale(Block()), unit_scale(Block())

    def both(x):
        return other(one(one(x)))

    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(both, backend="eager", fullgraph=True)
    mine, theirs = (torch.autograd.grad(run(x).square().sum(), x) for run in (compiled, both))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_an_addition_that_asks_for_another_factor_of_one_edge_is_a_plain_sum():
    """Another residual layer between the two changes the indices, and with them the factors."""

    def body(x, a, b, c, _):
        n = F.layer_norm(x, (WIDTH,))
        h = x + a(n)
        h = h + c(h)
        return h + b(n)

    def by_hand(x, layers):
        r, s = U.residual_split(x, tau(0, 2))
        n = U.layer_norm(r, (WIDTH,))
        h = U.residual_add(linear(n, layers[0]), s, tau(0, 2))
        r, s = U.residual_split(h, tau(1, 2))
        h = U.residual_add(linear(r, layers[2]), s, tau(1, 2))
        return U.add(h, linear(n, layers[1]))

    assert_same_numbers(body, by_hand)


# --- cut edges: bridges, against the definition
