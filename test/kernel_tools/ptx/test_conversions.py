"""Conversions are right: against a search in every value of a format, by exact comparison."""

from bisect import bisect_right
from fractions import Fraction

import numpy as np
import pytest
from ptx_text import compute

RNG = np.random.default_rng(2)
ALL_BF16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
FORMATS = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}  # mantissa bits, bias, largest code


def values(format_):
    """The finite float8 codes' values, by the definition of the format."""
    mantissa_bits, bias, largest = FORMATS[format_]
    for code in range(largest + 1):
        exponent, mantissa = code >> mantissa_bits, code & (1 << mantissa_bits) - 1
        fraction = Fraction(mantissa, 1 << mantissa_bits) + (exponent > 0)
        yield fraction * Fraction(2) ** (max(exponent, 1) - bias)


def encoded(x, exact):
    """The code of one number: nearest even, saturating."""
    if np.isnan(x):
        return 0x7F
    sign, magnitude = (0x80 if np.signbit(x) else 0), abs(float(x))
    if magnitude >= exact[-1]:
        return sign | len(exact) - 1
    low = bisect_right(exact, magnitude) - 1
    below, above = Fraction(magnitude) - exact[low], exact[low + 1] - Fraction(magnitude)
    return sign | (low + (above < below or (above == below and low % 2 == 1)))


@pytest.mark.parametrize("format_", FORMATS)
def test_float32_to_float8_and_back(format_):
    exact = list(values(format_))
    finite = np.array(exact, np.float32)
    halfway = (finite[1:] + finite[:-1]) / 2
    around = [np.nextafter(halfway, np.float32(to)) for to in (-np.inf, np.inf)]
    random = RNG.integers(0, 1 << 32, 400, np.uint32).view(np.float32)
    scaled = (RNG.standard_normal(400) * np.exp2(RNG.uniform(-20, 18, 400))).astype(np.float32)
    near = np.concatenate([finite, halfway, *around])
    x = np.concatenate([near, -near, random, scaled, ALL_BF16[::37], np.float32([np.inf, np.nan])])
    got = compute(f"cvt.rn.satfinite.{format_}x2.f32 $0, $1, $2;", x, x[::-1].copy(), output="u2")
    want = np.array([encoded(v, exact) for v in x])
    assert np.array_equal(got >> 8, want)
    assert np.array_equal(got & 0xFF, want[::-1])
    codes = np.arange(256, dtype=np.uint16)
    back = compute(f"cvt.rn.f16x2.{format_}x2 $0, $1;", codes, output=np.uint32).astype(np.uint16)
    beyond = [np.inf, np.nan, np.nan, np.nan] if format_ == "e5m2" else [np.nan]
    both = np.concatenate([finite, beyond, -finite, np.negative(beyond)])
    assert np.array_equal(back.view(np.float16).astype(np.float32), both, equal_nan=True)


def test_float32_to_bfloat16_rounds_to_even():
    x = RNG.integers(0, 1 << 32, 4000, np.uint32)
    x[:1000] = x[:1000] & ~np.uint32(0xFFFF) | np.uint32(0x8000)  # halfway
    got = compute("cvt.rn.bf16.f32 $0, $1;", x.view(np.float32), output=np.uint16).astype(np.uint32)
    for bits, code in zip(x.tolist(), got.tolist(), strict=True):
        high, low = bits >> 16, bits & 0xFFFF
        rounded = high + (low > 0x8000 or (low == 0x8000 and high & 1))
        assert code == (0x7FFF if (bits & 0x7FFFFFFF) > 0x7F800000 else rounded)


@pytest.mark.parametrize(("to", "expected"), [("bf16x2", 0x3F80_C000), ("f16x2", 0x3C00_C000)])
def test_pairs_put_the_first_operand_above(to, expected):
    a, b = np.float32([1.0] * 4), np.float32([-2.0] * 4)
    assert (compute(f"cvt.rn.{to}.f32 $0, $1, $2;", a, b, output=np.uint32) == expected).all()


TOP = 2**31 - 1
FLOATS = np.float32([1.5, 2.5, -1.5, 3e9, -3e9, np.nan, np.inf, -0.7])


@pytest.mark.parametrize(
    ("opcode", "x", "output", "want"),
    [
        ("rni.s32.f32", FLOATS, "i4", [2, 2, -2, TOP, -TOP - 1, 0, TOP, -1]),
        ("rzi.s32.f32", FLOATS, "i4", [1, 2, -1, TOP, -TOP - 1, 0, TOP, 0]),
        ("rmi.s32.f32", FLOATS, "i4", [1, 2, -2, TOP, -TOP - 1, 0, TOP, -1]),
        ("rpi.s32.f32", FLOATS, "i4", [2, 3, -1, TOP, -TOP - 1, 0, TOP, 0]),
        ("rzi.u32.f32", FLOATS[2:5], "u4", [0, 3000000000, 0]),
        ("rzi.s64.f32", FLOATS[3:4], "i8", [3000000000]),
        ("s64.s32", np.uint32([0x80000001, 5]), "i8", [-TOP, 5]),
        ("u64.u32", np.uint32([0x80000001, 5]), "i8", [TOP + 2, 5]),
        ("u16.u32", np.uint32([0x80000001, 5]), "u2", [1, 5]),
        ("rn.f32.s32", np.int32([2**24 + 1, -(2**24) - 3, 7]), "f4", [2**24, -(2**24) - 4, 7]),
    ],
)
def test_integers_saturate_and_are_extended_by_their_own_sign(opcode, x, output, want):
    assert compute(f"cvt.{opcode} $0, $1;", x, output=np.dtype(output)).tolist() == want
