"""`float8.grouped_mm` computes each expert's products, forward and backward, whatever the groups.

Rows beyond the last offset hold NaN in every test, so that reading one of them shows.
"""

from __future__ import annotations

import math

import grouped_oracle
import pytest
import torch
from assertions import assert_bitwise, assert_error_within_baseline
from torch import Tensor

import float8
from float8 import Float8LinearConfig

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "unit")
K, N = 96, 160
SIZES = (7, 0, 130, 1, 40)
BEYOND = 11


def config_of(recipe: str) -> Float8LinearConfig:
    return Float8LinearConfig.from_recipe_name(recipe)


def make(
    sizes=SIZES, features=(K, N), dtype=torch.bfloat16, beyond=BEYOND, seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens (T, K), weights (E, N, K), offsets and grad_output (T, N); experts differ in size."""
    generator = torch.Generator().manual_seed(seed)
    tokens, (k, n) = sum(sizes) + beyond, features

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    experts = len(sizes)
    x = randn(tokens, k) * (1 + 7 * torch.rand((tokens, 1), generator=generator))
    w = randn(experts, n, k) * torch.logspace(-1, 1, experts)[:, None, None] / math.sqrt(k)
    g = randn(tokens, n)
    x[tokens - beyond :] = g[tokens - beyond :] = math.nan
    offs = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    x, w, g = (t.to(dtype) for t in (x, w, g))
    return x.requires_grad_(), w.requires_grad_(), offs, g


def step(run, x, w, offs, g):
    """Output, grad_input and grad_weight (E, N, K) of ``run(x, weight.mT, offs)``."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    out = run(x, w.mT, offs)
    out.backward(g)
    return out.detach(), x.grad, w.grad


def results_of(recipe, x, w, offs, g):
    return step(lambda *a: float8.grouped_mm(*a, config_of(recipe)), x, w, offs, g)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_values(recipe, dtype):
    x, w, offs, g = make(dtype=dtype)
    out, grad_x, grad_w = results_of(recipe, x, w, offs, g)
    end = int(offs[-1])
    wanted = grouped_oracle.expected(recipe, x.detach(), w.detach().mT, offs.tolist(), g)
    for name, actual in (("output", out), ("grad_input", grad_x), ("grad_weight", grad_w.mT)):
        assert_error_within_baseline(
            actual, wanted[name].exact, wanted[name].plain, replay=(recipe, dtype), what=name
        )
    assert not out[end:].any()
    assert not grad_x[end:].any()
    assert not grad_w[1].any(), "expert 1 has no tokens"


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_group_is_a_linear_layer(recipe):
    x, w, offs, g = make(sizes=(130,), beyond=0)
    results = results_of(recipe, x, w, offs, g)
    x, weight = x.detach().requires_grad_(), w[0].detach().requires_grad_()
    out = float8.float8_linear(x, weight, None, config_of(recipe))
    out.backward(g)
    for actual, wanted in zip(results, (out, x.grad, weight.grad[None]), strict=True):
        assert_bitwise(actual, wanted, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_strides(recipe):
    x, w, offs, g = make()
    wanted = results_of(recipe, x, w, offs, g)
    copied = step(
        lambda x, w, offs: float8.grouped_mm(
            x.t().contiguous().t(), w.contiguous(), offs, config_of(recipe)
        ),
        *(x, w, offs, g.t().contiguous().t()),
    )
    # A high-precision GEMM reads the tokens as they lie, and may add in another order.
    exact = 2 if recipe == "rowwise_with_gw_hp" else 3
    for actual, expected in zip(copied[:exact], wanted[:exact], strict=True):
        assert_bitwise(actual, expected, recipe)
