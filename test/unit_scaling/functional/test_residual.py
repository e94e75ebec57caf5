"""Factors of values and of gradients; sums and residual connections of unit scale."""

import math

import pytest
import torch
from assertions import assert_bitwise
from scale_assertions import assert_unit_scaled, gradients, normal

from float8.unit_scaling import functional as U
from float8.unit_scaling.scale import scale_bwd, scale_fwd

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


# --- add


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_shifts_and_leaves_the_scale_alone(dtype):
    x = normal(40, dtype=dtype)
    assert_bitwise(U.add(x, 2.5), x + 2.5)
    assert_bitwise(U.add(2.5, x), 2.5 + x)
    assert_bitwise(U.add(input=x, other=3, alpha=2), x + 6)
    _, grad = gradients(lambda x: U.add(x, 1), x)
    _, plain = gradients(lambda x: x + 1, x)
    assert_bitwise(grad, plain)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_of_one_element_shifts_too(shape):
    x, shift = normal(400), torch.full(shape, 5.0)
    for y, gx, gs in (
        gradients(lambda x, s: U.add(x, s, None), x, shift),
        gradients(lambda x, s: U.add(s, x, None), x, shift),
    ):
        torch.testing.assert_close(y.flatten(), x + 5)
        assert_unit_scaled(gx)
        assert abs(float(gs)) < 3, "one number N(0, 1), the sum of 400 over its root"


def test_integers_have_no_scale():
    positions = torch.arange(5)
    assert_bitwise(U.add(positions, positions, alpha=2), positions * 3)
    x = normal(5)
    torch.testing.assert_close(U.add(x, positions), (x + positions) * 0.5**0.5)


# --- residual connections


@pytest.mark.parametrize("tau", [0.0, 0.2, 1.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_residual_connection_has_unit_scale_throughout(tau, dtype):
    x, inside = normal(90, 100, dtype=dtype), {}

    def branch(r):
        r.register_hook(lambda g: inside.__setitem__("leaving", g))
        out = torch.roll(r, 1, 0)  # as independent of r as another tensor, of the same scale
        out.register_hook(lambda g: inside.__setitem__("arriving", g))
        return out

    y, grad = gradients(lambda x: U.residual_apply(branch, x, tau), x)
    assert_unit_scaled(y)
    assert_unit_scaled(grad)
    assert_unit_scaled(inside["arriving"], what="gradient in the branch")
    assert_unit_scaled(inside["leaving"], what="gradient in the branch")


@pytest.mark.parametrize("tau", [0.2, 1.0, 3.0])
def test_a_residual_connections_gradient_is_its_derivative(tau):
    x, w = normal(7, 5).double(), normal(5, 5, seed=4).double()
    y, gx = gradients(lambda x: U.residual_apply(lambda r: torch.sin(r @ w), x, tau), x)
    plain, plain_gx = gradients(lambda x: (tau * torch.sin(x @ w) + x) / math.sqrt(1 + tau**2), x)
    torch.testing.assert_close((y, gx), (plain, plain_gx))


# --- scale_fwd and scale_bwd


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 7), (2, 1, 3)], ids=str)
def test_each_scales_its_own_direction_only(dtype, shape):
    x = normal(*shape, dtype=dtype)
    forward, grad_forward = gradients(lambda x: scale_fwd(x, 0.3), x)
    backward, grad_backward = gradients(lambda x: scale_bwd(x, 0.3), x)
    _, grad = gradients(lambda x: x * 1, x)
    wide = torch.promote_types(dtype, torch.float32)
    assert_bitwise(forward, (x.to(wide) * 0.3).to(dtype))
    assert_bitwise(grad_forward, grad)
    assert_bitwise(backward, x)
    assert_bitwise(grad_backward, (grad.to(wide) * 0.3).to(dtype))
