"""bf16 and fp16 GEMMs computed in float32 equal bf16 and fp16 GEMMs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
