"""Compiled code has the factors that eager mode asks for in backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling.transforms import unit_scale


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
