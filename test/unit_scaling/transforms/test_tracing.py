"""Compiled code has the factors that eager mode asks for in backward."""

from __future__ import annotations

import pytest
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


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x):
        y = self.a(x)
        return x + y if y.sum() > 0 else x


def test_a_graph_that_breaks_inside_the_model_is_refused():
    compiled = torch.compile(unit_scale(Reads()), backend="eager")
    with pytest.raises(RuntimeError, match="breaks the graph inside a unit-scaled model"):
        compiled(torch.randn(3, 6))
