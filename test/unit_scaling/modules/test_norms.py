"""Norms are torch's, with unit scale for the gradients of their weights."""

from __future__ import annotations

import copy

import pytest
import torch
from scale_assertions import assert_unit_scaled
from torch import nn

import float8.unit_scaling as uu

KINDS = [(uu.LayerNorm, nn.LayerNorm), (uu.RMSNorm, nn.RMSNorm)]
EVERY = pytest.mark.parametrize(("ours", "theirs"), KINDS)


@EVERY
@pytest.mark.parametrize("shape", [7, (7,), [3, 7]])
@pytest.mark.parametrize("affine", [False, True])
def test_a_norm_computes_what_torchs_computes(ours, theirs, shape, affine):
    mine = ours(shape, eps=1e-3, elementwise_affine=affine)
    other = theirs(shape, eps=1e-3, elementwise_affine=affine)
    for p in mine.parameters():
        nn.init.normal_(p)
    other.load_state_dict(mine.state_dict())
    x, g = torch.randn(5, 3, 7), torch.randn(5, 3, 7)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    y1, y2 = mine(x1), other(x2)
    y1.backward(g)
    y2.backward(g)
    torch.testing.assert_close(y1, y2)
    torch.testing.assert_close(x1.grad, x2.grad)
    rows = x.numel() / (21 if isinstance(shape, list) else 7)
    for p, q in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad * rows**-0.5)


@EVERY
def test_a_norm_has_no_weight_by_default(ours, theirs):
    assert list(ours(7).parameters()) == []
    assert ours(7).state_dict() == {}


def test_weights_start_at_one_and_know_their_roles():
    layer, rms = uu.LayerNorm(5, elementwise_affine=True), uu.RMSNorm(5, elementwise_affine=True)
    assert torch.equal(layer.weight, torch.ones(5)) and torch.equal(rms.weight, torch.ones(5))
    assert torch.equal(layer.bias, torch.zeros(5))
    assert [p.mup_type for p in (layer.weight, layer.bias, rms.weight)] == ["norm", "bias", "norm"]
    assert uu.LayerNorm(5, elementwise_affine=True, bias=False).bias is None


@EVERY
def test_scales_are_one_whatever_the_inputs_scale(ours, theirs):
    norm = ours(64, elementwise_affine=True)
    x = torch.randn(30, 50, 64)
    y = norm(37 * x)
    y.backward(torch.randn_like(y))
    assert_unit_scaled(y, band=0.01)
    for p in norm.parameters():
        assert_unit_scaled(p.grad, band=0.05)


@EVERY
def test_a_norm_made_on_meta_or_in_another_dtype_works(ours, theirs):
    with torch.device("meta"):
        norm = ours(8, elementwise_affine=True)
    norm.to_empty(device="cpu").reset_parameters()
    assert norm.weight.mup_type == "norm"
    x = torch.randn(4, 8)
    torch.testing.assert_close(norm(x), theirs(8, eps=1e-5)(x))
    half = ours(8, elementwise_affine=True, dtype=torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16


@EVERY
def test_a_compiled_norm_computes_the_same(ours, theirs):
    norm = ours((3, 4), elementwise_affine=True)
    compiled = torch.compile(copy.deepcopy(norm), fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(compiled(x), norm(x))
