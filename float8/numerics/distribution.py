"""`Distribution`: every magnitude that an operand took, counted, so that scales can be tried later.

bfloat16 has 2^15 magnitudes. Counting how often each occurs takes 256 KiB per layer, however much
data there is, and forgets nothing that a cast could tell apart: for any scale s and format, ::

    error(s) = sum_v n_v (v - s * round(clamp(v / s)))^2        n_v elements of magnitude v

is that of casting the data itself. float32 and float16 operands are rounded to bfloat16 first, to
one part in 2^9, where E4M3 rounds to one in 2^4. The signs do not matter: casts are odd functions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from float8 import kernels
from float8.formats import Format
from float8.granularity import WHOLE

_MAGNITUDES = 2**15  # of bfloat16, inf and NaN included
_FIRST_NONFINITE = 0x7F80
_OCTAVES = 16  # how far below the amax scale a search goes: 2^-16 of the range is left


class Distribution:
    """How often each magnitude occurred.

    Attributes:
        elements: how many were seen.
        nonfinite: how many of them were inf or NaN.
        amax: the largest finite magnitude, not rounded.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(_MAGNITUDES, dtype=torch.int64)
        self.elements = 0
        self.amax = 0.0

    def add(self, x: Tensor) -> None:
        """Count the elements of a tensor, of any shape and floating point type."""
        if not x.numel():
            return
        bits = x.detach().to(torch.bfloat16).contiguous().view(torch.int16) & 0x7FFF
        counts = torch.bincount(bits.flatten(), minlength=_MAGNITUDES)
        self._counts += counts.to(self._counts.device)
        self.elements += x.numel()
        finite = torch.where(x.isfinite(), x, 0.0)
        self.amax = max(self.amax, float(finite.abs().max()))

    @property
    def nonfinite(self) -> int:
        """How many elements were inf or NaN."""
        return int(self._counts[_FIRST_NONFINITE:].sum())

    @property
    def values(self) -> tuple[Tensor, Tensor]:
        """The finite magnitudes that occurred, ascending, in float32, and how often each did."""
        counts = self._counts[:_FIRST_NONFINITE]
        found = counts.nonzero().squeeze(1)
        return found.to(torch.int16).view(torch.bfloat16).float(), counts[found]

    def sqnr(self, scales: Tensor, fmt: Format) -> Tensor:
        """Signal to quantisation noise of casting the data, for each of some scales.

        Args:
            scales: (C,) float32; ``value = code * scale``.
            fmt: the format.

        Returns:
            (C,) in dB, float64; inf where a cast is exact.
        """
        values_V, counts_V = self.values
        scale_C1 = scales.float().unsqueeze(1)
        data_CV = values_V.expand(len(scales), -1)
        codes_CV = kernels.cast(data_CV, scale_C1, (1, WHOLE), fmt.dtype)
        cast_CV = codes_CV.double() * scale_C1.double()
        noise_C = ((cast_CV - values_V.double()).square() * counts_V).sum(1)
        signal = (values_V.double().square() * counts_V).sum()
        return 10 * torch.log10(signal / noise_C)

    def lost(self, scale: float, fmt: Format) -> tuple[float, float]:
        """The fractions of elements that saturate, and that are flushed from nonzero to zero."""
        values, counts = self.values
        # By more than rounding to bfloat16 has added: at the amax scale nothing saturates.
        beyond = counts[values.double() > fmt.max * scale * (1 + 2**-8)].sum()
        # Half of the smallest subnormal is a tie, and goes to the even code: zero.
        below = counts[(values > 0) & (values.double() <= fmt.smallest_subnormal * scale / 2)].sum()
        return float(beyond) / max(self.elements, 1), float(below) / max(self.elements, 1)

    def amax_scale(self, fmt: Format) -> float:
        """The scale that maps the largest magnitude to the format's largest value."""
        return _scale(self.amax, fmt)

    def percentile_scale(self, fmt: Format, percent: float) -> float:
        """The scale at which ``percent`` of the elements that are not zero do not saturate."""
        values, counts = self.values
        values, counts = values[values > 0], counts[values > 0]
        if not len(values):  # float32 below what bfloat16 holds
            return self.amax_scale(fmt)
        below = counts.cumsum(0).double() / counts.sum()
        place = int(torch.searchsorted(below, percent / 100))
        found = float(values[min(place, len(values) - 1)])
        return self.amax_scale(fmt) if place >= len(values) - 1 else _scale(found, fmt)

    def sqnr_scale(self, fmt: Format, steps_per_octave: int = 1) -> float:
        """The scale with the highest SQNR: of those at regular steps, and the amax scale.

        A shift by a power of two leaves the mantissas alone: it trades what saturates at the top
        for what is flushed at the bottom, and the SQNR has one summit. Steps between move the
        mantissas too, by fractions of a decibel.
        """
        widest = self.amax_scale(fmt)
        top = math.ceil(math.log2(widest) * steps_per_octave)
        # An octave above too: where an octave below saturates, only these have their mantissas.
        first, end = top - _OCTAVES * steps_per_octave, top + steps_per_octave
        steps = torch.arange(first, end + 1, dtype=torch.float64)
        scales = torch.cat([torch.exp2(steps / steps_per_octave), torch.tensor([widest])])
        scales = scales.clamp(min=torch.finfo(torch.float32).tiny).float()
        return float(scales[self.sqnr(scales, fmt).argmax()])


def _scale(amax: float, fmt: Format) -> float:
    found = kernels.scale_from_amax(torch.tensor([amax], dtype=torch.float32), fmt.max, False)
    return float(found)
