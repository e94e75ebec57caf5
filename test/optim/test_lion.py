"""Lion against its algorithm in float64, and its training in 8 bits against float32 states."""

import torch
from optim_training import make, train
from torch import nn

from float8.optim import Lion


def lion64(p, g, m, lr, beta1, beta2, decay):
    """arXiv 2302.06675, algorithm 2."""
    c = beta1 * m + (1 - beta1) * g
    return p - lr * (c.sign() + decay * p), beta2 * m + (1 - beta2) * g


def test_with_float32_states_it_is_the_algorithm():
    p = nn.Parameter(torch.randn(5, 33))
    exact, m = p.detach().double(), torch.zeros(5, 33, dtype=torch.float64)
    optimizer = Lion([p], lr=0.01, betas=(0.8, 0.95), weight_decay=0.3)
    for _ in range(10):
        p.grad = torch.randn(5, 33)
        exact, m = lion64(exact, p.grad.double(), m, 0.01, 0.8, 0.95, 0.3)
        optimizer.step()
    torch.testing.assert_close(p.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), m, rtol=1e-5, atol=1e-6)


def test_a_training_ends_where_float32_states_end_it():
    losses = []
    for first in ("float8", "float32"):
        model = make()
        optimizer = Lion(model.parameters(), lr=1e-3, first_moment=first, min_size=64)
        losses.append(train(model, optimizer, 100))
    assert abs(losses[0] - losses[1]) < 0.02 * losses[1], losses
