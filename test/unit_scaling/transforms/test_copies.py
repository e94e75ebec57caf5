"""The run that counts residual layers leaves no trace."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from float8.unit_scaling.transforms import unit_scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.seen = nn.Linear(4, 4), nn.BatchNorm1d(4), []

    def forward(self, x, box=None):
        self.seen.append(x)
        if isinstance(box, dict):
            box["states"].append(x)
        noise = random.random() + torch.rand(())
        return self.norm(x + self.layer(x) * noise)


def test_model_arguments_and_chance_are_as_after_one_forward():
    plain, x = Net(), torch.randn(3, 4)
    random.seed(0), torch.manual_seed(0)
    plain(x)
    expected = random.random(), torch.rand(())
    model, box = unit_scale(Net()), {"states": []}
    random.seed(0), torch.manual_seed(0)
    model(x, box)
    assert (random.random(), torch.rand(())) == expected
    assert len(model.seen) == len(box["states"]) == 1 and box["states"][0] is x
    assert model.norm.num_batches_tracked == 1


def test_an_argument_that_cannot_be_copied_is_refused_the_first_time_only():
    model, x = unit_scale(Net()), torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"counts .* on copies .*generator"):
        model(x, (i for i in range(3)))
    model(x)
    model(x, (i for i in range(3)))


def test_a_tensor_that_needs_its_graph_is_an_argument_like_any_other():
    model, x = unit_scale(Net()), torch.randn(3, 4, requires_grad=True)
    model(x * 2, {"states": [x.exp()]}).square().sum().backward()
    assert x.grad is not None
