"""Every contraction has the factors of its terms, whichever way it is spelt."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from float8.unit_scaling import functional as U
from float8.unit_scaling.transforms.contractions import einsum
from float8.unit_scaling.transforms.unit_scale import unit_scale

# equation -> shapes
CONTRACTIONS = {
    "ij,jk->ik": [(3, 4), (4, 5)],
    "ij,jk": [(3, 4), (4, 5)],
    "bij,bjk->bik": [(2, 3, 4), (2, 4, 5)],
    "bij,bkj->bik": [(2, 3, 4), (2, 5, 4)],
    "bthd,bshd->bhts": [(2, 3, 4, 5), (2, 6, 4, 5)],
    "bhts,bshd->bthd": [(2, 4, 3, 6), (2, 6, 4, 5)],
    "...ij,...jk->...ik": [(2, 7, 3, 4), (2, 7, 4, 5)],
    "bi,ij->bj": [(3, 4), (4, 5)],
    "bij, ij k -> b k": [(2, 3, 4), (3, 4, 5)],
    "j,j->": [(4,), (4,)],
    "ij,jk->k": [(3, 4), (4, 5)],
    "ij,ij->ij": [(3, 4), (3, 4)],
    "i,j->ij": [(3,), (4,)],
}
NO_PRODUCTS = {
    "ii,ij->j": [(3, 3), (3, 4)],
    "ij->ji": [(3, 4)],
    "ij,jk,kl->il": [(3, 4), (4, 5), (5, 6)],
}


@pytest.mark.parametrize(
    ("options", "tied"), [({"constraint": None}, ()), ({"weight": True}, (1,)), ({}, (1, 2))]
)
@pytest.mark.parametrize("equation", CONTRACTIONS)
def test_a_contraction_is_torchs_times_one_factor_per_result(equation, options, tied):
    """``tied`` are the results that have the output's factor, which is the first."""
    left, right = (torch.randn(s, dtype=torch.float64) for s in CONTRACTIONS[equation])
    left.requires_grad_(), right.requires_grad_()
    plain = torch.einsum(equation, left, right)
    grad = torch.randn_like(plain)
    expected = [plain, *torch.autograd.grad(plain, [left, right], grad)]
    out = einsum(equation, left, right, **options)
    found = [out, *torch.autograd.grad(out, [left, right], grad)]
    products = left.numel() * right.numel() / shared(equation, left, right)
    for number, (mine, torchs) in enumerate(zip(found, expected, strict=True)):
        # all products, divided among the elements of the result: so many terms has each
        size = expected[0 if number in tied else number].numel()
        torch.testing.assert_close(mine, torchs * (max(size, 1) / products) ** 0.5)


def shared(equation, left, right):
    """The product of the sizes of the indices that both operands have."""
    a, b = equation.replace(" ", "").partition("->")[0].split(",")
    a, b = (t.replace("...", "YZ") if "..." in t else t for t in (a, b))
    sizes = dict(zip(a, left.shape, strict=True))
    total = 1
    for index in set(a) & set(b):
        total *= sizes[index]
    return total


@pytest.mark.parametrize("equation", NO_PRODUCTS)
def test_what_is_no_matrix_product_is_left_to_torch(equation):
    operands = [torch.randn(s) for s in NO_PRODUCTS[equation]]
    assert torch.equal(einsum(equation, *operands), torch.einsum(equation, *operands))


class Product(nn.Module):
    def __init__(self, call, *shape):
        super().__init__()
        self.w = nn.Parameter(torch.randn(*shape, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(shape[-1], dtype=torch.float64))
        self.call = call

    def forward(self, x, y):
        return self.call(x, y, self.w, self.b)


WITH_WEIGHT = {
    "x @ w": lambda x, y, w, b: x @ w,
    "matmul by keyword": lambda x, y, w, b: torch.matmul(input=x, other=w),
    "mm": lambda x, y, w, b: torch.mm(x[0], w),
    "a transposed weight": lambda x, y, w, b: x @ w.t().contiguous().t(),
    "addmm": lambda x, y, w, b: torch.addmm(b, x[0], w),
    "einsum": lambda x, y, w, b: torch.einsum("bij,jk->bik", x, w),
    "F.linear by keyword": lambda x, y, w, b: F.linear(input=x, weight=w.t()),
}
OF_ACTIVATIONS = {
    "x @ y": lambda x, y, w, b: x @ y,
    "bmm": lambda x, y, w, b: torch.bmm(x, y),
    "torch.mm": lambda x, y, w, b: torch.mm(x[0], y[0])[None].expand(2, -1, -1),
    "einsum of both": lambda x, y, w, b: torch.einsum("bij,bjk->bik", x, y),
    "baddbmm without beta": lambda x, y, w, b: torch.baddbmm(y[:, :3, :5], x, y, beta=0),
}


@pytest.mark.parametrize("spelling", [*WITH_WEIGHT, *OF_ACTIVATIONS])
def test_a_product_is_linear_with_a_weight_and_constrained_with_an_activation(
    spelling,
):
    model = unit_scale(Product({**OF_ACTIVATIONS, **WITH_WEIGHT}[spelling], 4, 5))
    x, y = (torch.randn(2, *s, dtype=torch.float64).requires_grad_() for s in ((3, 4), (4, 5)))
    rows = x[0] if "mm" in spelling.replace("matmul", "") else x
    if spelling in WITH_WEIGHT:
        bias, leaves = model.b if "addmm" in spelling else None, [model.w]
        expected = U.linear(rows, model.w.t(), bias, None)
    else:
        one = U.matmul(x[0], y[0])[None].expand(2, -1, -1)
        expected, leaves = one if spelling == "torch.mm" else U.matmul(x, y), [x, y]
    out = model(x, y)
    grad = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    mine, theirs = (torch.autograd.grad(z, leaves, grad) for z in (out, expected))
    torch.testing.assert_close(mine, theirs)


def test_what_baddbmm_adds_is_a_signal_if_it_is_no_mask():
    def body(x, y, w, b):
        return torch.baddbmm(x @ w, x, y, beta=2, alpha=3)

    model = unit_scale(Product(body, 4, 5))
    x, y = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    added = U.linear(x, model.w.t())
    torch.testing.assert_close(model(x, y), U.add(added * 2, U.matmul(x, y) * 3))


# --- convolutions

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
    found = results(lambda *a: U.conv1d(*a, **options, constraint=None), x, w, b)
    plain = results(lambda *a: F.conv2d(*a, **options), x, w, b)
    for one, other, n in zip(found, plain, (w[0].numel(), *terms), strict=True):
        torch.testing.assert_close(one, other * float(n) ** -0.5)
