"""What an addition is: kept, a sum, a residual layer."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from decided import decisions_of
from torch import nn

from float8.unit_scaling.transforms.unit_scale import unit_scale

WIDTH = 8


class Model(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.v = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("mask", torch.randn(4, 4))
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def rotary(m, x):
    q = x @ m.w
    angle = torch.arange(q.shape[1])[:, None] * torch.ones(WIDTH // 2)
    half = torch.cat([-q[..., WIDTH // 2 :], q[..., : WIDTH // 2]], dim=-1)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    return q * cos + half * sin


def gelu_by_hand(m, x):
    x = x @ m.w
    inner = math.sqrt(2 / math.pi) * torch.add(x, 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner))


def masked(m, x):
    return ((x @ m.w) @ x.transpose(1, 2) + m.mask).softmax(-1)


def rms_norm_by_hand(m, x):
    x = x @ m.w
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def interpolated(m, x):
    gate = torch.sigmoid(x @ m.w)
    return gate * x + (1 - gate) * (x @ m.v)


# body -> kinds of its additions of tensors
KINDS = {
    "a bias": (lambda m, x: x @ m.w + m.b, ["keep"]),
    "a number": (lambda m, x: (x @ m.w).add(1), ["keep"]),
    "positions": (lambda m, x: x[:, torch.arange(3) + torch.ones(3, dtype=torch.int)], ["keep"]),
    "rotary embedding": (rotary, ["keep"]),
    "gelu by hand": (gelu_by_hand, ["keep", "keep"]),
    "RMS norm by hand": (rms_norm_by_hand, ["keep"]),
    "interpolation by a gate": (interpolated, ["keep"]),
    "a mask": (masked, ["keep"]),
    "two branches": (lambda m, x: x @ m.w + x @ m.v, ["sum"]),
    "two branches, in place": (lambda m, x: (x @ m.w).add_(x @ m.v), ["sum"]),
    "positions learned": (lambda m, x: x @ m.w + m.v[:4], ["sum"]),
    "another shape": (lambda m, x: x + (x @ m.w).mean(1, keepdim=True), ["sum"]),
    "alpha": (lambda m, x: torch.add(x, x @ m.w, alpha=2), ["sum"]),
    "a residual layer": (lambda m, x: x + x @ m.w, ["residual"]),
    "a norm after it": (lambda m, x: F.layer_norm(x + x @ m.w, (WIDTH,)), ["residual"]),
    "not the same tensor": (lambda m, x: x[:, :2] + x[:, 2:] @ m.w, ["sum"]),
    "of x only the shape": (
        lambda m, x: x + F.gelu(m.mask @ m.v[:4]).expand(2, 4, WIDTH).reshape_as(x),
        ["sum"],
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_an_addition_has_its_kind(name):
    body, expected = KINDS[name]
    decisions = decisions_of(unit_scale(Model(body)), torch.randn(2, 4, WIDTH))
    assert [call.role for call in decisions.calls if call.function is torch.add] == expected
