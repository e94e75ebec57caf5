"""The table has every operand of every linear layer, and counts what a cast would lose."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import float8.unit_scaling as uu
from float8 import E4M3, E5M2
from float8.unit_scaling import functional as U
from float8.unit_scaling.analysis import format_operands, operand_table
from float8.unit_scaling.analysis.operands import Operand


class Net(nn.Module):
    """Linear layers in several spellings, one weight twice, and products of activations."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8, bias=False)
        self.matrix = nn.Module()
        self.matrix.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        x = self.down(F.gelu(self.up(x)))
        x = x @ self.matrix.weight
        x = torch.addmm(x, x, self.matrix.weight.t())
        return x + torch.softmax(x @ x.t(), -1) @ x  # two activations: no linear product


def operands(rows):
    return [(row.product, row.operand) for row in rows]


X = torch.randn(7, 8, generator=torch.Generator().manual_seed(3))


def test_there_are_three_rows_for_each_linear_product_in_the_order_of_the_calls():
    rows = operand_table(Net(), X)
    names = ["up", "down", "matrix", "matrix#2"]
    kinds = ["input", "weight", "grad_output"]
    assert operands(rows) == [(name, kind) for name in names for kind in kinds]
    assert [row.shape for row in rows[:3]] == [(7, 8), (24, 8), (7, 24)]
    assert [row.format for row in rows[:3]] == ["e4m3", "e4m3", "e5m2"]
    of_a_loss = operand_table(nn.Sequential(nn.Linear(8, 1)), X[:1])
    assert [row.shape for row in of_a_loss] == [(1, 8), (1, 8), (1, 1)]


def test_the_numbers_are_those_of_the_tensors_themselves():
    """An independent look: hooks on the layer, casts by torch, statistics in float64."""
    torch.manual_seed(5)
    model, x = nn.Sequential(nn.Linear(40, 16), nn.Tanh()), 0.01 * torch.randn(50, 40)
    x[0], x[1], x[2] = 0.0, 1000.0, 2.0**-10  # the last is half of the smallest value
    weight, seen = 1e-7 * torch.randn(50, 16), []

    def backward(y):
        (y * weight).sum().backward()

    rows = operand_table(model, x, backward=backward)
    y = model[0](x)
    y.register_hook(seen.append)
    backward(model[1](y))
    for row, tensor in zip(rows, (x, model[0].weight.detach(), seen[0]), strict=True):
        fmt = E5M2 if row.operand == "grad_output" else E4M3
        code = tensor.clamp(-fmt.max, fmt.max).to(fmt.dtype).float()
        nonzero = tensor != 0
        assert row.flushed == int(((code == 0) & nonzero).sum()) / int(nonzero.sum())
        assert row.saturated == float((tensor.abs() > fmt.max).double().mean())
        assert row.std == pytest.approx(float(tensor.double().std(correction=0)), rel=1e-5)
    assert 0 < rows[0].flushed < 1, "the case would show nothing otherwise"
    assert rows[0].saturated == 40 / x.numel()
    assert rows[2].flushed > 0.9


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = uu.Linear(16, 32), uu.LinearReadout(32, 8)

    def forward(self, x):
        return self.head(U.gelu(self.layer(x)))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x), x


def test_a_model_that_returns_no_tensor_is_told_how_to_run_backward():
    rows = operand_table(Pair(), X, backward=lambda pair: pair[0].square().sum().backward())
    assert operands(rows)[-1] == ("layer", "grad_output")


ROWS = [
    Operand("up", "input", (2, 3), "e4m3", 1.25, 0.001, 0.5),
    Operand("up", "grad_output", (2, 4), "e5m2", 2e-6, 0.986, 0.0),
    Operand("down", "grad_output", (2, 4), "e5m2", 2e-6, 0.5, 0.0),
]


def test_the_printed_table_has_every_number_and_the_medians():
    text = format_operands(ROWS)
    line = next(line for line in text.splitlines() if "grad_output" in line)
    assert line.split() == ["up", "grad_output", "e5m2", "2e-06", "98.6%", "0.0%"]
    assert text.endswith("median over products: input 0.1%, grad_output 74.3%")
