"""The limit: bytes counted by hand for each recipe, and products that are those of the layer."""

from __future__ import annotations

import pytest
import torch

from benchmarks.measuring import limit
from benchmarks.measuring.contenders import Operands, config_of
from benchmarks.measuring.shapes import Shape
from float8.config import RECIPES

SHAPE = Shape(32, 64, 128)
X, W, G = 32 * 64, 64 * 128, 32 * 128  # elements

# Bytes per element: reads of 2 and writes of 1, as `limit.py` explains.
TWO_PASSES, ONE_PASS = 2 + 2 + 1 + 1, 2 + 1 + 1
BYTES = {
    "tensorwise": TWO_PASSES * (X + W + G),
    "delayed": ONE_PASS * (X + W + G),
    "static": ONE_PASS * (X + W + G),
    "rowwise": TWO_PASSES * (X + W + G),
    # x and g enter one float8 product each, as rows; w enters two, as rows and as a whole
    "rowwise_with_gw_hp": (2 + 1) * (X + G) + TWO_PASSES * W,
    "blockwise": ONE_PASS * (X + W + G),
}


@pytest.fixture
def operands() -> Operands:
    return Operands.random(SHAPE, "cpu", 0)


@pytest.mark.parametrize("recipe", BYTES)
def test_least_bytes_are_those_counted_by_hand(recipe, operands):
    assert limit.least_bytes(SHAPE, config_of(recipe, operands).plan) == BYTES[recipe]


def test_a_step_in_high_precision_moves_no_bytes_for_casts(operands):
    plan = config_of("rowwise_with_gw_hp", operands).plan
    assert limit.passes([]) == 0
    assert plan.grad_weight.a is None


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp", "blockwise"])
def test_its_products_are_the_layers(recipe, operands, monkeypatch):
    results: list[torch.Tensor] = []
    product = limit.product

    def noting(gemm, a, b):
        run = product(gemm, a, b)
        return lambda: results.append(run())

    monkeypatch.setattr(limit, "product", noting)
    limit.products(config_of(recipe, operands).plan, operands)()
    x, w, g = operands.x, operands.linear.weight, operands.grad_output
    for result, exact in zip(results, (x @ w.t(), g @ w, g.t() @ x), strict=True):
        error = (result.float() - exact.float()).norm() / exact.float().norm()
        assert error < 0.1  # float8's own is about 0.04


def test_recipes_that_multiply_alike_share_their_products(operands):
    configs = [config_of(recipe, operands) for recipe in ("tensorwise", "delayed", "static")]
    assert len(limit.makers(configs, operands)) == 2  # and the copy
    assert len(limit.makers([RECIPES["rowwise"], *configs], operands)) == 3


def test_the_limit_is_products_and_bytes_at_the_bandwidth_of_that_round(operands):
    plan = config_of("static", operands).plan
    samples = {limit.signature(plan): [1.0, 2.0], limit.COPY: [0.5, 0.25]}
    copied = 2 * BYTES["static"]  # twice as many as the casts move
    assert limit.seconds(SHAPE, plan, samples, copied) == [1.25, 2.125]
    assert limit.seconds(SHAPE, plan, {limit.COPY: [1.0]}, copied) is None


def test_a_copy_moves_each_byte_twice():
    copy = limit.Copy(torch.ones(48, dtype=torch.uint8), torch.zeros(48, dtype=torch.uint8))
    copy()
    assert torch.equal(copy.source, copy.target)
    assert copy.bytes_moved == 96
