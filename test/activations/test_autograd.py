"""The autograd functions: masks of bits, refusals, and torch's own checks of saved tensors."""

import pytest
import torch
from torch.nn import functional as F

from float8.activations import saved_activations


@pytest.mark.parametrize("function", [F.silu, F.relu])
def test_a_second_derivative_is_refused_by_name(function):
    x = torch.randn(64, 128, requires_grad=True)
    with saved_activations():
        y = function(x).sum()
    with pytest.raises(RuntimeError, match=rf'skip=\("{function.__name__}",\)'):
        torch.autograd.grad(y, x, create_graph=True)
    with saved_activations(skip=("silu", "relu")):
        y = function(x).sum()
    torch.autograd.grad(y, x, create_graph=True)


def test_relu_treats_nan_and_inf_as_torch_does():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 2.0])
    x = x.repeat(1024).requires_grad_()
    g = torch.randn(8192)
    (plain,) = torch.autograd.grad(F.relu(x), x, g)
    with saved_activations():
        (found,) = torch.autograd.grad(F.relu(x), x, g)
    assert torch.equal(found, plain)
