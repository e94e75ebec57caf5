"""An optimizer that holds a replaced parameter raises at its first step."""

import pytest
import torch
from torch import nn

from float8.distributed.replaced_parameters import mark_replaced, unmark


def test_a_replaced_parameter_is_refused_by_the_layers_name_until_it_is_back():
    old, kept = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    holding, other = (torch.optim.SGD(each, lr=1.0) for each in ([kept, old], [kept]))
    holding.step()  # before
    for name in ("layers.0", "layers.1"):  # later replacements are seen too
        mark_replaced(old, name)
        other.step()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"{name} that.*build the optimizer"):
                holding.step()
        for _ in range(2):  # nothing to do the second time
            unmark(old)
        holding.step()
