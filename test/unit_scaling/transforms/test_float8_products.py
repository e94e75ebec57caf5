"""Matrix and attention products in float8, against float64 and against each other."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
import torch.nn.functional as F
from assertions import sqnr

from float8.config import RECIPES
from float8.unit_scaling.transforms.float8_products import float8_attention, float8_matmul

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNIT, TENSORWISE = RECIPES["unit"], RECIPES["tensorwise"]


def rounded(x, dtype):
    return oracle.table(dtype)[oracle.encode(x.detach().double(), dtype).long()]


@pytest.mark.parametrize("factors", [None, (0.5, 0.25, 3.0)])
@pytest.mark.parametrize(
    ("left", "right"),
    [((5, 16), (16, 7)), ((2, 3, 5, 16), (2, 3, 16, 7)), ((2, 1, 5, 16), (3, 16, 7)),
     ((4, 5, 16), (16, 7)), ((0, 5, 16), (0, 16, 7)), ((1, 16), (16, 1))],
)  # fmt: skip
def test_each_product_is_that_of_the_rounded_operands(left, right, factors):
    a, b = torch.randn(left, requires_grad=True), torch.randn(right, requires_grad=True)
    out = float8_matmul(a, b, UNIT, factors)
    g = torch.randn(out.shape)
    out.backward(g)
    a64, b64 = (rounded(x, E4M3).requires_grad_() for x in (a, b))
    exact = a64 @ b64
    grads = torch.autograd.grad(exact, (a64, b64), rounded(g, E5M2))
    for found, want, factor in zip(
        (out, a.grad, b.grad), (exact, *grads), factors or (1, 1, 1), strict=True
    ):
        assert found.shape == want.shape
        torch.testing.assert_close(found.double(), want * factor, rtol=1e-5, atol=1e-5)


def test_a_dtype_without_casts_is_refused_by_name():
    with pytest.raises(TypeError, match=r"right is torch\.float64"):
        float8_matmul(torch.randn(4, 4), torch.randn(4, 4).double(), UNIT)


def masks(L, S):
    seen = torch.rand(L, S) < 0.7
    seen[5] = False  # nobody to attend to
    return {"none": None, "bool": seen, "float": torch.randn(L, S)}


@pytest.mark.parametrize("config", [UNIT, TENSORWISE], ids=["unit", "tensorwise"])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_close_to_high_precision(config, mask, is_causal):
    if is_causal and mask != "none":
        pytest.skip("torch takes one of the two")
    q, k, v = (torch.randn(2, 3, 32, 16, requires_grad=True) for _ in range(3))
    g, attn_mask = torch.randn(2, 3, 32, 16), masks(32, 32)[mask]
    out = float8_attention(config, q, k, v, attn_mask, 0.0, is_causal)
    found = (out, *torch.autograd.grad(out, (q, k, v), g))
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    mask64 = attn_mask.double() if mask == "float" else attn_mask
    exact = F.scaled_dot_product_attention(*leaves, mask64, 0.0, is_causal)
    wanted = (exact, *torch.autograd.grad(exact, leaves, g.double()))
    for name, mine, theirs in zip("oqkv", found, wanted, strict=True):
        assert sqnr(mine, theirs) > 18, name


def test_weights_far_below_the_format_still_count():
    """Flat attention over 4096 keys: each weight is 2^-12, and E4M3 ends at 2^-9."""
    q, k = torch.zeros(1, 8, 16), torch.zeros(1, 4096, 16)
    v = torch.ones(1, 4096, 16)
    assert torch.allclose(float8_attention(UNIT, q, k, v), torch.ones(1, 8, 16))


def test_one_hot_attention_does_not_saturate():
    q, k = torch.full((1, 4, 16), 16.0), torch.zeros(1, 32, 16)
    k[:, 7] = 16.0
    v = torch.randn(1, 32, 16).to(E4M3).float()
    assert torch.equal(float8_attention(UNIT, q, k, v), v[:, 7:8].expand(1, 4, 16))


def test_scale_groups_of_heads_and_dropout_are_as_torch_says():
    q, k, v = torch.randn(2, 4, 16, 16), torch.randn(2, 2, 16, 16), torch.randn(2, 2, 16, 16)
    found = float8_attention(TENSORWISE, q, k, v, scale=0.1, enable_gqa=True)
    exact = F.scaled_dot_product_attention(q, k, v, scale=0.1, enable_gqa=True)
    assert sqnr(found, exact) > 20
    ones = torch.ones(1, 64, 16)
    dropped = float8_attention(UNIT, ones, ones, ones, dropout_p=0.5)
    assert dropped.unique().numel() > 1
    assert math.isclose(dropped.mean().item(), 1.0, abs_tol=0.1)
