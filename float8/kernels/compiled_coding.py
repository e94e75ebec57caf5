"""E4M3 codes that compiled code on a CPU reads and writes at the speed of its arithmetic.

Inductor (2.13, AVX2, one core) takes, in ns per element: 0.03 for a product or a comparison, 0.5
for exp2, 1.5 for log2; but 1.2 to read uint8, 1.0 to convert between int32 and float32, 2.5 to
convert to float8, 4.4 from it; and in a long loop a call for every eight numbers whose bits are
read as another dtype. So here a code is a float32 *number* from 0 to 255, and everything is float32
arithmetic:

* `numbers` reads codes, by eager PyTorch (0.1 ns), which vectorises that; one custom op.
* A magnitude n = 8 e + m, e the exponent field and m the three mantissa bits, stands for
  (8 + m) 2^(e - 10), or for m 2^-9 where e = 0.
* The other way, y = t 2^(e - 6) with t in [1, 2), or in [0, 1) with e = 0, is n = 8 (e + t): so
  rounding 8 t to a whole number rounds y to a code. `steps` finds e and t by halving.

`fence` ends a loop. Without one inductor computes a value again for each of its readers, and a
moment has four: the parameter, two reductions and the code. (A step of AdamW: 20 ns without.)

Eager PyTorch converts by itself (`cpu.cast`), to the same codes and values, bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from float8.formats import E4M3
from float8.kernels import stochastic

NAN = 127.0  # the number of its code

_library = torch.library.Library("float8", "FRAGMENT")
_library.define("e4m3_numbers(Tensor codes) -> Tensor")
_library.define("fence(Tensor(a!) x) -> ()")


def _numbers(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).to(torch.float32)


def _fake_numbers(codes: Tensor) -> Tensor:
    return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)


def _fence(x: Tensor) -> None:
    pass


_library.impl("e4m3_numbers", _numbers, "CPU")
_library.impl("e4m3_numbers", _fake_numbers, "Meta")
_library.impl("fence", _fence, "CPU")
_library.impl("fence", _fence, "Meta")


def applies(x: Tensor) -> bool:
    """Whether this code is compiled for a CPU."""
    return torch.compiler.is_compiling() and x.device.type == "cpu"


def numbers(codes: Tensor) -> Tensor:
    """float32 0 .. 255 of E4M3 codes, contiguous."""
    result: Tensor = torch.ops.float8.e4m3_numbers(codes)
    return result


def fence(x: Tensor) -> None:
    """In code compiled for a CPU: have x stored, so that none of its readers computes it again."""
    if applies(x):
        torch.ops.float8.fence(x)


def magnitudes(n: Tensor) -> tuple[Tensor, Tensor]:
    """A number without its sign, and whether it has one."""
    is_negative = n >= 128
    return torch.where(is_negative, n - 128, n), is_negative


def values(n: Tensor) -> Tensor:
    """The float32 values of numbers, exactly; 127 and 255 are NaN."""
    magnitude, is_negative = magnitudes(n)
    e = (magnitude * 0.125).floor()
    is_normal = e > 0
    m = magnitude - 8 * e
    value = torch.where(is_normal, m + 8, m) * torch.exp2(e.clamp(min=1.0) - 10)
    value = torch.where(magnitude == NAN, math.nan, value)
    return torch.where(is_negative, -value, value)


# The polynomials in m / 8 that go through log2(1 + m / 8) of the eight mantissas, and through
# log2(m / 8) of 1 .. 7.
_NORMAL = (
    0.0,
    1.4426577845487611,
    -0.7205426463615039,
    0.47399226597506927,
    -0.3290980186962603,
    0.20190702982493508,
    -0.08735735634083777,
    0.018461052106308776,
)
_SUBNORMAL = (
    -5.053205065115461,
    23.618045691348556,
    -74.05977994114643,
    154.18168432874108,
    -191.700421204774,
    128.9997073253381,
    -36.06706335893109,
)
_LOG2_MAX = math.log2(E4M3.max)


def log2_ratios(magnitude: Tensor) -> Tensor:
    """log2(value / 448) of numbers from 1 to 126, within 2^-18; 0 for 126."""
    e = (magnitude * 0.125).floor()
    f = magnitude * 0.125 - e
    normal = _polynomial(f, _NORMAL) + (e - (7 + _LOG2_MAX))
    subnormal = _polynomial(f, _SUBNORMAL) - (6 + _LOG2_MAX)
    ratio = torch.where(e > 0, normal, subnormal)
    return torch.where(magnitude == 126, 0.0, ratio)


def expanded_values(n: Tensor, exponent: Tensor) -> Tensor:
    """``sign * (|value| / 448)^exponent`` of numbers."""
    magnitude, is_negative = magnitudes(n)
    value = torch.exp2(log2_ratios(magnitude) * exponent)
    value = torch.where(magnitude == NAN, math.nan, torch.where(magnitude == 0, 0.0, value))
    return torch.where(is_negative, -value, value)


def _polynomial(f: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = f * coefficients[-1] + coefficients[-2]
    for c in reversed(coefficients[:-2]):
        total = total * f + c
    return total


def steps(y: Tensor) -> tuple[Tensor, Tensor]:
    """(8 e, 8 t) of y in 0 .. 448, exactly: their sum is y as a number, whole if y has a code."""
    t = y * 64.0
    e = torch.zeros_like(t)
    for s in (8, 4, 2, 1):
        is_above = t >= 2.0**s
        t = t * torch.where(is_above, 2.0**-s, 1.0)  # t twice, not thrice: inductor inlines each
        e = e + torch.where(is_above, float(s), 0.0)
    return 8 * e, 8 * t


def nearest(y: Tensor) -> Tensor:
    """The number of the code nearest to y in 0 .. 448, ties to even."""
    base, t = steps(y)
    return base + t.round()


def at_random(y: Tensor, chance: Tensor) -> Tensor:
    """As `stochastic.on_grid`: the number next below or above y in 0 .. 448."""
    base, t = steps(y)
    whole = t.floor()
    return base + whole + stochastic.one_if_positive(t - whole - chance)


def at_random_expanded(y: Tensor, chance: Tensor, exponent: Tensor) -> Tensor:
    """As `stochastic.on_expanded_grid`, for y in 2^-9 .. 448."""
    base, t = steps(y)
    fence(t)  # for the compiler's own time: it would inline these steps into each term of the share
    whole = t.floor()
    ahead = stochastic.lead_over_chance(whole, t - whole, chance, exponent)
    return base + whole + stochastic.one_if_positive(ahead)


def codes_of(n: Tensor, x: Tensor) -> Tensor:
    """E4M3 codes of numbers n of magnitudes, with the sign of x, and NaN where x is not finite."""
    n = torch.where(x.abs() < math.inf, n, NAN)
    return torch.where(x < 0, n + 128, n).to(torch.uint8).view(torch.float8_e4m3fn)
