"""The contenders of `bench_grouped_mm` are what their names say."""

from __future__ import annotations

import pytest
import torch
from assertions import assert_bitwise
from torch import nn

from benchmarks.bench_grouped_mm import BASELINE, Grouped, cached, function
from benchmarks.measuring.contenders import config_of
from float8.config import RECIPES


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_a_cached_weight_is_not_cast_in_a_step(recipe):
    weight, x = nn.Parameter(torch.randn(2, 48, 32).bfloat16()), torch.randn(64, 32).bfloat16()
    offs, g = torch.tensor([20, 64], dtype=torch.int32), torch.randn(64, 48).bfloat16()
    layer = cached(Grouped(weight, offs, function(BASELINE, True)), f"{recipe}+cached")
    first, second = (x.clone().requires_grad_() for _ in range(2))
    y = function(recipe, True)(first, weight.mT, offs)
    y.backward(g)
    weight.data.zero_()  # no version counter and no hook shows it
    z = layer(second)
    z.backward(g)
    assert_bitwise(z, y, recipe)
    assert_bitwise(second.grad, first.grad, recipe)


def test_parts_of_a_name():
    known = {"fast": [True] * 3, "precise": [False] * 3, "cached": [True, None, None]}
    for name, sums in known.items():
        gemms = config_of(f"rowwise+{name}").gemms
        assert [gemm.use_fast_accum for gemm in gemms.all] == sums
    gemms = config_of("blockwise+gw_hp").gemms
    assert gemms.grad_weight.a is gemms.grad_weight.b is None
    assert gemms.grad_input == RECIPES["blockwise"].gemms.grad_input
