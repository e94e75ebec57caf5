"""A Float8Tensor as the result of an op: its parts, and the gradient that reaches the carrier."""

from __future__ import annotations

import oracle
import pytest
import torch
from assertions import assert_bitwise

from float8 import E4M3
from float8.tensor.tensor import Differentiable


@pytest.mark.parametrize("transposes", [False, True])
def test_it_has_the_parts_that_it_was_given_and_its_gradient_is_the_carriers(transposes):
    torch.manual_seed(0)
    data = torch.randn(6, 8).to(E4M3.dtype)
    data_t = data.t().contiguous() if transposes else None
    scale = torch.full((1, 1), 0.25)
    x, g = torch.randn((), requires_grad=True), torch.randn(2, 3, 8)
    carrier = x.bfloat16().expand(2, 3, 8)
    result = Differentiable.apply(carrier, data, data_t, scale)
    assert (result.shape, result.dtype) == ((2, 3, 8), torch.bfloat16)
    assert result.block == (-1, -1, -1)
    assert result.data_t is data_t
    rows = oracle.values(data, scale, (-1, -1)).float()
    assert_bitwise(result.dequantize(torch.float32), rows.view(2, 3, 8))
    result.dequantize(torch.float32).backward(g)
    assert_bitwise(x.grad, g.bfloat16().sum().float())
