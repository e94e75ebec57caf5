"""What float8 numbers are, worked out a second time, from the bit fields and in float64.

Shares nothing with ``float8/kernels/definition.py``, nor with torch's own float8 conversions: a
format is four integers here, a code's value follows from its bit fields in pure Python, and a value
is encoded by searching the 256-code table in float64. Where the library computes in float32, the
oracle computes the exact result in float64 and rounds it once: the product of two float32 numbers
has at most 48 significant bits and is exact in float64; a float64 quotient rounded to float32 is
the correctly rounded float32 quotient (53 >= 2 * 24 + 2; Figueroa, "When is double rounding
innocuous?", 1995).

Legend: codes uint8; ``scale`` float32 or E8M0, ``value = code's value * scale``; ``block`` the
extent per dimension that shares a scale, -1 being the whole dimension; ``scale_format`` a name:
"float32", "power_of_two", "e8m0" or "e8m0_floor".
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

Block = tuple[int, ...]
MIN_SCALE = 2.0**-126


@dataclass(frozen=True)
class Bits:
    """The fields ``sign | exponent | mantissa`` of an 8-bit format, and its special codes."""

    exponent: int
    mantissa: int
    bias: int
    specials: str  # "ieee": inf and NaN; "fn": NaN only; "fnuz": one NaN, in the place of -0

    def decode(self, code: int) -> float:
        """The value of a code."""
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code >> self.mantissa) & (2**self.exponent - 1)
        mantissa = code & (2**self.mantissa - 1)
        all_ones = exponent == 2**self.exponent - 1
        if self.specials == "ieee" and all_ones:
            return sign * math.inf if mantissa == 0 else math.nan
        if self.specials == "fn" and all_ones and mantissa == 2**self.mantissa - 1:
            return math.nan
        if self.specials == "fnuz" and code == 0x80:
            return math.nan
        if exponent == 0:
            return sign * mantissa * 2.0 ** (1 - self.bias - self.mantissa)
        return sign * (1 + mantissa / 2**self.mantissa) * 2.0 ** (exponent - self.bias)


# Micikevicius et al., arXiv 2209.05433, table 1; the fnuz twins: Noune et al., arXiv 2206.02915.
BITS = {
    torch.float8_e4m3fn: Bits(4, 3, 7, "fn"),
    torch.float8_e5m2: Bits(5, 2, 15, "ieee"),
    torch.float8_e4m3fnuz: Bits(4, 3, 8, "fnuz"),
    torch.float8_e5m2fnuz: Bits(5, 2, 16, "fnuz"),
}
DTYPES = tuple(BITS)


@functools.cache
def table(dtype: torch.dtype) -> Tensor:
    """The values of the codes 0 to 255, in float64."""
    return torch.tensor([BITS[dtype].decode(code) for code in range(256)], dtype=torch.float64)


@functools.cache
def magnitudes(dtype: torch.dtype) -> Tensor:
    """The finite values >= 0, ascending; the index of each is its code. float64."""
    positive = table(dtype)[:128]
    return positive[positive.isfinite()]


def largest(dtype: torch.dtype) -> float:
    """The largest finite value."""
    return float(magnitudes(dtype)[-1])


@functools.cache
def ties(dtype: torch.dtype) -> Tensor:
    """The values halfway between adjacent codes, the positive ones, in float64."""
    finite = magnitudes(dtype)
    return (finite[1:] + finite[:-1]) / 2


def nan_codes(dtype: torch.dtype) -> list[int]:
    """Every code that means NaN."""
    return [code for code in range(256) if math.isnan(BITS[dtype].decode(code))]


def encode(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes nearest to ``y`` (float64), ties to even; finite saturates, inf and NaN are NaN.

    Returns:
        uint8 codes; of the NaN codes, the first.
    """
    y = y.to(torch.float64)
    finite = magnitudes(dtype)
    below = torch.searchsorted(finite, y.abs().nan_to_num(0.0).contiguous(), right=True) - 1
    below = below.clamp(max=len(finite) - 2)
    # y is compared with the midpoint, which is exact; y - below might not be.
    middle = ties(dtype)[below]
    up = (y.abs() > middle) | ((y.abs() == middle) & (below % 2 == 1))
    codes = (below + up).to(torch.uint8)
    if BITS[dtype].specials == "fnuz":  # it has no -0
        codes = torch.where(y.signbit() & (codes != 0), codes | 0x80, codes)
    else:
        codes = torch.where(y.signbit(), codes | 0x80, codes)
    return torch.where(y.isfinite(), codes, nan_codes(dtype)[0]).to(torch.uint8)


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """How many blocks there are along each dimension."""
    return tuple(1 if e == -1 else math.ceil(s / e) for s, e in zip(shape, block, strict=True))


def amax(x: Tensor, block: Block) -> Tensor:
    """The largest magnitude of every block, found block by block; NaN where there is one."""
    shape = scale_shape(tuple(x.shape), block)
    out = torch.zeros(shape, dtype=torch.float32)
    for index in itertools.product(*(range(n) for n in shape)):
        inside = tuple(
            slice(None) if e == -1 else slice(i * e, (i + 1) * e)
            for i, e in zip(index, block, strict=True)
        )
        values = x[inside].to(torch.float64).abs().flatten().tolist()
        out[index] = math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
    return out


def scale_of(amax: float, dtype: torch.dtype, scale_format: str = "float32") -> float:
    """The dequantisation scale for an amax.

    A float32 scale is ``max(float32(amax * float32(1/max)), 2^-126)``, or the power of two that is
    not below it.
    """
    if scale_format.startswith("e8m0"):
        return value_of_byte(scale_byte(amax, dtype, scale_format))
    reciprocal = _float32(1.0 / largest(dtype))
    scale = _float32(amax * reciprocal)
    if math.isnan(scale) or math.isinf(scale):
        return scale
    scale = max(scale, MIN_SCALE)
    if scale_format == "power_of_two":
        mantissa, exponent = math.frexp(scale)  # scale = mantissa * 2^exponent, 0.5 <= mantissa
        scale = math.ldexp(1.0, exponent - (mantissa == 0.5))
    return scale


def scale_byte(amax: float, dtype: torch.dtype, scale_format: str) -> int:
    """The E8M0 scale of an amax: a biased exponent, 255 for NaN.

    Rounded up ("e8m0"): the smallest with ``amax <= max * scale``, exactly. "e8m0_floor":
    ``floor(log2(amax)) - floor(log2(max))`` (OCP Microscaling Formats 1.0, section 6.3), where an
    infinite amax counts as 2^128.
    """
    if math.isnan(amax):
        return 255
    if amax == 0:
        return 0
    rounds_up = scale_format == "e8m0"
    if math.isinf(amax) and rounds_up:
        return 254
    mantissa, exponent = math.frexp(2.0**128 if math.isinf(amax) else amax)
    largest_mantissa, largest_exponent = math.frexp(largest(dtype))
    is_above = rounds_up and mantissa > largest_mantissa
    return min(max(exponent - largest_exponent + is_above + 127, 0), 254)


def value_of_byte(byte: int) -> float:
    """What an E8M0 scale stands for (OCP Microscaling Formats 1.0, section 5.4.1)."""
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def scale_values(scale: Tensor) -> Tensor:
    """What scales stand for, in float64: of E8M0, from the bytes."""
    if scale.dtype != torch.float8_e8m0fnu:
        return scale.to(torch.float64)
    known = torch.tensor([value_of_byte(byte) for byte in range(256)], dtype=torch.float64)
    return known[scale.contiguous().view(torch.uint8).long()]


def scales(x: Tensor, block: Block, dtype: torch.dtype, scale_format: str = "float32") -> Tensor:
    """The dynamic scale of every block of x, in float32 or E8M0."""
    found = amax(x, block)
    amaxes = found.flatten().tolist()
    if scale_format.startswith("e8m0"):
        bytes_ = [scale_byte(value, dtype, scale_format) for value in amaxes]
        stored = torch.tensor(bytes_, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        return stored.reshape(found.shape)
    values = [scale_of(value, dtype, scale_format) for value in amaxes]
    return torch.tensor(values, dtype=torch.float32).reshape(found.shape)


def spread(scale: Tensor, shape: tuple[int, ...], block: Block) -> Tensor:
    """The scale of every element: element i of a dimension is in block ``i // extent``."""
    for dim, (size, extent) in enumerate(zip(shape, block, strict=True)):
        index = torch.arange(size)
        scale = scale.index_select(dim, index * 0 if extent == -1 else index // extent)
    return scale


def cast(x: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """The codes (uint8) of x under a scale: ``nearest(float32(x * float32(1 / scale)))``."""
    shape = tuple(x.shape)
    value = scale_values(scale)
    inverse = (1.0 / value).to(torch.float32).to(torch.float64)
    y = (x.to(torch.float64) * spread(inverse, shape, block)).to(torch.float32)
    # A product that overflows float32 is still finite, so it saturates; only inf x gives inf.
    overflowed = y.isinf() & x.isfinite() & spread(value, shape, block).isfinite()
    y = torch.where(overflowed, torch.finfo(torch.float32).max * y.sign(), y)
    return encode(y.to(torch.float64), dtype)


def quantize(
    x: Tensor, block: Block, dtype: torch.dtype, scale_format: str = "float32"
) -> tuple[Tensor, Tensor]:
    """A dynamic cast: uint8 codes, and the scales of `scales`."""
    scale = scales(x, block, dtype, scale_format)
    return cast(x, scale, block, dtype), scale


def values(data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype | None = None) -> Tensor:
    """``code's value * scale`` in float64, exactly.

    Args:
        data: a float8 tensor, or uint8 codes together with ``dtype``.
        scale: float32 or E8M0, of shape ``ceil(shape / block)``.
        block: one extent per dimension.
        dtype: the format of uint8 codes.
    """
    dtype = dtype or data.dtype
    codes = data.cpu().contiguous().view(torch.uint8).to(torch.int64)
    return table(dtype)[codes] * spread(scale_values(scale.cpu()), tuple(data.shape), block)


def matmul(
    a: Tensor, a_scale: Tensor, a_block: Block, b: Tensor, b_scale: Tensor, b_block: Block
) -> Tensor:
    """``(a * a_scale) @ (b * b_scale).T`` of float8 matrices, in float64."""
    return values(a, a_scale, a_block) @ values(b, b_scale, b_block).t()


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float32))
