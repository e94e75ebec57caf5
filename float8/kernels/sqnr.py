"""Signal to quantisation noise ratio (SQNR): how much of a tensor survived a cast or a computation.

::

    SQNR = 10 log10( sum reference^2 / sum (reference - value)^2 )       in dB, sums in float64

`sqnr` takes the two tensors. `decibels` takes the two sums, where they were accumulated over
several tensors or over ranks.
"""

from __future__ import annotations

import math

from torch import Tensor


def sqnr(reference: Tensor, value: Tensor) -> float:
    """The SQNR of a tensor in dB; see `decibels` for its special values.

    ``reference`` is what the tensor should be, ``value`` what it is; both have one shape.
    """
    exact = reference.detach().double()
    return decibels(power(exact), power(exact - value.detach()))


def power(x: Tensor) -> float:
    """The sum of the squares of a tensor, in float64."""
    return float(x.detach().double().square().sum())


def decibels(signal: float, noise: float) -> float:
    """The SQNR in dB of two sums of squares: of the reference, and of the error of the value.

    It is inf without noise, and -inf where the noise is not finite or where there is no signal.
    """
    if noise == 0:
        return math.inf
    ratio = signal / noise if math.isfinite(noise) else 0.0
    return 10 * math.log10(ratio) if ratio else -math.inf
