"""``cvt``: between integers, floats, bfloat16 and float8."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.kernel_tools.ptx.formats import (
    canonical,
    flushed,
    from_bfloat16,
    from_float8,
    halves,
    pair,
    to_bfloat16,
    to_float8,
)
from scripts.kernel_tools.ptx.machine import TYPES, Machine, instruction
from scripts.kernel_tools.ptx.program import Instruction, PtxError

Lanes = npt.NDArray[Any]

_ROUND: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@instruction("cvt")
def _convert(machine: Machine, ins: Instruction) -> None:
    *modifiers, to, source = ins.modifiers
    if unknown := set(modifiers) - {"rn", *_ROUND, "ftz", "sat", "satfinite"}:
        raise PtxError(f"{ins}: the modifier .{min(unknown)} is not supported")
    # Triton converts a single number beside one that was never written, and takes its half.
    is_pair = len(ins.operands) == 3
    values = [machine.read(o, source, used=not is_pair) for o in ins.operands[1:]]
    machine.write(ins.operands[0], _converted(ins, to, source, values))


def _converted(ins: Instruction, to: str, source: str, values: list[Lanes]) -> Lanes:
    x, is_narrowed = values[0], source == "f32" and "rn" in ins.modifiers
    if to in ("e4m3x2", "e5m2x2") and source in ("f32", "f16x2"):
        if source == "f16x2":
            values = [half.view(np.float16) for half in halves(x)]
        high, low = (to_float8(v, to[:4]).astype(np.uint8) for v in values)
        return pair(high, low)
    if source in ("e4m3x2", "e5m2x2") and to == "f16x2":
        high, low = (canonical(from_float8(code, source[:4])) for code in halves(x))
        return pair(high, low)
    if to in ("bf16x2", "f16x2") and is_narrowed:
        narrow = to_bfloat16 if to == "bf16x2" else lambda v: canonical(v.astype(np.float16))
        return pair(narrow(x), narrow(values[1]))
    if to == "bf16" and is_narrowed:
        return to_bfloat16(x)
    if source == "bf16" and to == "f32":
        return from_bfloat16(x)
    if to not in TYPES or source not in TYPES or "x2" in to + source or "bf16" in (to, source):
        raise PtxError(f"{ins}: this conversion is not supported")
    return _between_numbers(ins, to, x)


def _between_numbers(ins: Instruction, to: str, x: Lanes) -> Lanes:
    """Between integers and IEEE floats."""
    dtype, modifiers = TYPES[to], ins.modifiers
    is_float = x.dtype.kind == "f"
    whole = next((m for m in modifiers if m in _ROUND), None)
    if is_float and "ftz" in modifiers:
        x = flushed(x)
    if dtype.kind == "f":
        y = (x if whole is None else _ROUND[whole](x)).astype(dtype)
        if "sat" in modifiers:
            y = np.where(np.isnan(y), dtype.type(0), np.clip(y, dtype.type(0), dtype.type(1)))
        return canonical(flushed(y) if "ftz" in modifiers and to == "f32" else y)
    limits = np.iinfo(dtype)
    if not is_float:
        is_clipped = "sat" in modifiers
        return (np.clip(x.astype(object), limits.min, limits.max) if is_clipped else x).astype(
            dtype
        )
    if whole is None:
        raise PtxError(f"{ins}: a conversion to an integer needs a rounding")
    y = _ROUND[whole](x.astype(np.float64))
    small, large = y <= limits.min, y >= limits.max  # limits.max may round up: then it is beyond
    inner = np.where(np.isnan(y) | small | large, 0, y).astype(dtype)
    return np.where(small, dtype.type(limits.min), np.where(large, dtype.type(limits.max), inner))
