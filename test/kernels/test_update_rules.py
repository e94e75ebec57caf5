"""The update rules are those of torch.optim and of Lion's paper."""

from __future__ import annotations

import math

import pytest
import torch
from shapes import pairs

from float8.kernels.update_rules import AdamWRule, LionRule, SGDMomentumRule


def torch_optimizer(kind, p, grads, **options):
    optimizer = kind([p], **options)
    for g in grads:
        p.grad = g
        optimizer.step()
    return p.detach(), optimizer.state[p]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_adam_is_torchs(kind, as_tensors, maximize):
    generator = torch.Generator().manual_seed(2)
    p, *grads = torch.randn(6, 5, 7, generator=generator)
    options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
    expected, state = torch_optimizer(
        kind, p.clone().requires_grad_(), grads, **options, maximize=maximize, foreach=False
    )
    m = v = torch.zeros_like(p)
    for i, g in enumerate(grads):
        lr, step = (torch.tensor(0.01), torch.tensor(i + 1.0)) if as_tensors else (0.01, i + 1)
        decoupled = kind is torch.optim.AdamW
        rule = AdamWRule(lr, 0.8, 0.9, 1e-3, 0.1, decoupled, maximize)
        p, m, v = rule.update(step, p, g, m, v)
    for found, wanted in ((p, expected), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-7)


@pairs(
    nesterov=(False, True), dampening=(0.0, 0.3), as_tensors=(False, True), maximize=(False, True)
)
def test_sgd_is_torchs(nesterov, dampening, as_tensors, maximize):
    dampening = 0.0 if nesterov else dampening
    p, *grads = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(3))
    options = {"momentum": 0.9, "dampening": dampening, "nesterov": nesterov}
    options |= {"weight_decay": 0.1, "maximize": maximize}
    expected, _ = torch_optimizer(
        torch.optim.SGD, p.clone().requires_grad_(), grads, lr=0.01, **options, foreach=False
    )
    m = torch.zeros_like(p)
    for i, g in enumerate(grads):
        lr, step = (torch.tensor(0.01), torch.tensor(i + 1.0)) if as_tensors else (0.01, i + 1)
        p, m = SGDMomentumRule(lr, **options).update(step, p, g, m)
    torch.testing.assert_close(p, expected, rtol=2e-6, atol=2e-7)


def test_lion_is_the_papers():
    """arXiv 2302.06675, algorithm 2, in float64."""
    p, m, *grads = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(4))
    exact_p, exact_m = p.double(), m.double()
    for g in grads:
        p, m = LionRule(0.01, 0.9, 0.99, 0.1).update(1, p, g, m)
        update = (0.9 * exact_m + 0.1 * g.double()).sign() + 0.1 * exact_p
        exact_p, exact_m = exact_p - 0.01 * update, 0.99 * exact_m + 0.01 * g.double()
    torch.testing.assert_close(p.double(), exact_p, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(m.double(), exact_m, rtol=1e-5, atol=1e-6)
    nan = torch.tensor([math.nan, 1.0])
    p, m = LionRule(0.1, 0.9, 0.9, 0.0).update(1, p[0, :2], nan, m[0, :2])
    assert p.isnan().tolist() == m.isnan().tolist() == [True, False]
