"""`float8.unit_scaling.functional.activations`: fitted factors within their documented bands."""

import math

import pytest
import torch
from assertions import assert_bitwise
from scale_assertions import assert_unit_scaled, gradients, normal, scale_of

from float8.unit_scaling import functional as U

MULTS = [1 / 16, 1 / 4, 0.5, 1, 2, 4, 16]
DTYPES = [torch.float32, torch.bfloat16]


def expectation(function):
    """E f(x), x ~ N(0, 1), by the trapezium rule in float64."""
    x = torch.linspace(-10, 10, 20001, dtype=torch.float64)
    density = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return float((density * function(x)).sum() * 1e-3)


def scales_by_integration(function):
    """(std of the output, rms of the derivative) of a function of N(0, 1)."""

    def derivative(x):
        x = x.requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]

    mean = expectation(function)
    return (
        math.sqrt(expectation(lambda x: function(x) ** 2) - mean**2),
        math.sqrt(expectation(lambda x: derivative(x) ** 2)),
    )


def formula(name, mult):
    """gelu(m x)/m and x sigmoid(m x), from erf and exp."""
    if name == "gelu":
        return lambda x: x * (1 + torch.erf(mult * x / math.sqrt(2))) / 2
    return lambda x: x / (1 + torch.exp(-mult * x))


# --- gelu and silu


@pytest.mark.parametrize("mult", MULTS)
@pytest.mark.parametrize(("name", "out", "grad"), [("gelu", 0.04, 0.03), ("silu", 0.03, 0.04)])
def test_an_activation_is_its_formula_times_factors_as_good_as_documented(name, out, grad, mult):
    x = normal(501).double()
    found = gradients(lambda x: getattr(U, name)(x, mult, None), x)
    plain = gradients(formula(name, mult), x)
    true = scales_by_integration(formula(name, mult))
    for one, other, scale, band in zip(found, plain, true, (out, grad), strict=True):
        factor = one.norm() / other.norm()
        torch.testing.assert_close(one, other * factor)
        assert float(factor) * scale == pytest.approx(1, abs=band)


def test_a_constraint_ties_value_and_gradient():
    x = normal(20000)
    free = [scale_of(t) for t in gradients(lambda x: U.gelu(x, constraint=None), x)]
    tied = [scale_of(t) for t in gradients(lambda x: U.gelu(x, constraint="gmean"), x)]
    to_grad = [scale_of(t) for t in gradients(lambda x: U.gelu(x, 1, "to_grad_input_scale"), x)]
    assert tied[0] * tied[1] == pytest.approx(free[0] * free[1])
    assert to_grad[1] == pytest.approx(free[1]) and to_grad[0] != pytest.approx(free[0])


# --- softmax


def test_a_softmax_takes_torchs_arguments():
    x = normal(3, 4, dtype=torch.bfloat16)
    assert U.softmax(x, -1, torch.float32).dtype == torch.float32
    assert_bitwise(U.softmax(input=x, dim=1, _stacklevel=5), U.softmax(x, -1))
    assert U.softmax(normal(0, 4), 0).shape == (0, 4)


# --- dropout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_has_unit_scale_in_training(p, dtype):
    torch.manual_seed(7)  # not the seed of x, whose bits the mask would share
    y, grad = gradients(lambda x: U.dropout(x, p), normal(200, 300, dtype=dtype))
    assert_unit_scaled(y, stat="std")
    assert_unit_scaled(grad)
    assert float((y == 0).float().mean()) == pytest.approx(p, abs=0.01)
    assert torch.equal(y == 0, grad == 0)


@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.9, False), (0.0, True)])
def test_dropout_is_the_identity_in_evaluation(p, training):
    x = normal(50)
    y, grad = gradients(lambda x: U.dropout(x, p, training) * 1, x)
    _, plain = gradients(lambda x: x * 1, x)
    assert_bitwise(y, x)
    assert_bitwise(grad, plain)
