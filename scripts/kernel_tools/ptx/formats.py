"""Number formats in numpy: a GPU's NaNs, bfloat16 as bits, float8 by tables, pairs in one register.

float8 numbers are found in tables that hold every value of a format, computed from its definition.
Nothing here is shared with the library's own conversions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[Any]

# A GPU's NaN of each width.
_NAN = {2: np.uint16(0x7FFF), 4: np.uint32(0x7FFFFFFF), 8: np.uint64(0x7FF8000000000000)}


def canonical(x: Lanes) -> Lanes:
    """Floats as unsigned bits; every NaN has the pattern that a GPU's arithmetic returns."""
    bits = x.view(f"u{x.dtype.itemsize}")
    is_nan = np.isnan(x)
    return np.where(is_nan, _NAN[x.dtype.itemsize], bits) if is_nan.any() else bits


def flushed(x: Lanes) -> Lanes:
    """float32 where subnormal numbers are zeros of their sign (``.ftz``); other types are kept."""
    if x.dtype != np.float32:
        return x
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


NAN8 = 0x7F  # what a GPU writes for NaN, in both formats


def _finite_values(mantissa_bits: int, bias: int, count: int) -> npt.NDArray[np.float64]:
    """The values of the codes 0 to count - 1."""
    code = np.arange(count)
    exponent, mantissa = code >> mantissa_bits, code & (1 << mantissa_bits) - 1
    fraction = mantissa * 2.0**-mantissa_bits
    subnormal = fraction * 2.0 ** (1 - bias)
    return np.where(exponent == 0, subnormal, (1 + fraction) * 2.0 ** (exponent - bias))


FINITE = {"e4m3": _finite_values(3, 7, 0x7F), "e5m2": _finite_values(2, 15, 0x7C)}
_BETWEEN = {name: (values[1:] + values[:-1]) / 2 for name, values in FINITE.items()}
_DECODED = {
    "e4m3": np.append(FINITE["e4m3"], np.nan).astype(np.float16),
    "e5m2": np.append(FINITE["e5m2"], [np.inf, np.nan, np.nan, np.nan]).astype(np.float16),
}


def to_float8(x: Lanes, format_: str) -> Lanes:
    """Codes (uint16) of the nearest values, ties to even; beyond the largest finite one, that."""
    magnitude = np.abs(x).astype(np.float64)
    between = _BETWEEN[format_]
    code = np.searchsorted(between, magnitude, side="left")
    # On a tie, "left" is the lower neighbour: right where its code is even.
    tie = between[np.minimum(code, len(between) - 1)] == magnitude
    code = code + (tie & (code % 2 == 1))
    code = np.where(np.isnan(x), NAN8, code | np.where(np.signbit(x), 0x80, 0))
    return code.astype(np.uint16)


def from_float8(code: Lanes, format_: str) -> Lanes:
    """Codes (integers) -> float16, which holds every value of both formats."""
    magnitude = _DECODED[format_][code & 0x7F]
    return np.where(code & 0x80, -magnitude, magnitude)


def to_bfloat16(x: Lanes) -> Lanes:
    """float32 or float64 -> bits (uint16), nearest even."""
    if x.dtype == np.float64:
        x = to_odd_float32(x)
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def to_odd_float32(x: Lanes) -> Lanes:
    """float64 -> float32 whose last bit is odd where that is inexact, for a second rounding."""
    y = x.astype(np.float32)
    even = y.view(np.uint32) & 1 == 0
    inexact = (y != x) & np.isfinite(y) & even
    return np.where(
        inexact, np.nextafter(y, np.where(x > y, np.inf, -np.inf).astype(np.float32)), y
    )


def from_bfloat16(bits: Lanes) -> Lanes:
    """Bits (uint16) -> float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def pair(high: Lanes, low: Lanes) -> Lanes:
    """Two halves -> an integer of twice their width."""
    bits = 8 * high.dtype.itemsize
    wide = np.dtype(f"u{bits // 4}")
    return high.astype(wide) << wide.type(bits) | low.astype(wide)


def halves(both: Lanes) -> tuple[Lanes, Lanes]:
    """The high and the low half of integers."""
    bits = 4 * both.dtype.itemsize
    narrow = f"u{bits // 8}"
    return (both >> both.dtype.type(bits)).astype(narrow), both.astype(narrow)
