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
_DIRECTED = {"rz": 0, "rm": -1, "rp": 1}


@instruction("cvt")
def _convert(machine: Machine, ins: Instruction) -> None:
    to, source = ins.modifiers[-2:]
    supported = {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "satfinite"}
    if unknown := set(ins.modifiers[:-2]) - supported:
        raise PtxError(f"{ins}: the modifier .{min(unknown)} is not supported")
    # Triton converts a single number beside one that was never written, and takes its half.
    is_pair = len(ins.operands) == 3
    values = [machine.read(o, source, used=not is_pair) for o in ins.operands[1:]]
    machine.write(ins.operands[0], _converted(ins, to, source, values))


def _converted(ins: Instruction, to: str, source: str, values: list[Lanes]) -> Lanes:
    modifiers = ins.modifiers[:-2]
    if to in ("e4m3x2", "e5m2x2"):
        if source == "f16x2":
            values = [half.view(np.float16) for half in halves(values[0])]
        elif source != "f32":
            raise PtxError(f"{ins}: this conversion is not supported")
        high, low = (to_float8(v, to[:4]).astype(np.uint8) for v in values)
        return pair(high, low)
    if source in ("e4m3x2", "e5m2x2") and to == "f16x2":
        high, low = (from_float8(code, source[:4]) for code in halves(values[0]))
        return pair(canonical(high), canonical(low))
    if to in ("bf16x2", "f16x2") and source == "f32" and "rn" in modifiers:
        narrow = to_bfloat16 if to == "bf16x2" else lambda v: canonical(v.astype(np.float16))
        return pair(narrow(values[0]), narrow(values[1]))
    (x,) = values
    if to == "bf16" and source == "f32" and "rn" in modifiers:
        return to_bfloat16(x)
    if source == "bf16" and to == "f32":
        return from_bfloat16(x)
    if to not in TYPES or source not in TYPES or "x2" in to + source or "bf16" in (to, source):
        raise PtxError(f"{ins}: this conversion is not supported")
    return _between_numbers(ins, modifiers, to, x)


def _between_numbers(ins: Instruction, modifiers: tuple[str, ...], to: str, x: Lanes) -> Lanes:
    """Between integers and IEEE floats."""
    dtype = TYPES[to]
    is_float = x.dtype.kind == "f"
    whole = next((m for m in modifiers if m in _ROUND), None)
    if is_float and "ftz" in modifiers:
        x = flushed(x)
    if dtype.kind == "f":
        if whole is not None:
            x = _ROUND[whole](x)
        direction = next((_DIRECTED[m] for m in modifiers if m in _DIRECTED), None)
        y = x.astype(dtype) if direction is None else _toward(x, dtype, direction)
        if "sat" in modifiers:
            y = np.where(np.isnan(y), dtype.type(0), np.clip(y, dtype.type(0), dtype.type(1)))
        return canonical(flushed(y) if "ftz" in modifiers and to == "f32" else y)
    limits = np.iinfo(dtype)
    if not is_float:
        if "sat" in modifiers:
            return np.clip(x.astype(object), limits.min, limits.max).astype(dtype)
        return x.astype(dtype)
    if whole is None:
        raise PtxError(f"{ins}: a conversion to an integer needs a rounding")
    y = _ROUND[whole](x.astype(np.float64))
    small, large = y <= limits.min, y >= limits.max  # limits.max may round up: then it is beyond
    inner = np.where(np.isnan(y) | small | large, 0, y).astype(dtype)
    return np.where(small, dtype.type(limits.min), np.where(large, dtype.type(limits.max), inner))


def _toward(x: Lanes, dtype: Any, direction: int) -> Lanes:
    """x rounded to a narrower float: 0 toward zero, -1 down, 1 up."""
    exact = x.astype(np.float64) if x.dtype.itemsize < 8 or x.dtype.kind == "f" else x
    y = x.astype(dtype)
    wide = y.astype(np.float64)
    if direction == 0:
        beyond = np.abs(wide) > np.abs(exact)
        target = np.zeros_like(y)
    else:
        beyond = wide < exact if direction > 0 else wide > exact
        target = np.full_like(y, direction * np.inf)
    return np.where(beyond, np.nextafter(y, target), y)
