"""Stochastic rounding: to one of the two nearest values, the nearer one more often.

Rounding to nearest loses every change that is small beside the spacing of the codes. With
stochastic rounding the expected value of the code is the number itself, and small changes add up.
Random bits are a hash of (seed, offset, index of the element). They do not depend on the device, on
the order of execution or on a random number generator; ``gpu/moments.py`` computes the same bits.

*Half precision* (`stochastic_round`): random bits are added to the bits of a float32 that would be
cut off. *Codes under a scale* (`on_grid`): y lies between the adjacent values c0 and c1 of two
codes, whose distance is a power of two q,

    P(c1) = (y - c0) / (c1 - c0) = t,    y = (j + t) q,  j = floor(y / q)

*Expanded codes* (`on_expanded_grid`) stand for values y^a (times a constant; a = 1 / k). The
expectation of these must be right, as a moment that remembers 1000 steps adds up 1000 biases:

    P(c1) = (y^a - c0^a) / (c1^a - c0^a) = f(t / j) / f(1 / j),   f(u) = (1 + u)^a - 1

f(u) / (a u) is a hypergeometric function, 2F1(1 - a, 1; 2; -u). Its [2/2] Pade approximant needs
no logarithm, and the comparison of the ratio with a chance needs no division:

    f(u)     1 + (a + 7) / 10 u + (a + 1) (a + 2) / 60 u^2
    ---- ~ ------------------------------------------------------
    a u    1 + 2 (3 - a) / 5 u + (3 - a) (2 - a) / 20 u^2

The remaining bias, relative to the value: for a <= 2 below 4e-5 between the two smallest codes
(j = 1, u up to 1), 2e-6 from the second and 2e-7 from the third on. For a = 4, the largest
exponent, of groups that span 2^71: 8e-3, 3e-4 and 4e-5.
"""

from __future__ import annotations

import torch
from torch import Tensor

# dtype -> bits of its mantissa, its smallest normal value
_GRIDS = {torch.float8_e4m3fn: (3, 2.0**-6), torch.float16: (10, 2.0**-14)}


def stochastic_round(
    x: Tensor, dtype: torch.dtype, seed: int | Tensor, offset: int | Tensor, first: int = 0
) -> Tensor:
    """Round to one of the two nearest values of ``dtype``, the nearer one more often.

    The expectation is x (to within 2^-14 of float16's spacing). Beyond the largest finite value,
    nearest even; NaN and inf stay what they are. ``x`` is float32, ``dtype`` bfloat16 or float16.
    ``seed`` and ``offset``, 32-bit integers or 0-dim integer tensors, say which parameter and which
    step. ``first`` is the index of x's first element, where x is a part of a larger tensor.
    """
    lost = {torch.bfloat16: 16, torch.float16: 13}[dtype]  # bits of the float32 mantissa
    finfo = torch.finfo(dtype)
    magnitude = x.abs()
    # Below the normal range values are as far apart as those from tiny to 2 tiny.
    shift = torch.where(magnitude < finfo.tiny, finfo.tiny, 0.0) if dtype == torch.float16 else 0.0
    mask = (1 << lost) - 1
    noise = random_bits(x, seed, offset, first) & mask
    rounded = ((magnitude + shift).view(torch.int32) + noise) & ~mask
    value = (rounded.view(torch.float32) - shift).copysign(x)
    return torch.where(magnitude < finfo.max, value, x).to(dtype)


def on_grid(y: Tensor, chance: Tensor, dtype: torch.dtype) -> Tensor:
    """Magnitudes as float32 values of ``dtype``, rounded up where the chance says so.

    ``y`` is float32, from 0 to the largest value of ``dtype``, or NaN. ``chance``, of y's shape, is
    uniform in [0, 1), see `chances`. ``dtype`` is float8_e4m3fn or float16.
    """
    whole, part, spacing = _split(y, dtype)
    return (whole + _one_if_positive(part - chance)) * spacing


def on_expanded_grid(y: Tensor, chance: Tensor, exponent: Tensor) -> Tensor:
    """Magnitudes as values of E4M3, so that ``y^exponent`` is right on average.

    ``y`` is float32, from the smallest nonzero code, 2^-9, to 448; ``chance``, of y's shape, is
    uniform in [0, 1). ``exponent`` is that of each group, up to 4; its last dimension is 1.
    """
    j, t, spacing = _split(y, torch.float8_e4m3fn)
    a = exponent
    jj, n1j, d1j = j * j, j * ((a + 7) * 0.1), j * ((3 - a) * 0.4)
    n2, d2 = (a + 1) * (a + 2) * (1 / 60), (3 - a) * (2 - a) * 0.05
    f_t = t * torch.addcmul(jj, t * n2 + n1j, t) * (jj + d1j + d2)
    f_1 = (jj + n1j + n2) * torch.addcmul(jj, t * d2 + d1j, t)
    return (j + _one_if_positive(torch.addcmul(f_t, chance, f_1, value=-1))) * spacing


def _one_if_positive(x: Tensor) -> Tensor:
    """1 or 0, by arithmetic: comparisons are slow on a CPU."""
    return x.clamp(0, 1).ceil()


def _split(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """j, t and q of ``y = (j + t) q``, exactly: q is a power of two."""
    bits, tiny = _GRIDS[dtype]
    power = (y.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=tiny)
    inverse = (0x7F000000 - power.view(torch.int32)).view(torch.float32)
    scaled = y * (inverse * 2.0**bits)
    whole = scaled.floor()
    return whole, scaled - whole, power * 2.0**-bits


def chances(x: Tensor, seed: int | Tensor, offset: int | Tensor, first: int = 0) -> Tensor:
    """float32 of x's shape, uniform in [0, 1): 23 of the random bits."""
    mantissa = (random_bits(x, seed, offset, first) & 0x7FFFFF) | 0x3F800000
    return mantissa.view(torch.float32) - 1.0


def seed_of_state(seed: int | Tensor, number: int) -> int | Tensor:
    """The seed of state ``number`` of the parameter ``seed``; -1 is a master."""
    return seed + ((number + 2) << 28)


def random_bits(x: Tensor, seed: int | Tensor, offset: int | Tensor, first: int = 0) -> Tensor:
    """int32 of x's shape: 32 random bits per element, a hash of (seed, offset, its index).

    Two multiplications and three shifts, of constants found by search for low bias (C. Wellons,
    "Prospecting for hash functions", lowbias32), with a key before and a key between them.
    """
    index = torch.arange(x.numel(), dtype=torch.int32, device=x.device).reshape(x.shape)
    if first:
        index = index + as_int32(first)
    return _hash(index + key(seed), key(offset))


_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)  # as int32


def _hash(h: Tensor, between: int | Tensor = 0) -> Tensor:
    h = (h ^ _shifted(h, 16)) * _FIRST
    h = h ^ between
    h = (h ^ _shifted(h, 15)) * _SECOND
    return h ^ _shifted(h, 16)


def _shifted(h: Tensor, by: int) -> Tensor:
    return (h >> by) & ((1 << (32 - by)) - 1)  # >> of an int32 repeats its sign


def key(number: int | Tensor) -> int | Tensor:
    """The hash of a number, an int32: nearby numbers give unrelated keys."""
    if isinstance(number, Tensor):
        return _hash(number.to(torch.int32) + 0x1E3779B9)
    h = (number + 0x1E3779B9) & 0xFFFFFFFF
    for by, factor in ((16, _FIRST), (15, _SECOND)):
        h = ((h ^ (h >> by)) * factor) & 0xFFFFFFFF
    return as_int32(h ^ (h >> 16))


def as_int32(h: int) -> int:
    """The int32 of the same 32 bits."""
    return (h + (1 << 31)) % (1 << 32) - (1 << 31)
