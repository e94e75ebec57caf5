"""`float8.unit_scaling.functional.products`: three products, a factor for each."""

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

from float8.unit_scaling import functional as U

DTYPES = [torch.float32, torch.bfloat16]
CONSTRAINTS = [None, "gmean", "hmean", "amean", "to_output_scale", "to_grad_input_scale"]


def linear_case(batch, k, n, dtype=torch.float32):
    return (
        normal(*batch, k, dtype=dtype),
        normal(n, k, dtype=dtype, seed=2),
        torch.zeros(n, dtype=dtype),
    )


# --- the primitives


def test_the_factors_of_a_scaled_linear_do_not_multiply_each_other():
    x, w, b = normal(2, 5, 3).double(), normal(4, 3, seed=2).double(), normal(4, seed=3).double()
    y, gx, gw, gb = gradients(lambda *a: U.scaled_linear(*a, (2.0, 3.0, 5.0)), x, w, b)
    y1, gx1, gw1, gb1 = gradients(torch.nn.functional.linear, x, w, b)
    torch.testing.assert_close((y, gx, gw, gb), (2 * y1, 3 * gx1, 5 * gw1, 5 * gb1))


def test_the_factors_of_a_scaled_matmul_do_not_multiply_each_other():
    x, w = normal(2, 5, 3).double(), normal(3, 4, seed=2).double()
    y, gx, gw = gradients(lambda *a: U.scaled_matmul(*a, (2.0, 3.0, 5.0)), x, w)
    y1, gx1, gw1 = gradients(torch.matmul, x, w)
    torch.testing.assert_close((y, gx, gw), (2 * y1, 3 * gx1, 5 * gw1))


# --- linear


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "k", "n"), [((3, 41), 129, 77), ((200,), 64, 256), ((2, 3, 33), 300, 50)]
)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_linear_has_the_scales_that_its_constraint_predicts(constraint, batch, k, n, dtype):
    x, w, b = linear_case(batch, k, n, dtype)
    y, gx, gw, gb = gradients(lambda *a: U.linear(*a, constraint=constraint), x, w, b)
    ideal = k**-0.5, n**-0.5
    chosen = {
        None: ideal,
        "gmean": (math.sqrt(ideal[0] * ideal[1]),) * 2,
        "hmean": (2 / (k**0.5 + n**0.5),) * 2,
        "amean": (sum(ideal) / 2,) * 2,
        "to_output_scale": (ideal[0],) * 2,
        "to_grad_input_scale": (ideal[1],) * 2,
    }[constraint]
    # the incoming gradient has the output's shape
    assert_unit_scaled(y, chosen[0] / ideal[0], samples=independent(x, w), what="output")
    assert_unit_scaled(gx, chosen[1] / ideal[1], samples=independent(y, w), what="input gradient")
    assert_unit_scaled(gw, samples=independent(y, x), what="weight gradient")
    assert_unit_scaled(gb, what="bias gradient")


def test_a_wrong_factor_is_seen():
    x, w, _ = linear_case((200,), 64, 256)
    y = U.linear(x, w * 1.1)
    with pytest.raises(AssertionError, match=r"rms 1\.\d+, claimed 1\.0000"):
        assert_unit_scaled(y, samples=independent(x, w))


def test_scale_power_is_the_exponent_of_each_fan():
    x, w, b = linear_case((6, 4), 9, 16)
    found = gradients(lambda *a: U.linear(*a, None, (1.0, 0.0, 2.0)), x, w, b)
    plain = gradients(torch.nn.functional.linear, x, w, b)
    factors = 1 / 9, 1, 1 / 24**2, 1 / 24**2
    for one, other, factor in zip(found, plain, factors, strict=True):
        torch.testing.assert_close(one, other * factor)


def test_a_readout_is_divided_by_the_fan_in():
    x, w, b = linear_case((50, 6), 400, 90)
    y, gx, gw, gb = gradients(U.linear_readout, x, w, b)
    assert_unit_scaled(y, 1 / 20, samples=independent(x, w))
    assert_unit_scaled(gx, samples=independent(y, w))
    assert_unit_scaled(gw, samples=independent(y, x))
    assert_unit_scaled(gb)


@pytest.mark.parametrize("shape", [(7,), (0, 7), (2, 0, 7), (1, 7)], ids=str)
def test_linear_takes_one_row_and_none(shape):
    y, gx, gw = gradients(U.linear, normal(*shape), normal(5, 7))
    assert y.shape == (*shape[:-1], 5) and gx.shape == shape
    assert gw.isfinite().all()


def test_the_weights_gradient_keeps_every_bit_of_its_factor():
    # one over the root of 300 rows in bfloat16 is 0.2 % away: a systematic error, not a rounding
    x, w, _ = linear_case((300,), 64, 64, torch.bfloat16)
    _, _, gw = gradients(U.linear, x, w)
    _, _, exact = gradients(lambda x, w: x @ w.t(), x.double(), w.double())
    exact = exact / 300**0.5
    ratio = float((gw.double() * exact).sum() / exact.square().sum())
    rounded = float(torch.tensor(300**-0.5).bfloat16()) * 300**0.5
    assert abs(ratio - 1) < 2e-4 < abs(rounded - 1) / 2


# --- matmul


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((130, 70), (70, 310)),
        ((3, 4, 50, 60), (3, 4, 60, 70)),
        ((90, 50), (7, 50, 60)),  # broadcast: the left gradient sums over 7 copies
        ((5, 1, 40, 50), (6, 50, 30)),
        ((2000, 70), (70,)),
        ((70,), (70, 2000)),
    ],
    ids=str,
)
def test_a_matmul_without_constraint_has_unit_scale_everywhere(left, right, dtype):
    a, b = normal(*left, dtype=dtype), normal(*right, dtype=dtype, seed=2)
    y, ga, gb = gradients(lambda a, b: U.matmul(a, b, constraint=None), a, b)
    assert_unit_scaled(y, samples=independent(a, b), what="output")
    assert_unit_scaled(ga, samples=independent(y, b), what="left gradient")
    assert_unit_scaled(gb, samples=independent(y, a), what="right gradient")


@pytest.mark.parametrize(
    ("constraint", "unit"), [("to_output_scale", 0), ("to_left_grad_scale", 1),
                             ("to_right_grad_scale", 2)],
)  # fmt: skip
def test_a_constraint_chooses_which_result_has_unit_scale(constraint, unit):
    a, b = normal(90, 400), normal(400, 1500, seed=2)
    results = gradients(lambda a, b: U.matmul(a, b, constraint=constraint), a, b)
    assert [abs(scale_of(x) - 1) < 0.02 for x in results] == [i == unit for i in range(3)]


def test_a_dot_product_is_a_matmul():
    a, b = normal(5), normal(5, seed=2)
    torch.testing.assert_close(U.matmul(a, b), a @ b / 5**0.5)


def test_a_matmul_of_nothing_is_empty():
    y, ga, gb = gradients(U.matmul, normal(0, 4), normal(4, 3))
    assert y.shape == (0, 3) and ga.shape == (0, 4) and not gb.any()
    assert not U.matmul(normal(3, 0), normal(0, 4)).any()
