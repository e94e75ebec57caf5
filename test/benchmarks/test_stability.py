"""`stability.measure` against values computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.measuring import stability


class Layer(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)
        nn.init.eye_(self.linear.weight)
        self.factor = factor

    def forward(self, x):
        return self.factor * self.linear(x)


def test_it_measures_the_stream_behind_layers_and_what_linear_layers_read():
    layers = nn.ModuleList([Layer(3.0), Layer(0.5)])
    x = torch.randn(8, 5, 16)

    def loss(tokens, targets):
        assert not torch.is_grad_enabled()
        h = x
        for layer in layers:
            h = layer(h)
        return h.sum()

    found = stability.measure(loss, layers, (x, x))
    std, largest = x.double().std().item(), x.abs().max().item()
    assert found["stream_std"] == pytest.approx([3 * std, 1.5 * std])
    assert found["operand_std"] == pytest.approx([std, 3 * std])
    assert found["operand_max"] == pytest.approx(3 * largest)
    hooks = [h for m in layers.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]
    assert hooks == []
