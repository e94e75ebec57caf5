"""AdamW, Adam, SGD and Lion: with float32 states the usual ones, in 8 bits their trajectory."""

import pytest
import torch
from optim_training import make, sqnr_of_states, train
from torch import nn

from float8.optim import SGD, Adam, AdamW, Lion

FLOAT32 = {"first_moment": "float32", "second_moment": "float32"}
PAIRS = {
    "adamw": (AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    "adam": (Adam, torch.optim.Adam, {}),
    "adam with decay": (Adam, torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-6}),
    "maximize": (AdamW, torch.optim.AdamW, {"maximize": True, "betas": (0.8, 0.95)}),
    "sgd": (SGD, torch.optim.SGD, {"momentum": 0.9}),
    "damped": (SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.3}),
    "nesterov": (SGD, torch.optim.SGD, {"momentum": 0.7, "nesterov": True, "maximize": True}),
}


def in_float32(cls):
    """The options that keep every moment of an optimizer in float32."""
    return {name: FLOAT32[name] for name in cls.moment_options.values()}


@pytest.mark.parametrize("name", PAIRS)
def test_with_float32_states_it_is_torch(name):
    ours, theirs, options = PAIRS[name]
    a, b = make(), make()
    train(a, ours(a.parameters(), lr=1e-2, **options, **in_float32(ours)), 15)
    train(b, theirs(b.parameters(), lr=1e-2, **options), 15)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_with_float32_states_lion_is_the_papers():
    """arXiv 2302.06675, algorithm 2, in float64."""
    p = nn.Parameter(torch.randn(5, 33))
    exact, m = p.detach().double(), torch.zeros(5, 33, dtype=torch.float64)
    optimizer = Lion([p], lr=0.01, betas=(0.8, 0.95), weight_decay=0.3)
    for _ in range(10):
        p.grad = torch.randn(5, 33)
        g = p.grad.double()
        direction = (0.8 * m + 0.2 * g).sign() + 0.3 * exact
        exact, m = exact - 0.01 * direction, 0.95 * m + 0.05 * g
        optimizer.step()
    torch.testing.assert_close(p.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), m, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("cls", "options", "bound"),
    [
        (AdamW, {"lr": 3e-3}, 0.01),
        (AdamW, {"lr": 3e-3, "second_moment": "float16"}, 0.01),
        (SGD, {"lr": 0.1}, 0.01),
        (Lion, {"lr": 1e-3}, 0.02),
    ],
)
def test_a_training_ends_where_float32_states_end_it(cls, options, bound):
    """Within 1 % of the loss; Lion's signs amplify, and its bound is 2 %."""
    losses = []
    for given in (options, {**options, **in_float32(cls)}):
        model = make()
        losses.append(train(model, cls(model.parameters(), min_size=64, **given), 100))
        assert all(p.isfinite().all() for p in model.parameters())
    assert losses[1] < 0.6 * loss_at_start()
    assert abs(losses[0] - losses[1]) <= bound * losses[1], losses


def loss_at_start():
    model = make()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.0), 1)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_second_moment_that_was_not_zero_never_becomes_zero(rounding):
    p = nn.Parameter(torch.randn(8, 64))
    optimizer = AdamW([p], min_size=0, state_rounding=rounding, betas=(0.9, 0.5))
    p.grad = torch.randn(8, 64) * torch.exp(4 * torch.randn(8, 64))
    p.grad[0, 0], p.grad[3] = 0, 0  # lane 0, and whole groups
    alive = p.grad != 0
    optimizer.step()
    for step in range(60):  # v shrinks by 2^-60; single elements are fed
        p.grad = torch.zeros(8, 64)
        p.grad[1, 5] = 10.0**-step
        optimizer.step()
        v = optimizer.state[p]["exp_avg_sq"].dequantize()
        assert bool((v[alive] > 0).all()), step
        dead = ~alive
        dead[1, 5] = False
        assert not v[dead].any(), step
    assert p.isfinite().all()


def test_a_fading_second_moment_fades():
    """Every other gradient fades by 1 % a step: rounded to nearest its v stays where it was."""
    torch.manual_seed(1)
    std = torch.exp(torch.randn(8, 256))
    found = {}
    for rounding in ("nearest", "auto"):
        p = nn.Parameter(torch.zeros(8, 256))
        q = nn.Parameter(torch.zeros(8, 256))
        ours = AdamW([p], min_size=0, state_rounding=rounding, betas=(0.9, 0.99))
        exact = torch.optim.AdamW([q], betas=(0.9, 0.99))
        for step in range(300):
            g = torch.randn(8, 256) * std
            g[:, ::2] *= 0.98**step
            p.grad, q.grad = g, g.clone()
            ours.step()
            exact.step()
        v, e = ours.state[p]["exp_avg_sq"].dequantize(), exact.state[q]["exp_avg_sq"]
        found[rounding] = float((v / e)[:, ::2].log().mean().exp())
        assert sqnr_of_states(ours, exact, "exp_avg") > 25
        assert (p - q).norm() < {"nearest": 1.0, "auto": 0.3}[rounding] * q.norm()
    assert abs(found["auto"] - 1) < 0.25, found
    assert found["nearest"] > 1.5, f"no need to round at random any more: {found}"
