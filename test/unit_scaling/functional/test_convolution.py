"""`float8.unit_scaling.functional.convolution`: the terms of each product are counted."""

import math

import pytest
import torch
from scale_assertions import (
    assert_unit_scaled,
    gradients,
    independent,
    normal,
    scale_of,
)
from torch.nn import functional as F

from float8.unit_scaling import functional as U

OPTIONS = [
    {},
    {"stride": 3},
    {"dilation": 4},
    {"padding": 2},
    {"padding": "same"},
    {"padding": "same", "dilation": 3},
    {"padding": "valid"},
    {"padding": 9, "stride": 2, "dilation": 2},
    {"groups": 4},
    {"groups": 4, "stride": (2,), "padding": (3,), "dilation": (1,)},
]


def case(options, dtype=torch.float32, length=47, batch=(12,), taps=5):
    groups = options.get("groups", 1)
    return (
        normal(*batch, 24, length, dtype=dtype),
        normal(32, 24 // groups, taps, dtype=dtype, seed=2),
        torch.zeros(32, dtype=dtype),
    )


def counted(options, x, w):
    """The terms of an input's gradient and of a weight's, on average, by counting.

    A convolution of ones by ones counts the terms of its output; its gradients count the others.
    """
    _, gx, gw = _of_ones(options, torch.ones_like(x.double()), torch.ones_like(w.double()))
    return float(gx.mean()), float(gw.mean())


def _of_ones(options, x, w):
    leaves = x.requires_grad_(), w.requires_grad_()
    y = F.conv1d(x, w, **options)
    return (y, *torch.autograd.grad(y, leaves, torch.ones_like(y)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("batch", [(12,), ()], ids=str)
def test_the_factors_are_the_roots_of_the_counts(options, batch):
    x, w, b = (t.double() for t in case(options, batch=batch))
    found = gradients(lambda *a: U.conv1d(*a, **options, constraint=None), x, w, b)
    plain = gradients(lambda *a: F.conv1d(*a, **options), x, w, b)
    terms_input, terms_weight = counted(options, x, w)
    factors = (
        (w.shape[1] * w.shape[2]) ** -0.5,
        terms_input**-0.5,
        terms_weight**-0.5,
        (found[0].numel() / 32) ** -0.5,
    )
    for one, other, factor in zip(found, plain, factors, strict=True):
        torch.testing.assert_close(one, other * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_convolution_without_constraint_has_unit_scale_everywhere(options, dtype):
    x, w, b = case(options, dtype)
    y, gx, gw, gb = gradients(lambda *a: U.conv1d(*a, **options, constraint=None), x, w, b)
    padded = options.get("padding", "valid") != "valid"
    predicted = _padded_output(options, x, w) if padded else 1.0
    assert_unit_scaled(y, predicted, samples=independent(x, w), what="output")
    assert_unit_scaled(gx, samples=independent(y, w), what="input gradient")
    assert_unit_scaled(gw, samples=independent(y, x), what="weight gradient")
    assert_unit_scaled(gb, what="bias gradient")


def _padded_output(options, x, w):
    """The scale of a padded output: the root of the mean share of terms that are not padding."""
    y = F.conv1d(torch.ones_like(x.double()), torch.ones_like(w.double()), **options)
    return math.sqrt(float(y.mean()) / (w.shape[1] * w.shape[2]))


def test_values_do_not_depend_on_the_length():
    x, w, _ = case({}, length=60)
    for padding in (0, 3, "same"):
        whole, part = (U.conv1d(t, w, padding=padding) for t in (x, x[..., :30]))
        torch.testing.assert_close(whole[..., :25], part[..., :25])


@pytest.mark.parametrize(
    ("constraint", "units"),
    [("to_output_scale", (True, False)), ("to_grad_input_scale", (False, True)),
     ("gmean", (False, False))],
)  # fmt: skip
def test_the_constraint_is_obeyed(constraint, units):
    x, w, b = normal(8, 16, 60), normal(64, 16, 3), torch.zeros(64)
    y, gx, gw, _ = gradients(lambda *a: U.conv1d(*a, constraint=constraint), x, w, b)
    assert tuple(abs(scale_of(t) - 1) < 0.05 for t in (y, gx)) == units
    assert_unit_scaled(gw, samples=independent(y, x))
    if constraint == "gmean":
        assert scale_of(y) * scale_of(gx) == pytest.approx(1, abs=0.1)


def test_scale_power_is_the_exponent_of_each_count():
    x, w, b = case({})
    found = gradients(lambda *a: U.conv1d(*a, 1, 0, 1, 1, None, (1.0, 0.0, 0.0)), x, w, b)
    plain = gradients(F.conv1d, x, w, b)
    for one, other, factor in zip(found, plain, (1 / 120, 1, 1, 1), strict=True):
        torch.testing.assert_close(one, other * factor, rtol=1e-4, atol=1e-4)


def test_an_empty_batch_is_convolved():
    y, gx, gw = gradients(U.conv1d, normal(0, 4, 9), normal(6, 4, 3))
    assert y.shape == (0, 6, 7) and gx.shape == (0, 4, 9) and not gw.any()
