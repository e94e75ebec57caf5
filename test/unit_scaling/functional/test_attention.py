"""`float8.unit_scaling.functional.attention`: averages of values, scaled to unit scale."""

import math

import pytest
import torch
from scale_assertions import assert_unit_scaled, gradients, normal

from float8.unit_scaling import functional as U

BOTH = [U.scaled_dot_product_attention, U.sqrt_softmax_attention]


def qkv(batch, length, depth, dtype=torch.float32, keys=None):
    shapes = (batch, length, depth), (batch, keys or length, depth), (batch, keys or length, depth)
    return tuple(normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))


def by_hand(q, k, v, temperature, is_causal=False, power=1.0):
    """softmax(q k^T t) ** power @ v in float64, one row at a time."""
    rows = []
    for i in range(q.shape[-2]):
        seen = i + 1 if is_causal else k.shape[-2]
        logits = (q[..., i : i + 1, :].double() * k[..., :seen, :].double()).sum(-1) * temperature
        e = torch.exp(logits - logits.amax(-1, keepdim=True))
        weights = (e / e.sum(-1, keepdim=True)) ** power
        rows.append((weights[..., None] * v[..., :seen, :].double()).sum(-2))
    return torch.stack(rows, -2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "depth", "mult"), [(5, 8, 1.0), (33, 16, 4.0), (1, 4, 1.0)])
def test_attention_is_softmax_attention_times_its_documented_factor(length, depth, mult, is_causal):
    q, k, v = qkv(3, length, depth)
    found = U.scaled_dot_product_attention(q, k, v, None, 0.0, is_causal, mult)
    flat = math.sqrt((math.log(length) if is_causal and length > 2 else 1.0) / length)
    alpha = 1 / (1 + 4 * depth / mult**2)
    expected = by_hand(q, k, v, mult / depth, is_causal) / flat ** (1 - alpha)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
@pytest.mark.parametrize("attention", BOTH)
def test_dropout_of_weights_keeps_unit_scale(attention, dropout_p):
    torch.manual_seed(11)
    y = attention(*qkv(200, 16, 64), dropout_p=dropout_p)
    assert_unit_scaled(y, band=0.05, samples=200 * 64)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_a_mask_is_the_fourth_argument(attention, mask):
    q, k, v = qkv(2, 6, 8, keys=9)
    seen = torch.arange(9) < 5
    attn_mask = seen.expand(6, 9)
    if mask == "float":
        attn_mask = torch.zeros(6, 9).masked_fill(~seen, float("-inf"))
    found = attention(q, k, v, attn_mask)
    fewer = attention(q, k[:, :5], v[:, :5])
    torch.testing.assert_close(found / found.norm(), fewer / fewer.norm())


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_a_query_that_attends_to_nothing_gets_zero_and_sends_no_gradient(attention, mask):
    q, k, v = qkv(2, 6, 8)
    attn_mask = torch.ones(6, 6, dtype=torch.bool).tril(-1)  # the first query attends to no key
    if mask == "float":
        attn_mask = torch.zeros(6, 6).masked_fill(~attn_mask, float("-inf"))
    y, gq, gk, gv = gradients(lambda *a: attention(*a, attn_mask), q, k, v)
    assert not y[:, 0].any() and not gq[:, 0].any()
    for x in (y, gq, gk, gv):
        assert x.isfinite().all()


# --- the root of the softmax


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_square_root_attention_is_its_formula(is_causal, dtype):
    q, k, v = qkv(3, 11, 8, dtype)
    found = U.sqrt_softmax_attention(q, k, v, is_causal=is_causal, mult=2.0)
    expected = by_hand(q, k, v, 2.0 / 8, is_causal, power=0.5)
    assert found.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("attention", BOTH)
@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_may_share_keys_and_values(attention, is_causal):
    q, k, v = normal(2, 6, 5, 8), normal(2, 3, 5, 8, seed=1), normal(2, 3, 5, 8, seed=2)
    found = attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    k, v = (torch.stack([x, x], 2).reshape(2, 6, 5, 8) for x in (k, v))
    torch.testing.assert_close(found, attention(q, k, v, is_causal=is_causal))
