"""Stochastic rounding: right on average, for every code; the same numbers in every run."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from assertions import assert_bitwise

from float8.kernels import moments, stochastic
from float8.kernels.stochastic import random_bits, stochastic_round

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.00237, -3.3e-5, 4.1e-8, 700.7])
def test_stochastic_rounding_is_unbiased(value, dtype):
    """The mean of n draws is within 5 standard deviations of x (a spacing times sqrt(pq / n))."""
    n = 1 << 16
    rounded = stochastic_round(torch.full((n,), value), dtype, 1234, 5).double()
    low, high = float(rounded.min()), float(rounded.max())
    exact = float(torch.tensor(value))
    assert low <= exact <= high
    part = (exact - low) / (high - low)
    noise = (high - low) * math.sqrt(max(part * (1 - part), 1 / n) / n)
    lost = (high - low) * 2.0**-13  # bits that 13 random bits do not reach
    assert abs(float(rounded.mean()) - exact) < 5 * noise + lost
    nearest = torch.tensor(value).to(dtype).double()
    assert abs(float(nearest) - exact) > 5 * noise + lost  # the planted fault would be seen


def test_stochastic_rounding_depends_on_its_key_alone():
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    first = stochastic_round(x, torch.bfloat16, 7, 3)
    torch.manual_seed(99)
    assert_bitwise(stochastic_round(x, torch.bfloat16, 7, 3), first)
    as_tensors = stochastic_round(x, torch.bfloat16, torch.tensor(7), torch.tensor(3))
    assert_bitwise(as_tensors, first)
    part = stochastic_round(x[1:], torch.bfloat16, 7, 3, first=1000)
    assert_bitwise(part, first[1:])
    for seed, offset in ((8, 3), (7, 4), (3, 7), (-7, 3)):
        other = stochastic_round(x, torch.bfloat16, seed, offset)
        same = (other == first).double().mean()
        assert 0.55 < same < 0.8, (seed, offset)  # 2/3: p^2 + q^2 over uniform p


def test_random_bits_are_independent_of_each_other_and_of_the_step():
    x = torch.empty(1 << 14)
    bits = random_bits(x, 1, 1)
    other = random_bits(x, 1, 2)
    each = torch.stack([(bits >> i) & 1 for i in range(32)]).double()
    assert ((each.mean(1) - 0.5).abs() < 5 * 0.5 / 128).all()
    correlation = torch.corrcoef(torch.cat([each, ((other & 1) == 1).double()[None]]))
    assert (correlation - torch.eye(33)).abs().max() < 6 / 128
    lag = torch.corrcoef(torch.stack([each[0, :-1], each[0, 1:]]))[0, 1]
    assert lag.abs() < 5 / 128


def test_stochastic_rounding_of_special_values():
    for dtype in (torch.bfloat16, torch.float16):
        largest = torch.finfo(dtype).max
        x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, largest, -largest, 1.0])
        for offset in range(20):
            assert_bitwise(stochastic_round(x, dtype, 0, offset), x.to(dtype))
        beyond = torch.tensor([largest * (1 + 2.0**-12), 3.4e38])
        assert_bitwise(stochastic_round(beyond, dtype, 0, 0), beyond.to(dtype))
        assert torch.equal(stochastic_round(x, dtype, 0, 0)[3:5].signbit(), x[3:5].signbit())


# --- codes


def positive_codes():
    """The values of 0x00 .. 0x7E, float64."""
    return oracle.table(E4M3)[:0x7F].double()


def turning_points(y, rounded):
    """The chance from which on y is rounded down, by bisection: the probability of rounding up."""
    below = rounded(torch.full_like(y, 1 - 2.0**-24))
    low, high = torch.zeros_like(y), torch.ones_like(y)
    for _ in range(24):
        middle = (low + high) / 2
        up = rounded(middle) > below
        low, high = torch.where(up, middle, low), torch.where(up, high, middle)
    return low.double()


def between_codes(first):
    """y (codes, 15) strictly between each code from ``first`` on and the next; those codes."""
    values = positive_codes()[first:]
    low, high = values[:-1, None], values[1:, None]
    return (low + (high - low) * torch.arange(1, 16) / 16).float(), low, high


def relative_bias(y, p, low, high, a):
    """Of y^a, by the probability p of the upper code; shares of the value, (codes,)."""
    mean = low**a + p * (high**a - low**a)
    return (mean / y.double() ** a - 1).abs().amax(1)


@pytest.mark.parametrize("a", [1 / 64, 0.1, 0.37, 0.7, 1.0, 1.3, 2.0, 3.0, 4.0])
def test_expanded_codes_have_the_stated_bias(a):
    """Of every code: the probability itself, not a sample of it."""
    y, low, high = between_codes(1)
    exponent = torch.full((1, 1), a)
    p = turning_points(y, lambda c: stochastic.on_expanded_grid(y, c, exponent))
    bias = relative_bias(y, p, low, high, a)
    bounds = (4e-5, 2e-6, 2e-7) if a <= 2 else (8e-3, 3e-4, 4e-5)
    assert float(bias[0]) < bounds[0]
    assert float(bias[1]) < bounds[1]
    assert float(bias[2:].max()) < bounds[2]
    # The planted fault: codes that are right on average stand for values that are not.
    naive = relative_bias(y, ((y - low) / (high - low)).double(), low, high, a)
    assert a == 1.0 or float(naive[2:].max()) > 10 * bounds[2]


def test_linear_codes_have_no_bias():
    y, low, high = between_codes(0)
    p = turning_points(y, lambda c: stochastic.on_grid(y, c, E4M3))
    assert float((p - (y - low) / (high - low)).abs().max()) <= 2.0**-23
    half = torch.tensor([[2.0**-25, 2.0**-24 * 7.25, 1 + 2.0**-12, 65503.0, 0.0]])
    p = turning_points(half, lambda c: stochastic.on_grid(half, c, torch.float16))
    assert torch.allclose(p, torch.tensor([[0.5, 0.25, 0.25, 31 / 32, 0]]).double(), atol=2.0**-23)


@pytest.mark.parametrize("form", ["float8", "float16", "expanded"])
def test_whatever_the_chance_specials_are_as_to_nearest(form):
    """Zeros, NaN and inf; what is nonzero stays so, and the largest magnitude of a group exact."""
    x = torch.randn(4, 70, generator=torch.Generator().manual_seed(3))
    x[0, :3] = torch.tensor([0.0, -0.0, 2.0**-130])
    x[1, 4:7] = torch.tensor([math.nan, math.inf, -math.inf])
    nearest = code(x, None, form)
    for chance in (torch.zeros_like(x), torch.full_like(x, 1 - 2.0**-23)):
        values = code(x, chance, form)
        assert torch.equal(values.isnan(), nearest.isnan())
        assert torch.equal(values[0, :2], nearest[0, :2])
        if form != "float8":
            assert torch.equal(values == 0, x == 0)
        if form == "expanded":
            largest = x.nan_to_num(0, 0, 0)[:, :32].abs().argmax(1, keepdim=True)
            assert_bitwise(values.gather(1, largest), nearest.gather(1, largest))
        rows, y = values[2:], x[2:]
        assert bool((rows.abs() <= y.abs() * 1.0001).all() if chance.any() else (rows != y).any())


def code(x, chance, form, group=32):
    """The values that x is coded as."""
    if form == "expanded":
        return moments.decode_expanded(*moments.encode_expanded(x, group, chance), group)
    dtype = E4M3 if form == "float8" else torch.float16
    return moments.decode_groups(*moments.encode_groups(x, group, dtype, chance), group)


def test_chances_are_uniform_and_each_state_has_its_own():
    x = torch.empty(1 << 14)
    drawn = [stochastic.chances(x, stochastic.seed_of_state(7, number), 5) for number in (-1, 0, 1)]
    for chance in drawn:
        assert 0 <= float(chance.min()) < 1e-3 and 1 - 1e-3 < float(chance.max()) < 1
        counts = torch.histc(chance, 16, 0, 1)
        assert float((counts - 1024).abs().max()) < 5 * math.sqrt(1024)
    correlation = torch.corrcoef(torch.stack(drawn)) - torch.eye(3)
    assert float(correlation.abs().max()) < 5 / 128
    shard = stochastic.chances(x[1000:], stochastic.seed_of_state(7, 1), 5, first=1000)
    assert_bitwise(shard, drawn[2][1000:])
