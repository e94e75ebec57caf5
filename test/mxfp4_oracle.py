"""MXFP4 a second time, in float64, by a search of the eight values; OCP MX 1.0, section 6.3.

Shares nothing with ``float8/kernels/mxfp4.py``. Every step is exact in float64, whose exponents
reach far beyond those of float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (..., K), ``sign << 3 | number of the value``, and scale bytes (..., K / 32), uint8.

    ``x`` (..., K) is finite, K a multiple of 32.
    """
    blocks = x.double().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1)
    floor_log2 = torch.where(amax > 0, amax.frexp().exponent - 1, -200)
    exponent = (floor_log2 - 2).clamp(min=-127)
    magnitude = blocks.abs() * torch.exp2(-exponent.double()).unsqueeze(-1)
    distance = (magnitude.unsqueeze(-1) - VALUES).abs()
    nearest = distance == distance.amin(-1, keepdim=True)  # two of them in a tie
    even, odd = nearest[..., ::2].int(), nearest[..., 1::2].int()
    number = torch.where(even.any(-1), 2 * even.argmax(-1), 2 * odd.argmax(-1) + 1)
    codes = number + 8 * blocks.signbit()
    return codes.flatten(-2).to(torch.uint8), (exponent + 127).to(torch.uint8)


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """The values, in float64."""
    signed = VALUES[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0).double()
    scales = torch.exp2(scale.double() - 127)
    return (signed.unflatten(-1, (-1, 32)) * scales.unsqueeze(-1)).flatten(-2)


def project(x: Tensor) -> Tensor:
    """The values of `encode`, in the dtype of x: all of them are exact there."""
    values = decode(*encode(x))
    assert torch.equal(values.to(x.dtype).double(), values)
    return values.to(x.dtype)


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte, the first in the low half."""
    return codes[..., ::2] + 16 * codes[..., 1::2]
