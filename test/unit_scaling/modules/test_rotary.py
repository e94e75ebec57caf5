"""Rotary embedding turns each pair of features by an angle that grows with the position."""

from __future__ import annotations

import math

import pytest
import torch
from scale_assertions import gradients, graphs_compiled

from float8.unit_scaling.modules.rotary import rotary


def oracle(x, base):
    """One complex number per pair, in float64, a position at a time."""
    *_, positions, d = x.shape
    out = torch.empty_like(x, dtype=torch.float64)
    for s in range(positions):
        for i in range(d // 2):
            angle = s * base ** (-2 * i / d)
            z = torch.complex(x[..., s, i].double(), x[..., s, i + d // 2].double())
            z = z * complex(math.cos(angle), math.sin(angle))
            out[..., s, i], out[..., s, i + d // 2] = z.real, z.imag
    return out


@pytest.mark.parametrize("shape", [(1, 2), (9, 6), (2, 3, 17, 8), (2, 0, 4), (5, 0)])
@pytest.mark.parametrize("base", [10000.0, 7.5])
def test_pairs_turn_by_their_angle(shape, base):
    x = torch.randn(shape)
    y = rotary(x, base)
    torch.testing.assert_close(y.double(), oracle(x, base), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    x = torch.randn(2, 33, 16).to(dtype)
    y, exact = rotary(x), oracle(x, 10000.0)
    assert y.dtype == dtype
    unit = torch.finfo(dtype).eps / 2
    assert float(((y.double() - exact).abs() - 1.01 * unit * exact.abs()).max()) < 1e-5


def test_lengths_stay_forward_and_backward():
    x = torch.randn(3, 50, 8, dtype=torch.float64)
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, gx = gradients(rotary, x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(gx.norm(dim=-1), g.norm(dim=-1))


def test_products_depend_on_the_distance_only():
    q, k = torch.randn(2, 8, dtype=torch.float64)
    q_S, k_S = (rotary(x.expand(40, 8)) for x in (q, k))
    products = q_S @ k_S.T
    for distance in (-3, 0, 5):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert float(products.diagonal(5)[0]) != pytest.approx(float(products.diagonal(6)[0]))


def test_an_odd_head_is_refused():
    with pytest.raises(ValueError, match="the head has 7"):
        rotary(torch.randn(3, 7))


@pytest.mark.parametrize("base", [0.0, -10.0, float("nan")])
def test_a_wavelength_that_is_not_positive_is_refused(base):
    with pytest.raises(ValueError, match=f"greater than 0, got {base}"):
        rotary(torch.ones(3, 4), base)


def test_sequence_lengths_share_a_graph():
    calls = [(torch.randn(2, s, 8),) for s in (5, 8, 13, 32, 40)]
    assert graphs_compiled(rotary, calls) <= 2
