"""E8M0 scales: one byte that holds an exponent, ``scale = 2^(byte - 127)``, 255 being NaN.

(OCP Microscaling Formats 1.0, section 5.4.1.) The dtype is ``torch.float8_e8m0fnu``, for which
torch has few operations and inductor no code. Both directions are integer operations on a float32's
bits, and each is one op, which torch.compile does not look into.

Block by block, for the largest magnitude ``amax`` of a block in float32:

============== ============================ ======================== ============================
block          ``E8M0``                     ``E8M0_FLOOR``           its data
============== ============================ ======================== ============================
zeros          0 (2^-127)                   0 (2^-127)               zeros
very small     at least 0                   at least 0               ``x / 2^-127``, as for others
with an inf    254 (2^127)                  247 (E4M3), 240 (E5M2)   the infs are NaN
with a NaN     255 (NaN)                    255 (NaN)                NaN
============== ============================ ======================== ============================

The bytes and the data are those of torchao's ``to_mx``, with three exceptions in version 0.18. It
writes the largest finite value for an inf, which could be taken for a number. Where the byte is 0,
it multiplies by 1 (``RCEIL``) or 2^126 (``FLOOR``) in place of 2^127. And in ``RCEIL`` its float32
logarithm may take an ``amax / max(format)`` that is less than 2^-18 (relative) above a power of two
for that power: its byte is one less, and the largest value saturates. Here the exponent is exact.
By its source, torchao 0.19 has one exception: all of a block with an inf is NaN, with byte 255.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from float8.kernels.registration import define_op

_NAN = 255
_INF = 254  # of a scale that would be infinite
_SMALLEST = 0x00400000  # the bits of 2^-127, a subnormal float32
_FLOAT32_NAN = 0x7FC00000


def _scale_from_amax(amax: Tensor, format_max: float, rounds_up: bool) -> Tensor:
    mantissa, exponent = math.frexp(format_max)
    # A significand above that of format_max carries into the exponent.
    carry = 0x7FFFFF - int((2 * mantissa - 1) * 2**23) if rounds_up else 0
    found = (((amax.view(torch.int32) + carry) >> 23) - (exponent - 1)).clamp(min=0)
    if rounds_up:
        found = torch.where(amax.isinf(), _INF, found)
    return torch.where(amax.isnan(), _NAN, found).to(torch.uint8).view(torch.float8_e8m0fnu)


def _as_float32(scale: Tensor) -> Tensor:
    exponent = scale.view(torch.uint8).to(torch.int32)
    bits = torch.where(exponent == 0, _SMALLEST, exponent << 23)
    return torch.where(exponent == _NAN, _FLOAT32_NAN, bits).view(torch.float32)


def _reciprocal(scale: Tensor) -> Tensor:
    return _as_float32((_INF - scale.view(torch.uint8)).view(scale.dtype))  # a NaN stays: 254 - 255


def _fake_scale(amax: Tensor, format_max: float, rounds_up: bool) -> Tensor:
    return torch.empty_like(amax, dtype=torch.float8_e8m0fnu)


def _fake_float32(scale: Tensor) -> Tensor:
    return torch.empty_like(scale, dtype=torch.float32)


# The E8M0 scale of each float32 amax, >= 0 or NaN, exactly: (amax, format_max, rounds_up) ->
# ``2^ceil(log2(amax / format_max))`` if rounds_up is True, otherwise
# ``2^(floor(log2(amax)) - floor(log2(format_max)))``.
e8m0_scale_from_amax = define_op(
    "e8m0_scale_from_amax(Tensor amax, float format_max, bool rounds_up) -> Tensor",
    _scale_from_amax,
    _fake_scale,
)
# E8M0 scales in float32, exactly.
_as_float32_op = define_op("e8m0_as_float32(Tensor scale) -> Tensor", _as_float32, _fake_float32)
# ``1 / scale`` of E8M0 scales, in float32: a power of two, exactly.
e8m0_reciprocal = define_op("e8m0_reciprocal(Tensor scale) -> Tensor", _reciprocal, _fake_float32)


def as_float32(scale: Tensor) -> Tensor:
    """A scale in float32, exactly; one that is float32 is returned as it is."""
    if scale.dtype == torch.float32:
        return scale
    return _as_float32_op(scale)
