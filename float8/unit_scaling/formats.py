"""`FPFormat`: any small floating point format, simulated in wider numbers.

A format has E exponent bits, M mantissa bits and a bias. Its non-negative values, in order, are
those of the codes c = 0, 1, 2, ...::

    m = c mod 2^M,  e = c div 2^M                   mantissa and exponent field
    value = 2^(1 - bias - M) * m                    e = 0:  subnormal
    value = 2^(e - bias - M) * (2^M + m)            e > 0:  normal

A *variant* sets the bias and how many of the largest codes are not finite:

========== =============== ====================== ==========================================
variant    bias            codes taken            found in
========== =============== ====================== ==========================================
``ieee``   2^(E-1) - 1     2^M (inf and NaNs)     IEEE 754; E5M2, max 57344
``fn``     2^(E-1) - 1     1 (NaN)                E4M3, max 448
``finite`` 2^(E-1) - 1     none                   E2M1 (max 6), E2M3, E3M2
``fnuz``   2^(E-1)         none (NaN is "-0")     AMD gfx94x, Graphcore: E4M3 (max 240), E5M2
``ocp``    that of the OCP specifications: E4M3 fn; E2M1, E2M3, E3M2 finite; all others ieee
========== =============== ====================== ==========================================

(E5M2 and E4M3: arXiv 2209.05433, table 1; fnuz: arXiv 2206.02915; E2M1, E2M3 and E3M2: OCP
Microscaling formats 1.0, section 5.3. ``FPFormat(5, 10)`` is float16, ``FPFormat(8, 7)`` bfloat16.)

**Rounding.** Around x the values of a format are multiples of a quantum, a power of two::

    quantum(x) = 2^(max(floor(log2 |x|), 1 - bias) - M)

so ``quantise(x) = round(x / quantum) * quantum`` for x clamped to the largest value. Both
operations with the quantum are exact in float64. ``round`` is to nearest, ties to even (without
mantissa bits every significand is odd, and a tie goes to the larger value: IEEE 754-2019), or
*stochastic*: up with a probability f that is the fraction cut off, so that the mean of the result
is x (arXiv 1502.02551, section 3). With R random bits that is "up if (k + 1/2) / 2^R < f" for a
random k in 0 ... 2^R - 1: its bias is at most 2^-(R+1) quanta, and values of the format do not
change.

**Special values** are treated as by this package's casts: finite values saturate, NaN stays NaN,
and infinite values become NaN in all variants: an earlier overflow does not become a number.
(The OCP specification leaves the choice to the converter, saturating or not.)
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["FPFormat", "format_to_tuple", "tuple_to_format"]

_ALLOWED: dict[str, range | tuple[str, ...]] = {
    "exponent_bits": range(2, 9),
    "mantissa_bits": range(24),
    "srbits": range(24),
    "rounding": ("stochastic", "nearest"),
    "variant": ("ocp", "ieee", "fn", "finite", "fnuz"),
}
# The OCP specifications' use of the all-ones exponent, where it differs from IEEE's.
_OCP = {(4, 3): "fn", (2, 1): "finite", (2, 3): "finite", (3, 2): "finite"}
# Rounding is computed in float64: the mantissa's bits and the bias of its exponent.
_MANTISSA, _BIAS = 52, 1023


@dataclass(frozen=True)
class FPFormat:
    """A floating point format: sign, exponent, mantissa, and how to round to it.

    Args:
        exponent_bits: 2 to 8.
        mantissa_bits: 0 to 23, the leading one not counted.
        rounding: "stochastic" or "nearest" (ties to even).
        srbits: how many random bits a stochastic rounding has, at most 23; 0 for all 23.
        variant: the bias and which of the largest codes are not finite. "ieee": all of the last
            exponent (inf and NaN). "fn": one (NaN). "finite": none. "fnuz": none, the bias one
            larger, NaN in the place of -0. "ocp": what the OCP specifications say: E4M3 is fn,
            E2M1, E2M3 and E3M2 are finite, all others ieee.

    Raises:
        ValueError: an argument is out of its range.
    """

    exponent_bits: int
    mantissa_bits: int
    rounding: str = "stochastic"
    srbits: int = 0
    variant: str = "ocp"

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value!r} is not in {allowed}")

    @property
    def bits(self) -> int:
        """The bits of a code, its sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """The exponent field minus the exponent."""
        return 2 ** (self.exponent_bits - 1) - (self._layout != "fnuz")

    @property
    def max_absolute_value(self) -> float:
        """The largest finite value, to which finite values saturate."""
        taken = {"ieee": 2**self.mantissa_bits, "fn": 1}.get(self._layout, 0)
        code = 2 ** (self.exponent_bits + self.mantissa_bits) - 1 - taken
        exponent, mantissa = divmod(code, 2**self.mantissa_bits)
        significand = 2**self.mantissa_bits + mantissa
        return math.ldexp(significand, exponent - self.bias - self.mantissa_bits)

    @property
    def min_absolute_normal(self) -> float:
        """The smallest positive value with a full mantissa."""
        return 2.0 ** (1 - self.bias)

    @property
    def min_absolute_subnormal(self) -> float:
        """The smallest positive value; rounding to nearest flushes half of it and less to zero."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def _layout(self) -> str:
        if self.variant != "ocp":
            return self.variant
        return _OCP.get((self.exponent_bits, self.mantissa_bits), "ieee")

    def __str__(self) -> str:
        suffix = "" if self.variant == "ocp" else self.variant.upper()
        rounding = {"stochastic": "SR", "nearest": "RN"}[self.rounding]
        return f"E{self.exponent_bits}M{self.mantissa_bits}{suffix}-{rounding}"

    def quantise(self, x: Tensor) -> Tensor:
        """x rounded to values of this format, without gradient.

        Args:
            x: float32, bfloat16, float16 or float64, any shape and strides.

        Returns:
            x's shape and dtype. A format of a wider range than x's dtype saturates at the largest
            of its values that the dtype holds.
        """
        with torch.no_grad():
            wide = x.detach().double()
            size = wide.abs().clamp(max=self._largest_in(x.dtype))
            field = size.view(torch.int64) >> _MANTISSA  # which is floor(log2 size) + _BIAS
            shift = field.clamp(min=_BIAS + 1 - self.bias) - self.mantissa_bits
            quantum = (shift << _MANTISSA).view(torch.float64)
            per_quantum = ((2 * _BIAS - shift) << _MANTISSA).view(torch.float64)
            rounded = self._round(size * per_quantum) * quantum
            signed = torch.copysign(torch.where(wide.isinf(), torch.nan, rounded), wide)
            if self._layout == "fnuz":  # which has no -0
                signed = torch.where(signed == 0, 0.0, signed)
            return signed.to(x.dtype)

    def _round(self, quanta: Tensor) -> Tensor:
        """A number of quanta, >= 0, to a whole one."""
        if self.rounding == "nearest":
            return quanta.round()  # ties to even
        below = quanta.floor()
        bits = self.srbits or 23
        drawn = torch.randint(2**bits, quanta.shape, dtype=torch.int32, device=quanta.device)
        # Both sides are exact. Adding before a floor would not be: it could round up to the next.
        is_up = (drawn.to(quanta.dtype) + 0.5) * 2.0**-bits < quanta - below
        return below + is_up.to(quanta.dtype)

    def _largest_in(self, dtype: torch.dtype) -> float:
        most = float(torch.finfo(dtype).max)
        if self.max_absolute_value <= most:
            return self.max_absolute_value
        top = 2.0 ** (math.frexp(most)[1] - 1) * (2 - 2.0**-self.mantissa_bits)
        return min(top, most)

    def quantise_fwd(self, x: Tensor) -> Tensor:
        """`quantise` in the forward pass; the gradient does not change (straight-through)."""
        return _Quantise.apply(x, self, None)

    def quantise_bwd(self, x: Tensor) -> Tensor:
        """x in the forward pass; in the backward pass the gradient is quantised."""
        return _Quantise.apply(x, None, self)


class _Quantise(torch.autograd.Function):
    """x, and its gradient, rounded to formats; None leaves one as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fwd: FPFormat | None, bwd: FPFormat | None) -> Tensor:
        ctx.bwd = bwd
        return x.view_as(x) if fwd is None else fwd.quantise(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Straight through once more, for gradients of gradients.
        return grads[0] if ctx.bwd is None else ctx.bwd.quantise_fwd(grads[0]), None, None


def format_to_tuple(format: FPFormat) -> tuple[int, int, str, int, str]:
    """The fields of a format as plain values."""
    return dataclasses.astuple(format)


def tuple_to_format(t: tuple[Any, ...]) -> FPFormat:
    """The format of `format_to_tuple`; ``(exponent_bits, mantissa_bits)`` are enough."""
    return FPFormat(*t)
