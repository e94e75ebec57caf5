"""A small training run for the tests of the optimizers, and the comparison after it."""

import torch
from assertions import assert_bitwise, sqnr
from torch import nn

from float8.optim.moment import Moment


def make(seed=0):
    """A model with matrices, ragged groups, biases and a norm."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 130), nn.GELU(), nn.LayerNorm(130), nn.Linear(130, 16))


def batch(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(64, 32, generator=generator)
    y = torch.stack([x.roll(i, 1)[:, :16].mul(x[:, 16:]).tanh() for i in range(2)]).sum(0)
    return x.to(dtype), y.to(dtype)


def loss_of(model, step):
    x, y = batch(step, next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(x).float(), y.float())


def train(model, optimizer, steps):
    """Train, and give the mean loss of the last tenth."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    last = losses[-max(steps // 10, 1) :]
    return sum(last) / len(last)


def values_of(state):
    """The values of a state, in float32."""
    return state.dequantize() if isinstance(state, Moment) else state


def sqnr_of_states(optimizer, twin, name):
    """The SQNR in dB of all states of one name against those of a twin in float32."""
    pairs = zip(optimizer.state.values(), twin.state.values(), strict=True)
    mine, theirs = zip(*((values_of(p[name]), q[name]) for p, q in pairs), strict=True)
    return sqnr(*(torch.cat([x.flatten() for x in side]) for side in (mine, theirs)))


def assert_same_states(a, b):
    """Two optimizers hold the same states, bit for bit."""
    for p, q in zip(a.state.values(), b.state.values(), strict=True):
        assert p.keys() == q.keys()
        for name in p:
            assert type(p[name]) is type(q[name]), name
            pair = [
                x.matrix().tensors() if isinstance(x, Moment) else [x] for x in (p[name], q[name])
            ]
            for x, y in zip(*pair, strict=True):
                assert_bitwise(x, y, name)


def assert_same_models(a, b):
    """Two models hold the same parameters, bit for bit."""
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert_bitwise(p.detach(), q.detach())
