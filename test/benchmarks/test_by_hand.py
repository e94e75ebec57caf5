"""The layers written by hand compute what the library computes, to the bit."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bench_overhead
from benchmarks.measuring.by_hand import FUNCTIONS
from benchmarks.measuring.contenders import BASELINE, Operands
from benchmarks.measuring.shapes import Shape
from benchmarks.measuring.step import Step, saved_bytes


@pytest.mark.parametrize(
    "shape", [Shape(16, 16, 16), Shape(64, 48, 32), Shape(96, 256, 128)], ids=str
)
@pytest.mark.parametrize("recipe", FUNCTIONS)
def test_same_bits(recipe, shape):
    for seed in range(3):
        operands = Operands.random(shape, "cpu", seed)
        bench_overhead.check_same(recipe, *bench_overhead.pair(recipe, operands), operands)


@pytest.mark.parametrize("recipe", FUNCTIONS)
def test_same_bytes_kept_for_backward(recipe):
    operands = Operands.random(Shape(96, 256, 128), "cpu", 0)
    ours, by_hand = (
        saved_bytes(Step(layer, layer, operands.x, operands.grad_output))
        for layer in bench_overhead.pair(recipe, operands)
    )
    assert ours == pytest.approx(by_hand, abs=16)  # where the scales lie


def test_layers_that_differ_are_not_compared():
    operands = Operands.random(Shape(32, 64, 32), "cpu", 0)
    ours, _ = bench_overhead.pair("rowwise", operands)
    _, other = bench_overhead.pair("tensorwise", operands)
    with pytest.raises(AssertionError, match=r"rowwise: .* differs in its output \(\d"):
        bench_overhead.check_same("rowwise", ours, other, operands)


def test_both_kinds_of_layer_share_the_weight():
    operands = Operands.random(Shape(16, 16, 16), "cpu", 0)
    layers = bench_overhead.pair("delayed", operands)
    assert all(layer.weight is operands.linear.weight for layer in layers)
    assert list(bench_overhead.makers(["delayed"], operands, True)) == [
        BASELINE,
        "by hand delayed",
        "delayed",
    ]
    assert all(torch.isfinite(g).all() for g in bench_overhead.gradients(layers[0], operands))
