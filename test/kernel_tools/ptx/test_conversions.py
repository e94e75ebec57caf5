"""Conversions are right: against a search in every value of a format, by exact comparison."""

import itertools
from bisect import bisect_right
from fractions import Fraction

import numpy as np
import pytest
from ptx_text import compute

RNG = np.random.default_rng(2)
ALL_BF16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
FORMATS = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}  # mantissa bits, bias, largest code


def value(code, format_):
    """A finite float8 code's value, by the definition of the format."""
    mantissa_bits, bias, _ = FORMATS[format_]
    exponent, mantissa = code >> mantissa_bits, code & (1 << mantissa_bits) - 1
    if exponent == 0:
        return Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias)


def neighbours(format_):
    """The values, and the float32 numbers on, just below and just above each halfway point."""
    exact = [value(code, format_) for code in range(FORMATS[format_][2] + 1)]
    halfway = np.float32([float((a + b) / 2) for a, b in itertools.pairwise(exact)])
    around = [np.nextafter(halfway, np.float32(to)) for to in (-np.inf, np.inf)]
    finite = np.float32([float(v) for v in exact])
    return exact, np.concatenate([finite, halfway, *around])


def encoded(x, exact, floats):
    """The code of one number: nearest even, saturating. ``floats``: the values of ``exact``."""
    if np.isnan(x):
        return 0x7F
    sign, magnitude = (0x80 if np.signbit(x) else 0), abs(float(x))
    if magnitude >= floats[-1]:
        return sign | len(exact) - 1
    low = bisect_right(floats, magnitude) - 1
    below, above = Fraction(magnitude) - exact[low], exact[low + 1] - Fraction(magnitude)
    return sign | (low + (above < below or (above == below and low % 2 == 1)))


@pytest.mark.parametrize("format_", list(FORMATS))
def test_float32_to_float8(format_):
    exact, near = neighbours(format_)
    random = RNG.integers(0, 1 << 32, 800, np.uint32).view(np.float32)
    scaled = (RNG.standard_normal(800) * np.exp2(RNG.uniform(-20, 18, 800))).astype(np.float32)
    x = np.concatenate([near, -near, random, scaled, np.float32([np.inf, -np.inf, np.nan, -0.0])])
    got = compute(f"cvt.rn.satfinite.{format_}x2.f32 $0, $1, $2;", x, x[::-1].copy(), output="u2")
    floats = [float(v) for v in exact]
    want = np.array([encoded(v, exact, floats) for v in x])
    assert np.array_equal(got >> 8, want)
    assert np.array_equal(got & 0xFF, want[::-1])


@pytest.mark.parametrize("format_", list(FORMATS))
def test_all_bfloat16_to_float8_and_back(format_):
    exact, _ = neighbours(format_)
    x = ALL_BF16
    got = compute(f"cvt.rn.satfinite.{format_}x2.f32 $0, $1, $1;", x, output="u2") & 0xFF
    finite = np.array([float(v) for v in exact])
    with np.errstate(invalid="ignore"):  # NaNs
        magnitude = np.minimum(np.abs(x.astype(np.float64)), finite[-1])
    chosen = finite[np.minimum(got & 0x7F, len(finite) - 1)]
    best = np.abs(magnitude[:, None] - finite).min(1)
    nan = np.isnan(x)
    assert (got[nan] == 0x7F).all()
    assert np.array_equal(np.abs(magnitude - chosen)[~nan], best[~nan])
    assert np.array_equal(got[~nan] >> 7, np.signbit(x[~nan]))
    codes = np.arange(256, dtype=np.uint16)
    back = compute(f"cvt.rn.f16x2.{format_}x2 $0, $1;", codes, output=np.uint32)
    decoded = (back & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
    known = (codes & 0x7F) < len(finite)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    assert np.array_equal(
        decoded[known], (sign * finite[np.minimum(codes & 0x7F, len(finite) - 1)])[known]
    )
    infinite = (codes & 0x7F) == 0x7C if format_ == "e5m2" else np.zeros(256, bool)
    assert np.isinf(decoded[infinite]).all() and np.isnan(decoded[~known & ~infinite]).all()


def test_float32_to_bfloat16_rounds_to_even():
    x = RNG.integers(0, 1 << 32, 4000, np.uint32)
    x[:1000] = x[:1000] & ~np.uint32(0xFFFF) | np.uint32(0x8000)  # halfway
    got = compute("cvt.rn.bf16.f32 $0, $1;", x.view(np.float32), output=np.uint16).astype(np.uint32)
    for bits, code in zip(x.tolist(), got.tolist(), strict=True):
        if (bits & 0x7FFFFFFF) > 0x7F800000:
            assert code == 0x7FFF
            continue
        high, low = bits >> 16, bits & 0xFFFF
        assert code == high + (low > 0x8000 or (low == 0x8000 and high & 1))


def test_pairs_put_the_first_operand_above():
    a, b = np.float32([1.0] * 4), np.float32([-2.0] * 4)
    got = compute("cvt.rn.bf16x2.f32 $0, $1, $2;", a, b, output=np.uint32)
    assert (got == 0x3F80_C000).all()
    got = compute("cvt.rn.f16x2.f32 $0, $1, $2;", a, b, output=np.uint32)
    assert (got == 0x3C00_C000).all()


def test_floats_to_integers_saturate_and_nan_is_zero():
    x = np.float32([1.5, 2.5, -1.5, 3e9, -3e9, np.nan, np.inf, -0.7])
    for rounding, want in {
        "rni": [2, 2, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1, -1],
        "rzi": [1, 2, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1, 0],
        "rmi": [1, 2, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1, -1],
        "rpi": [2, 3, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1, 0],
    }.items():
        got = compute(f"cvt.{rounding}.s32.f32 $0, $1;", x, output=np.int32)
        assert got.tolist() == want, rounding
    assert compute("cvt.rzi.u32.f32 $0, $1;", x, output=np.uint32).tolist()[2:5] == [
        0,
        3000000000,
        0,
    ]
    assert compute("cvt.rzi.s64.f32 $0, $1;", x, output=np.int64).tolist()[3] == 3000000000


def test_integers_are_extended_by_their_own_sign():
    x = np.uint32([0x80000001, 5])
    assert compute("cvt.s64.s32 $0, $1;", x, output=np.int64).tolist() == [-(2**31) + 1, 5]
    assert compute("cvt.u64.u32 $0, $1;", x, output=np.int64).tolist() == [2**31 + 1, 5]
    assert compute("cvt.u16.u32 $0, $1;", x, output=np.uint16).tolist() == [1, 5]
    x = np.int32([2**24 + 1, -(2**24) - 3, 7])
    got = compute("cvt.rn.f32.s32 $0, $1;", x, output=np.float32)
    assert got.tolist() == [2.0**24, -(2.0**24) - 4, 7]


def test_directed_roundings():
    x = np.array([1 + 2.0**-30, -1 - 2.0**-30, 1.0])
    above, below = np.nextafter(np.float32(1), np.float32(2)), np.float32(1)
    for direction, want in {
        "rz": [below, -below, 1], "rm": [below, -above, 1], "rp": [above, -below, 1],
        "rn": [below, -below, 1],
    }.items():  # fmt: skip
        got = compute(f"cvt.{direction}.f32.f64 $0, $1;", x, output=np.float32)
        assert np.array_equal(got, np.float32(want)), direction
