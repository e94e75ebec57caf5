"""log2, exp2 and E4M3 decoding that a CPU computes eight at a time when they are compiled.

Eager torch has vectorised loops of its own. What inductor makes of the same calls on a CPU (2.13)
is far slower beside a conversion from float8 (log2 of a converted code: 10 ns an element, of which
each alone accounts for 2; AVX2), so compiled code gets arithmetic on the bit fields of a float32:

    x = 2^e * m, m in [sqrt(1/2), sqrt(2)):  log2(x) = e + f * P(f),  f = m - 1
    t = k + f,   f in [-1/2, 1/2):           exp2(t) = 2^k * (1 + f * Q(f))

P and Q interpolate at Chebyshev nodes; the errors are below 2^-22 (absolute) and 2^-22 (relative).
log2(1) is exactly 0 and exp2 of an integer exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Degrees 7 and 4: log2(1 + f) / f on sqrt(1/2) - 1 .. sqrt(2) - 1, (2^f - 1) / f on -1/2 .. 1/2.
_LOG2 = (
    1.4426949579955586,
    -0.7213527587652891,
    0.4809240385776762,
    -0.36024198590689926,
    0.28707561115439084,
    -0.24882180562980355,
    0.2342098511894135,
    -0.14620353423948898,
)
_EXP2 = (
    0.6931471880293429,
    0.24022348940947005,
    0.05550357104252263,
    0.00966637369320722,
    0.001339086735158901,
)
_SQRT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)


def _by_bits(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.device.type == "cpu"


def log2(x: Tensor) -> Tensor:
    """Of positive normal float32; what it gives of others is for the caller to replace."""
    return log2_by_bits(x) if _by_bits(x) else x.log2()


def exp2(t: Tensor) -> Tensor:
    """2^t of float32 t below 127; at least 2^-126 when compiled. Not of NaN."""
    return exp2_by_bits(t) if _by_bits(t) else t.exp2()


def values(codes: Tensor) -> Tensor:
    """The float32 values of E4M3 codes."""
    return e4m3_by_bits(codes) if _by_bits(codes) else codes.to(torch.float32)


def log2_by_bits(x: Tensor) -> Tensor:
    """`log2` in integer and float32 arithmetic alone."""
    bits = x.view(torch.int32)
    e = (bits - _SQRT_HALF) >> 23
    f = (bits - (e << 23)).view(torch.float32) - 1.0
    return e.to(torch.float32) + f * _polynomial(f, _LOG2)


def exp2_by_bits(t: Tensor) -> Tensor:
    """`exp2` in integer and float32 arithmetic alone."""
    t = t.clamp(min=-126.0)
    k = (t + 0.5).floor()
    f = t - k
    power = ((k.to(torch.int32) + 127) << 23).view(torch.float32)
    return (f * _polynomial(f, _EXP2) + 1.0) * power


def _polynomial(f: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = f * coefficients[-1] + coefficients[-2]
    for c in reversed(coefficients[:-2]):
        total = total * f + c
    return total


def e4m3_by_bits(codes: Tensor) -> Tensor:
    """E4M3's fields lie in a float32 as they are, but for the bias: 2^120 makes up for it."""
    bits = codes.view(torch.uint8).to(torch.int32)
    magnitude = bits & 0x7F
    value = (magnitude << 20).view(torch.float32) * 2.0**120
    value = torch.where(magnitude == 0x7F, torch.nan, value)
    return torch.where(bits > 0x7F, -value, value)
