"""An optimizer that holds a replaced parameter raises at its first step."""

import pytest
import torch
from torch import nn

from float8.distributed.replaced_parameters import mark_replaced, unmark


def test_a_replaced_parameter_is_refused_by_the_layers_name():
    old, kept = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    holding = torch.optim.SGD([kept, old], lr=1.0)
    other = torch.optim.SGD([kept], lr=1.0)
    holding.step()  # before
    mark_replaced(old, "layers.0")
    other.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"layers\.0.*build the optimizer"):
            holding.step()


def test_a_parameter_that_is_back_is_stepped():
    parameter = nn.Parameter(torch.zeros(2))
    mark_replaced(parameter, "layer")
    unmark(parameter)
    unmark(parameter)  # nothing to do
    torch.optim.SGD([parameter], lr=1.0).step()


def test_later_replacements_are_seen_too():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    mark_replaced(nn.Parameter(torch.zeros(1)), "other")
    optimizer.step()
    mark_replaced(parameter, "layer")
    with pytest.raises(RuntimeError, match="of layer that"):
        optimizer.step()
