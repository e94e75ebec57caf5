"""Simulated products are products of rounded operands, forward and backward, and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise
from torch import nn

import float8.unit_scaling as uu
from float8.unit_scaling.transforms.simulate import simulate_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x, dtype=E4M3):
    """Through torch's own float8, saturating; of float64, numbers that float32 holds."""
    most = torch.finfo(dtype).max
    return x.float().clamp(-most, most).to(dtype).to(x.dtype)


def numbers(*shape, dtype=torch.float64, scale=1.0):
    """Random numbers that float32 holds."""
    return (torch.randn(*shape) * scale).to(dtype)


class Calls(nn.Module):
    """A module whose forward is one function of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


# name -> (function, shapes of the operands, shape of what is added or None)
B, N, M, K = 3, 5, 7, 11
PRODUCTS = {
    "F.linear": (F.linear, [(B, M, K), (N, K)], (N,)),
    "linear without bias": (F.linear, [(M, K), (N, K)], None),
    "matmul of a vector": (lambda x, y: x.matmul(y), [(M, K), (K,)], None),
    "torch.mm": (lambda x, y: torch.mm(x, mat2=y), [(M, K), (K, N)], None),
    "bmm": (torch.bmm, [(B, M, K), (B, K, N)], None),
    "addmm": (
        lambda x, y, b: torch.addmm(b, x, y, beta=0.5, alpha=2.0),
        [(M, K), (K, N)],
        (N,),
    ),
    "baddbmm": (lambda x, y, b: torch.baddbmm(b, x, y), [(B, M, K), (B, K, N)], (1, M, 1)),
    "addbmm": (lambda x, y, b: torch.addbmm(b, x, y), [(B, M, K), (B, K, N)], (M, N)),
    "einsum": (lambda x, y: torch.einsum("bmk,nk->bnm", x, y), [(B, M, K), (N, K)], None),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 2, 1), [(B, 4, M), (6, 4, 3)], (6,)),
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, bias=b, groups=2, padding="same"),
        [(B, 4, M, N), (6, 2, 3, 3)],
        (6,),
    ),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        [(B, 4, M, N), (4, 2, 3, 3)],
        (2,),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(B, 2, M, 8), (B, 2, M, 8), (B, 2, M, 8)],
        None,
    ),
}


def exact(function, operands, addend, grad, backward_dtype=E5M2):
    """Output and gradients: the function of rounded operands, its backward of a rounded gradient.

    The addend's gradient is that of the gradient as it came.
    """
    leaves = [rounded(x).requires_grad_() for x in operands]
    added = [] if addend is None else [addend.clone().requires_grad_()]
    y = function(*leaves, *added)
    q = grad if backward_dtype is None else rounded(grad, backward_dtype)
    grads = list(torch.autograd.grad(y, leaves, q, retain_graph=True))
    return [y, *grads, *(torch.autograd.grad(y, added, grad) if added else [])]


def simulated(function, operands, addend, grad):
    model = simulate_fp8(Calls(function))
    leaves = [x.clone().requires_grad_() for x in operands]
    leaves += [] if addend is None else [addend.clone().requires_grad_()]
    y = model(*leaves)
    return [y, *torch.autograd.grad(y, leaves, grad)]


def case(name):
    torch.manual_seed(len(name))
    function, shapes, added = PRODUCTS[name]
    operands = [numbers(*shape) for shape in shapes]
    addend = None if added is None else numbers(*added)
    with torch.no_grad():
        y = function(*operands, *([] if addend is None else [addend]))
    return function, operands, addend, numbers(*y.shape)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_rounded_operands_forward_and_backward(name):
    arguments = case(name)
    for actual, expected in zip(simulated(*arguments), exact(*arguments), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_under_autocast_operands_are_rounded_to_its_dtype_first():
    torch.manual_seed(6)
    # Just above a tie of E4M3 in float32, on it in bfloat16: which is rounded first decides.
    x = torch.full((M, K), 1.0625 + 2.0**-12)
    layer = nn.Linear(K, N)
    with torch.autocast("cpu", torch.bfloat16):
        y = simulate_fp8(layer)(x)
    assert y.dtype == torch.bfloat16
    with torch.no_grad():
        weight = rounded(layer.weight.bfloat16())
        first = F.linear(rounded(x.bfloat16()), weight, layer.bias.bfloat16())
        late = F.linear(rounded(x).bfloat16(), weight, layer.bias.bfloat16())
    assert_bitwise(y, first)
    assert not torch.equal(first, late)


def test_unit_scaled_modules_are_simulated_between_their_factors():
    torch.manual_seed(7)
    layer = uu.Linear(K, N, bias=True).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(p.float())
    model = simulate_fp8(layer)
    x = numbers(M, K).requires_grad_()
    grad = numbers(M, N)
    y = model(x)
    y.backward(grad)
    xq, wq, gq = rounded(x.detach()), rounded(layer.weight.detach()), rounded(grad, E5M2)
    # The default constraint: the input's gradient is scaled as the output is.
    torch.testing.assert_close(y, (xq @ wq.t() + layer.bias) * K**-0.5)
    torch.testing.assert_close(x.grad, gq @ wq * K**-0.5)
    torch.testing.assert_close(model.weight.grad, gq.t() @ xq * M**-0.5)
    torch.testing.assert_close(model.bias.grad, grad.sum(0) * M**-0.5)
