"""Weights of standard deviation 1, biases 0, types for the optimizers."""

from __future__ import annotations

import copy

import torch
from torch import nn

from float8.unit_scaling.transforms.unit_init import unit_init


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, kdim=4)
        self.packed = nn.MultiheadAttention(8, 2)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.LayerNorm((3, 8))
        self.batch_norm = nn.BatchNorm1d(8)
        self.gain = nn.Parameter(torch.randn(8))
        self.free = nn.Parameter(torch.randn(5, 8) * 7)
        self.head = nn.Linear(8, 5)


def test_weights_get_unit_deviation_biases_zero_and_norms_stay():
    model = Many()
    before = copy.deepcopy(model.state_dict())
    unit_init(model)
    for name, parameter in model.named_parameters():
        old = before[name]
        if "norm" in name or name == "gain":
            assert torch.equal(parameter, old), name
        elif parameter.dim() >= 2:
            torch.testing.assert_close(parameter.detach(), old / old.std(), msg=name)
        else:
            assert not parameter.any(), name
    assert not model.embedding.weight[0].any(), "the row of padding stays zero"


def test_types_are_those_of_u_mup():
    model = Many()
    assert unit_init(model) == {"head.weight"}
    types = {name: p.mup_type for name, p in model.named_parameters()}
    assert types.pop("head.weight") == "output"
    assert types.pop("norm.weight") == types.pop("batch_norm.weight") == "norm"
    biases = {name for name in types if name.endswith("bias")}
    assert {types[name] for name in biases} == {"bias"}
    assert {types[name] for name in set(types) - biases} == {"weight"}
