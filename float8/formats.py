"""The 8-bit floating point formats, the numbers that describe each, and the formats of scales.

A format is a torch dtype plus four facts that every cast needs:

====== ============================ ========= ======================== =============
name   dtype                        max       smallest subnormal       special codes
====== ============================ ========= ======================== =============
E4M3   ``torch.float8_e4m3fn``      448       2^-9                     NaN, no inf
E5M2   ``torch.float8_e5m2``        57344     2^-16                    NaN and inf
====== ============================ ========= ======================== =============

(Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433, table 1.) AMD's gfx94x
has the ``fnuz`` twins, one exponent lower and with a single zero: `E4M3FNUZ` (max 240) and
`E5M2FNUZ` (max 57344). `on_family` maps a format to the twin that a device multiplies. With twice
the scale, the twin has every value of the format.

The numbers come from torch; nothing else in the package writes 448 or 57344 down.

`ScaleFormat` says which numbers a scale may be, and so how it is stored.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from float8.arguments import described

# Dtypes that may be cast to float8. float64 is left out: no float8 GEMM accumulates or returns it.
HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Format:
    """An 8-bit floating point format.

    Args:
        name: its short name, such as ``"e4m3"``.
        dtype: its torch dtype.
    """

    name: str
    dtype: torch.dtype

    @property
    def max(self) -> float:
        """The largest finite value: what a saturating cast clamps to."""
        return float(torch.finfo(self.dtype).max)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value; half of it and less is flushed to zero."""
        # Not smallest_normal * eps: torch 2.13 reports E5M2FNUZ's eps as half of what it is.
        return float(torch.tensor([1], dtype=torch.uint8).view(self.dtype).to(torch.float32))

    def __str__(self) -> str:
        return self.name


E4M3 = Format("e4m3", torch.float8_e4m3fn)
"""4 exponent and 3 mantissa bits: largest value 448, smallest 2^-9, no infinity."""
E5M2 = Format("e5m2", torch.float8_e5m2)
"""5 exponent and 2 mantissa bits: largest finite value 57344, smallest 2^-16, with infinity."""
E4M3FNUZ = Format("e4m3fnuz", torch.float8_e4m3fnuz)
E5M2FNUZ = Format("e5m2fnuz", torch.float8_e5m2fnuz)

FORMATS: dict[torch.dtype, Format] = {f.dtype: f for f in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)}
_FNUZ_TWIN = {E4M3: E4M3FNUZ, E5M2: E5M2FNUZ}


def format_of(format_or_dtype: Format | torch.dtype) -> Format:
    """The `Format` of a float8 dtype (a `Format` passes through).

    Raises TypeError for a dtype that is not one of the four, naming those that are.
    """
    if isinstance(format_or_dtype, Format):
        return format_or_dtype
    if not isinstance(format_or_dtype, torch.dtype) or format_or_dtype not in FORMATS:
        known = ", ".join(str(dtype) for dtype in FORMATS)
        raise TypeError(f"{described(format_or_dtype)} is not a float8 format; use one of {known}")
    return FORMATS[format_or_dtype]


class ScaleFormat(str, enum.Enum):
    """Which numbers a scale may be, and how it is rounded to one.

    Each member is also the string of its value, which compiled code compares.

    E8M0 is the scale of the MX formats (OCP Microscaling Formats 1.0, section 5.4.1): one byte that
    holds an exponent, ``scale = 2^(byte - 127)``; 255 is NaN. Its two members differ in the
    rounding of computed scales.

    Attributes:
        FLOAT32: any float32, ``amax / max(format)``.
        POWER_OF_TWO: a float32 that is a power of two, rounded up: nothing saturates.
        E8M0: one byte, ``ceil(log2(amax / max(format)))``: nothing saturates. The conversion of
            cuBLAS ("1D block scaling", there "rounded up"), and of torchao's ``RCEIL``.
        E8M0_FLOOR: one byte, ``floor(log2(amax)) - floor(log2(max(format)))``, the conversion of
            OCP MX 1.0 (section 6.3): up to an eighth of the largest values of E4M3 saturate.
    """

    FLOAT32 = "float32"
    POWER_OF_TWO = "power_of_two"
    E8M0 = "e8m0"
    E8M0_FLOOR = "e8m0_floor"

    def __str__(self) -> str:
        return f"ScaleFormat.{self.name}"

    @property
    def is_e8m0(self) -> bool:
        """Whether a scale is one byte, of dtype ``torch.float8_e8m0fnu``."""
        return self in (ScaleFormat.E8M0, ScaleFormat.E8M0_FLOOR)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the scales."""
        return torch.float8_e8m0fnu if self.is_e8m0 else torch.float32


def on_family(fmt: Format, family: str) -> Format:
    """The twin of ``fmt`` that a device family multiplies (`float8.kernels.family_of`)."""
    return _FNUZ_TWIN.get(fmt, fmt) if family == "gfx94" else fmt


def twin_factor(fmt: Format, twin: Format) -> float:
    """What a scale of data in ``fmt`` is multiplied by for its twin, which stores half of it."""
    return 1.0 if fmt == twin else 2.0
