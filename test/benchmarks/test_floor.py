"""The lower bound of emulation: every cast of a recipe, once, and nn.Linear's step."""

from __future__ import annotations

import pytest
import torch

from benchmarks.measuring import contenders, floor
from benchmarks.measuring.contenders import BASELINE, Operands, config_of
from benchmarks.measuring.shapes import Shape

SHAPE = Shape(32, 64, 128)


@pytest.fixture
def operands() -> Operands:
    return Operands.random(SHAPE, "cpu", 0)


@pytest.mark.parametrize(
    ("recipe", "casts"),
    [("tensorwise", 3), ("static", 3), ("rowwise", 6), ("rowwise_with_gw_hp", 4), ("blockwise", 5)],
)
def test_an_operand_that_two_products_share_is_cast_once(recipe, casts, operands):
    linear = contenders.step(BASELINE, "eager", operands)
    assert len(floor.casts(config_of(recipe, operands).plan, linear)) == casts


@pytest.mark.parametrize("recipe", ["static", "rowwise", "blockwise"])
def test_operands_come_back_rounded(recipe, operands):
    linear = contenders.step(BASELINE, "eager", operands)
    for operand, cast in floor.casts(config_of(recipe, operands).plan, linear):
        back = floor.there_and_back(operand, cast)
        assert back.dtype == torch.bfloat16
        assert back.shape == operand.shape
        alike = torch.corrcoef(torch.stack((back.flatten(), operand.flatten())).float())[0, 1]
        if recipe == "blockwise" or recipe == "static":  # elsewhere each row has its own factor
            assert alike > 0.99


def test_a_step_does_what_nn_linear_does(operands):
    linear = contenders.step(BASELINE, "eager", operands)
    floor.floor(config_of("tensorwise", operands).plan, linear, "eager")()
    x, w, g = operands.x, operands.linear.weight, operands.grad_output
    assert torch.equal(w.grad, g.t() @ x)
    assert torch.equal(x.grad, g @ w)
