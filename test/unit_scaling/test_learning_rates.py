"""Learning rates are those of u-muP's table 2, which is written out here once more."""

from __future__ import annotations

import math

import pytest
import torch

import float8.unit_scaling as uu
from float8.unit_scaling.learning_rates import (
    lr_scale_for_depth,
    lr_scale_func_adam,
    lr_scale_func_sgd,
)

# shape, type, depth -> Adam, SGD behind a constrained readout
TABLE = [
    ((12, 9), "weight", None, 1 / 3, 3.0),
    ((12, 9), "weight", 4, 1 / 6, 1.5),
    ((12, 9), "output", None, 1.0, 1.0),
    ((12, 9), "output", 16, 0.25, 0.25),
    ((12,), "bias", None, 1.0, 12.0),
    ((12,), "bias", 9, 1 / 3, 4.0),
    ((12,), "norm", None, 1.0, 12.0),
    ((3, 4), "norm", None, 1.0, 12.0),  # normalised together: the width is 12
    ((16,), "weight", None, 0.25, 4.0),
    ((5, 3, 3), "weight", None, 1 / 3, 3.0),  # a convolution: fan-in counts the kernel
    ((5, 4, 2, 2), "weight", None, 0.25, 4.0),
    ((), "weight", None, 1.0, 1.0),
    ((), "bias", None, 1.0, 1.0),
    ((7, 1), "weight", None, 1.0, 1.0),
]


@pytest.mark.parametrize(("shape", "mup_type", "depth", "adam", "sgd"), TABLE)
def test_learning_rates_follow_the_table(shape, mup_type, depth, adam, sgd):
    p = uu.Parameter(torch.empty(shape), mup_type, depth)
    assert math.isclose(lr_scale_func_adam(p), adam)
    assert math.isclose(lr_scale_func_sgd("to_output_scale")(p), sgd)
    assert lr_scale_func_sgd(None)(p) == lr_scale_func_adam(p)


@pytest.mark.parametrize("depth", [None, 1, 2, 81])
def test_depth_alone_divides_by_its_root(depth):
    p = uu.Parameter(torch.empty(3, 5), "weight", depth)
    assert math.isclose(lr_scale_for_depth(p), (depth or 1) ** -0.5)


def test_a_constrained_readout_shrinks_gradients_by_what_sgd_gives_back():
    # Why the second table: the ratio of the gradients is the ratio of the learning rates.
    torch.manual_seed(0)
    width, rows, classes = 64, 256, 2048
    hidden, gradients = uu.Linear(width, width), {}
    x, g = torch.randn(rows, width), torch.randn(rows, classes)
    for constraint in (None, "to_output_scale"):
        readout = uu.LinearReadout(width, classes, constraint=constraint)
        hidden.zero_grad()
        readout(hidden(x)).backward(g)
        gradients[constraint] = float(hidden.weight.grad.norm())
    by_sgd = lr_scale_func_sgd("to_output_scale")(hidden.weight) / lr_scale_func_sgd(None)(
        hidden.weight
    )
    assert by_sgd == pytest.approx(width)
    # 1/sqrt(classes) against 1/width, so with width**2 classes the two gradients would be equal
    found = gradients[None] / gradients["to_output_scale"]
    assert found == pytest.approx(width / classes**0.5, rel=0.05)


@pytest.mark.parametrize("scale", [lr_scale_func_adam, lr_scale_func_sgd("to_output_scale")])
def test_an_unknown_type_is_refused(scale):
    p = uu.Parameter(torch.empty(3, 5), "weight")
    p.mup_type = "hidden"
    with pytest.raises(ValueError, match=r"one of \['weight'.*got 'hidden'"):
        scale(p)


def test_an_unknown_readout_constraint_is_refused():
    with pytest.raises(ValueError, match="LinearReadout; got 'gmean'"):
        lr_scale_func_sgd("gmean")
