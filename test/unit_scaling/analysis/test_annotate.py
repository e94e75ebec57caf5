"""The annotated code is what the module called, and its numbers are standard deviations."""

from __future__ import annotations

import re
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling.analysis import analyse_module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList([nn.Linear(8, 24, bias=False), nn.Linear(8, 8)])
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        q, k, v = self.layers[0](self.norm(x)).chunk(3, -1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = torch.cat([a, a.mT.mT], 1)[..., : x.shape[1], :]
        return x + self.layers[1](y) * self.gain


def without_scales(code):
    return re.sub(r"\(-> [^)]*\)", "(..)", code)


def analysed(**kwargs):
    torch.manual_seed(1)
    x = torch.randn(2, 5, 8)
    return analyse_module(Block(), x, torch.randn(2, 5, 8), **kwargs)


def test_the_code_is_the_calls_in_order():
    expected = """
    def forward(self, x):  x (..)
        norm_weight = self.norm.weight  (..)
        norm_bias = self.norm.bias  (..)
        layer_norm = F.layer_norm(x, (8,), weight=norm_weight, bias=norm_bias, eps=1e-05)  (..)
        layers_0_weight = self.layers[0].weight  (..)
        linear = F.linear(layer_norm, layers_0_weight, None)  (..)
        chunk = linear.chunk(3, -1)
        getitem = chunk[0]  (..)
        getitem_1 = chunk[1]  (..)
        getitem_2 = chunk[2]  (..)
        scaled_dot_product_attention = F.scaled_dot_product_attention(getitem, getitem_1, getitem_2, is_causal=True)  (..)
        getattr_1 = scaled_dot_product_attention.mT  (..)
        getattr_2 = getattr_1.mT  (..)
        cat = torch.cat([scaled_dot_product_attention, getattr_2], 1)  (..)
        getitem_3 = cat[(Ellipsis, slice(None, 5, None), slice(None, None, None))]  (..)
        layers_1_weight = self.layers[1].weight  (..)
        layers_1_bias = self.layers[1].bias  (..)
        linear_1 = F.linear(getitem_3, layers_1_weight, layers_1_bias)  (..)
        gain = self.gain  (..)
        mul = linear_1.mul(gain)  (..)
        add = torch.add(x, mul)  (..)
        return add
    """  # noqa: E501
    assert without_scales(analysed()) == textwrap.dedent(expected).strip()


def test_the_numbers_are_standard_deviations_of_tensors_and_gradients():
    torch.manual_seed(2)
    layer, x, grad = nn.Linear(6, 4), torch.randn(9, 6), torch.randn(9, 4)
    code = analyse_module(layer, x, grad)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    pairs = {
        "input_1": (x, grad @ weight),
        "weight": (weight, grad.t() @ x),
        "bias": (bias, grad.sum(0)),
        "linear": (x @ weight.t() + bias, grad),
    }
    for name, (tensor, gradient) in pairs.items():
        fwd, bwd = re.search(rf"{name}\b.*\(-> ([^,]*), <- ([^)]*)\)", code).groups()
        assert float(fwd) == pytest.approx(tensor.std().item(), rel=6e-3), name
        assert float(bwd) == pytest.approx(gradient.std().item(), rel=6e-3), name


def test_code_is_coloured_on_request():
    pytest.importorskip("pygments")
    plain, coloured = analysed(), analysed(syntax_highlight=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).strip() == plain
