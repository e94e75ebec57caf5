"""Convolutions of two and three dimensions: their terms are counted, in every direction."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling import functional as U
from float8.unit_scaling.transforms import unit_scale
from float8.unit_scaling.transforms.convolutions import conv2d, conv3d

OPTIONS = [
    {},
    {"stride": (2, 1), "padding": (0, 3)},
    {"padding": "same", "dilation": 2},
    {"padding": "valid", "groups": 2},
    {"stride": 3, "padding": 2, "dilation": (1, 2), "groups": 4},
]


def results(function, x, w, b, grad=None):
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = function(*leaves)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("batch", [(3,), ()], ids=str)
def test_factors_are_the_roots_of_the_terms_counted_by_a_convolution_of_ones(options, batch):
    groups = options.get("groups", 1)
    x = torch.randn(*batch, 4, 11, 9, dtype=torch.float64)
    w, b = torch.randn(8, 4 // groups, 3, 2, dtype=torch.float64), torch.randn(8).double()
    ones = [torch.ones_like(t).requires_grad_() for t in (x, w, b)]
    counts = F.conv2d(*ones, **options)
    terms = [g.mean() for g in torch.autograd.grad(counts, ones, torch.ones_like(counts))]
    found = results(lambda *a: conv2d(*a, **options, constraint=None), x, w, b)
    plain = results(lambda *a: F.conv2d(*a, **options), x, w, b)
    for one, other, n in zip(found, plain, (w[0].numel(), *terms), strict=True):
        torch.testing.assert_close(one, other * float(n) ** -0.5)


def test_a_dimension_of_one_changes_nothing():
    x, w, b = torch.randn(2, 4, 9), torch.randn(6, 4, 3), torch.randn(6)
    one = results(lambda *a: U.conv1d(*a, padding=1), x, w, b)
    x, w = x[:, :, None, None], w[:, :, None, None]
    three = results(lambda *a: conv3d(*a, padding=(0, 0, 1)), x, w, b)
    for a, other in zip(one, three, strict=True):
        torch.testing.assert_close(a, other.reshape(a.shape), atol=1e-5, rtol=1e-5)


def test_a_patch_embedding_has_unit_scale_after_unit_scale():
    model = unit_scale(nn.Conv2d(3, 64, 4, 4))
    x = torch.randn(16, 3, 32, 32, requires_grad=True)
    y = model(x)
    y.backward(torch.randn_like(y))
    for tensor in (y.detach(), x.grad, model.weight.grad, model.bias.grad):
        assert 0.7 < float(tensor.square().mean().sqrt()) < 1.4
