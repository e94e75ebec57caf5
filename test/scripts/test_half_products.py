"""bf16 and fp16 GEMMs computed in float32 equal bf16 and fp16 GEMMs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from scripts.training.half_products import HALF, HalfProducts


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shapes", [((7, 33), (33, 5)), ((3, 7, 33), (3, 33, 5)), ((1, 1), (1, 1))])
def test_a_product_is_the_exact_one_rounded(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    left, right = (normal(*shape, dtype=dtype) for shape in shapes)
    with HalfProducts():
        found = left @ right
    exact = left.double() @ right.double()
    assert found.dtype == dtype
    assert bool(((found.double() - exact).abs() <= bound_of(left, right)).all())


def bound_of(left: Tensor, right: Tensor) -> Tensor:
    """Half a step of the format, and float32's error in adding 33 terms: it may tip a rounding."""
    exact, absolute = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    smallest = torch.finfo(left.dtype).smallest_normal
    step = torch.finfo(left.dtype).eps * exact.abs().clamp_min(smallest)
    return step / 2 + 33 * 2**-24 * absolute


def test_the_smallest_and_the_greatest_fp16_products_are_exact_before_the_sum_is_rounded() -> None:
    tiny, huge = 2.0**-24, torch.finfo(torch.float16).max
    left = torch.tensor([[tiny, huge, huge]], dtype=torch.float16)
    right = torch.tensor([[tiny], [tiny], [-1.0]], dtype=torch.float16)
    with HalfProducts():
        assert (left[:, :1] @ right[:1]).item() == 0  # 2**-48
        assert (left[:, :2] @ right[:2]).item() == pytest.approx(huge * tiny, rel=2**-11)
        assert (left[:, 2:] @ right[2:]).item() == -huge
        assert (left[:, 1:] @ torch.full((2, 1), 2.0).half()).item() == torch.inf  # as a unit's


def test_the_products_of_backward_and_of_autocast_go_the_same_way() -> None:
    layer, x, grad = nn.Linear(16, 8, bias=False), normal(5, 16), normal(5, 8)
    x.requires_grad_()
    with HalfProducts(), torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.backward(grad)
    weight = layer.weight.detach().bfloat16()
    assert torch.equal(y.detach(), (x.detach().float() @ weight.float().t()).bfloat16())
    assert x.grad is not None
    assert torch.equal(x.grad, (grad.float() @ weight.float()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    left, right = normal(4, 6, dtype=dtype), normal(6, 3, dtype=dtype)
    with HalfProducts():
        assert torch.equal(left @ right, torch.mm(left, right))


def test_a_float32_sum_that_is_rounded_twice_would_be_seen() -> None:
    """GEMMs that round every product miss the bound of the first test."""
    left, right = normal(7, 33), normal(33, 5)
    rounded = (left[:, :, None] * right[None]).sum(1)
    exact = left.double() @ right.double()
    assert not bool(((rounded.double() - exact).abs() <= bound_of(left, right)).all())


def test_grouped_products_of_each_group_go_the_same_way() -> None:
    x, w, grad = normal(9, 16), normal(3, 8, 16), normal(9, 8)
    x.requires_grad_(), w.requires_grad_()
    offs = torch.tensor([4, 4, 9], dtype=torch.int32)
    with HalfProducts():
        y = torch.nn.functional.grouped_mm(x, w.mT, offs=offs)
        y.backward(grad)
    x32, w32, g32 = x.detach().float(), w.detach().float(), grad.float()
    assert x.grad is not None and w.grad is not None
    for e, rows in ((0, slice(0, 4)), (2, slice(4, 9))):
        assert torch.equal(y.detach()[rows], (x32[rows] @ w32[e].t()).bfloat16())
        assert torch.equal(x.grad[rows], (g32[rows] @ w32[e]).bfloat16())
        assert torch.equal(w.grad[e], (g32[rows].t() @ x32[rows]).bfloat16())
    assert not w.grad[1].any()
