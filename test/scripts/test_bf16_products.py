"""bf16 products by way of float32 are bf16 products."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from bf16_products import Bf16Products


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shapes", [((7, 33), (33, 5)), ((3, 7, 33), (3, 33, 5)), ((1, 1), (1, 1))])
def test_a_product_is_the_exact_one_rounded(shapes: tuple[tuple[int, ...], ...]) -> None:
    left, right = (normal(*shape) for shape in shapes)
    with Bf16Products():
        found = left @ right
    exact = left.double() @ right.double()
    assert found.dtype == torch.bfloat16
    # Half a bf16 step, and float32's error in adding 33 terms, which may tip a rounding.
    bound = exact.abs() * 2**-8 + 33 * 2**-24 * (left.double().abs() @ right.double().abs())
    assert bool(((found.double() - exact).abs() <= bound).all())


def test_the_products_of_backward_and_of_autocast_go_the_same_way() -> None:
    layer, x, grad = nn.Linear(16, 8, bias=False), normal(5, 16), normal(5, 8)
    x.requires_grad_()
    with Bf16Products(), torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.backward(grad)
    weight = layer.weight.detach().bfloat16()
    assert torch.equal(y.detach(), (x.detach().float() @ weight.float().t()).bfloat16())
    assert x.grad is not None
    assert torch.equal(x.grad, (grad.float() @ weight.float()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_products_of_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    left, right = normal(4, 6, dtype=dtype), normal(6, 3, dtype=dtype)
    with Bf16Products():
        assert torch.equal(left @ right, torch.mm(left, right))


def test_a_float32_sum_that_is_rounded_twice_would_be_seen() -> None:
    """The first test has teeth: products rounded one by one miss its bound."""
    left, right = normal(7, 33), normal(33, 5)
    rounded = (left[:, :, None] * right[None]).sum(1)
    exact = left.double() @ right.double()
    bound = exact.abs() * 2**-8 + 33 * 2**-24 * (left.double().abs() @ right.double().abs())
    assert not bool(((rounded.double() - exact).abs() <= bound).all())
