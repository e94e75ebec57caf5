"""The codes of optimizer states against float64 and the 256-code table; the update rules."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from assertions import assert_bitwise
from shapes import Case, pairs

from float8.kernels import moments, stochastic

E4M3 = torch.float8_e4m3fn
SHAPES = ((4, 256), (3, 300), (1, 5), (37, 1), (5, 123), (1, 1))
GROUPS = (128, 32, 96, 1)
RANGE = math.log2(448 * 2**9)


def groups(x, group):
    """The groups of every row, as slices of (row, columns)."""
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], group):
            yield row, slice(first, min(first + group, x.shape[1]))


def expanded_oracle(x, group):
    """What COAT's expansion makes of x, in float64: the y that are rounded to E4M3."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row, cols in groups(x, group):
        values = x[row, cols].to(torch.float64)
        sizes = values.abs()[values != 0]
        if not len(sizes):
            continue
        log2_range = float(torch.log2(sizes.max() / sizes.min()))
        k = 64.0 if log2_range < RANGE / 64 else RANGE / log2_range
        ratio = values.abs() / sizes.max()
        y[row, cols] = ratio.pow(k).mul(448) * values.sign()
    return y


def second_moments(shape, log2_range, seed):
    """Positive values over 2^log2_range, float32."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(shape, generator=generator, dtype=torch.float64) * log2_range
    return torch.exp2(exponents - log2_range - 20).float()


@pairs(shape=SHAPES, group=GROUPS, fill=("normal", "wide", "one_large", "zeros"))
def test_linear_codes_are_those_of_the_table(shape, group, fill):
    case = Case(shape, fill=fill, seed=1)
    x = case.make()
    codes, scale = moments.encode_groups(x, group, E4M3)
    expected, scales = oracle.quantize(x, (1, group), E4M3)
    assert_bitwise(scale, scales, (case, group), "scale")
    assert_bitwise(codes, expected, (case, group), "codes")
    exact = oracle.values(codes, scale, (1, group)).float()
    assert_bitwise(moments.decode_groups(codes, scale, group), exact, (case, group), "values")


@pairs(shape=SHAPES, group=GROUPS, exponent=(-140, -30, 0, 100))
def test_scaled_float16_keeps_eleven_bits_and_every_nonzero(shape, group, exponent):
    case = Case(shape, fill="wide", exponent=exponent, seed=2)
    x = case.make()
    codes, scale = moments.encode_groups(x, group, torch.float16)
    decoded = moments.decode_groups(codes, scale, group).double()
    for row, cols in groups(x, group):
        values, amax = x[row, cols].double(), float(x[row, cols].abs().max())
        # Half a spacing of normal codes, a whole one of subnormals, and scales from 2^-126 on.
        step = max(amax * 2.0**-39, 2.0**-149)
        bound = values.abs() * 2.0**-10.9 + step
        assert ((decoded[row, cols] - values).abs() <= bound).all(), (case, group, row, cols)
    assert ((codes != 0) == (x != 0)).all(), (case, group)


@pairs(shape=SHAPES, group=GROUPS, log2_range=(0, 0.1, 3, 17.8, 40, 70))
def test_expanded_codes_are_coats_in_float64(shape, group, log2_range):
    replay = (shape, group, log2_range)
    x = second_moments(shape, log2_range, seed=3)
    codes, _, _ = moments.encode_expanded(x, group)
    y = expanded_oracle(x, group)
    found = oracle.table(E4M3)[codes.view(torch.uint8).long()]
    # The nearest code, or an adjacent one where float32 logarithms moved a tie.
    spacing = (y.abs() / 8).clamp(min=2.0**-9)
    assert ((found - y).abs() <= spacing * 0.51).all(), replay
    nearest = oracle.encode(y, E4M3)
    assert (nearest != codes.view(torch.uint8)).double().mean() < 0.01 + 1 / x.numel(), replay


def test_every_guard_of_the_expansion():
    nan, inf = math.nan, math.inf
    cases = {
        "a constant group": ([5.0] * 8, [5.0] * 8),
        "all zeros": ([0.0] * 8, [0.0] * 8),
        "a zero in lane 0": ([0, 1.0, 2, 4, 8, 16, 32, 64], None),
        "zeros inside": ([1.0, 0, 2, 0, 0, 1, 1, 2], [1.0, 0, 2, 0, 0, 1, 1, 2]),
        "NaN alone": ([nan, 1.0, 2, 1, 2, 1, 2, 1], [nan, 1.0, 2, 1, 2, 1, 2, 1]),
        "inf alone": ([1, inf, 2.0, 1, -inf, 1, 2, 1], [1, nan, 2.0, 1, nan, 1, 2, 1]),
        "tiny and constant": ([1e-38] * 8, None),
        "subnormal": ([1e-45, 1e-40, 0, 1e-45, 3e-42, 1e-45, 1e-45, 1e-45], None),
        "huge beside tiny": ([3e38, 1e-45, 1.0, 0, 1e-38, 3e38, 1e20, 1], None),
        "signed": ([-4.0, 1, -1, 4, 4, -4, 1, 1], [-4.0, 1, -1, 4, 4, -4, 1, 1]),
        "negative zero": ([-0.0, 1.0, 1, 1, 1, 1, 1, 1], [-0.0, 1.0, 1, 1, 1, 1, 1, 1]),
    }
    for what, (values, expected) in cases.items():
        x = torch.tensor([values])
        codes, scale, exponent = moments.encode_expanded(x, 8)
        decoded = moments.decode_expanded(codes, scale, exponent, 8)
        assert scale.isfinite().all() and (scale >= 2.0**-126).all(), what
        assert ((exponent >= 1 / 64) & (exponent <= 4)).all(), what
        assert torch.equal(decoded == 0, x == 0), what
        assert torch.equal(decoded.isnan(), ~x.isfinite()), what
        if expected is not None:
            both = torch.cat([decoded, torch.tensor([expected])]).nan_to_num(7.0)
            assert torch.allclose(both[0], both[1], rtol=1e-5, atol=0), what
    lane_0 = torch.tensor([cases["a zero in lane 0"][0]])
    codes = moments.encode_expanded(lane_0, 8)[0].float()
    assert codes.max() == 448 and codes[codes > 0].min() == 2.0**-9  # the whole range is used


@pytest.mark.parametrize("form", ["linear", "float16", "expanded"])
def test_a_special_element_does_not_change_the_others(form):
    """What shares a group with NaN or inf is coded as beside a zero, ragged groups included."""
    for special in (math.nan, math.inf, -math.inf):
        x = second_moments((3, 70), 12, seed=6)
        x[1, 40] = 0
        spoilt = x.clone()
        spoilt[1, 40] = special
        coded = [code(y, form) for y in (x, spoilt)]
        assert coded[1][1, 40].isnan()
        coded[1][1, 40] = 0
        assert_bitwise(coded[1], coded[0], (form, special))


def code(x, form, group=32):
    if form == "expanded":
        return moments.decode_expanded(*moments.encode_expanded(x, group), group)
    dtype = E4M3 if form == "linear" else torch.float16
    return moments.decode_groups(*moments.encode_groups(x, group, dtype), group)


def test_no_elements():
    for empty in (torch.ones(0, 7), torch.ones(7, 0)):
        codes, scale, exponent = moments.encode_expanded(empty, 4)
        assert codes.shape == empty.shape and scale.shape == (len(empty), -(-empty.shape[1] // 4))
        assert moments.decode_expanded(codes, scale, exponent, 4).shape == empty.shape


@pytest.mark.slow
def test_compiled_codes_are_the_eager_ones():
    """Rounded at random, linear codes are equal, and expanded codes differ by one at most."""

    def step(m, v, number):
        m32 = moments.decode_groups(*m, 64) * 0.9 + 0.01
        v32 = moments.decode_expanded(*v, 64) * 0.99
        return (
            moments.encode_groups(m32, 64, E4M3, stochastic.chances(m32, 5, number, 1000)),
            moments.encode_expanded(v32, 64, stochastic.chances(v32, 6, number)),
        )

    m, v = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(9))
    m[1, 66] = v[1, 3] = math.nan
    v = v[:, :64].square() * 1e-3  # whole groups: every piece of a graph costs seconds
    v[2] = 0
    states = moments.encode_groups(m, 64, E4M3), moments.encode_expanded(v, 64)
    states = (*states, torch.tensor(3, dtype=torch.int32))
    (m1, v1), (m2, v2) = step(*states), torch.compile(step, fullgraph=True)(*states)
    assert_bitwise(m2[0], m1[0], what="linear codes")
    assert_bitwise(m2[1], m1[1], what="scales")
    apart = (v2[0].view(torch.uint8).int() - v1[0].view(torch.uint8).int()).abs()
    assert apart[~v1[0].float().isnan()].max() <= 1
    assert torch.equal(v2[0].float().isnan(), v1[0].float().isnan())
    assert torch.equal(v2[0].float() == 0, v1[0].float() == 0)
    torch.testing.assert_close(v2[2], v1[2], rtol=1e-5, atol=0)


@pytest.mark.slow
def test_compiled_expanded_codes_of_a_short_last_group_are_the_eager_ones():
    def step(codes, scale, exponent):
        return moments.encode_expanded(
            moments.decode_expanded(codes, scale, exponent, 64) * 0.99, 64
        )

    v = torch.randn(3, 70, generator=torch.Generator().manual_seed(9)).square() * 1e-3
    v[:, 64:] *= 1e-9  # a range of its own
    v[1, 3] = v[2, 66] = math.nan
    state = moments.encode_expanded(v, 64)
    expected, found = step(*state), torch.compile(step, fullgraph=True)(*state)
    assert torch.equal(found[0].float().isnan(), v.isnan())
    apart = found[0].view(torch.uint8).int() - expected[0].view(torch.uint8).int()
    assert apart.abs().max() <= 1
    for compiled, eager in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=0)


def test_an_element_that_float16_would_lose_keeps_its_sign():
    x = torch.tensor([[1.0, 1e-20, -1e-20, 0.0]])
    codes, scale = moments.encode_groups(x, 4, torch.float16)
    smallest = 2.0**-24 * scale.item()
    assert moments.decode_groups(codes, scale, 4)[0, 1:].tolist() == [smallest, -smallest, 0.0]
