"""Arithmetic, logic, comparisons and moves.

Floats follow IEEE with one rounding, as PTX does: float32 by numpy's own operations, fused products
by sums in float64 that are rounded to odd first. NaN results have a GPU's one pattern.

*Approximations.* Instructions with ``.approx``, and ``div.full``, are computed in float64 and
rounded once. A GPU's own results differ from that by what NVIDIA's manual states (PTX ISA,
"Floating Point Instructions"): 2 ulps for ``ex2`` and ``div.full``, a relative error of 2^-22 for
most others. A kernel that uses one has outputs within a tolerance, and not exact bits.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.kernel_tools.ptx import formats
from scripts.kernel_tools.ptx.machine import TYPES, Machine, instruction
from scripts.kernel_tools.ptx.program import Instruction, PtxError, Register, Vector

Lanes = npt.NDArray[Any]


def two_sum(a: Lanes, b: Lanes) -> tuple[Lanes, Lanes]:
    """The rounded sum, and its exact error."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def rounded_to_odd(total: Lanes, error: Lanes) -> Lanes:
    """float64 sums whose last bit is odd where they are inexact.

    A second rounding, to a type that is narrower by two bits, is then the only one that counts.
    """
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + step, bits).view(np.float64)


def fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """``a * b + c`` with one rounding, for float16, float32 and float64."""
    if a.dtype == np.float64:
        return _fused_64(a, b, c)
    return _fused_wide(a, b, c).astype(a.dtype)


def _fused_wide(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    product = a.astype(np.float64) * b.astype(np.float64)  # exact
    return rounded_to_odd(*two_sum(product, c.astype(np.float64)))


def _fused_64(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """Exact fractions where finite: kernels use few of these."""
    out = a * b + c
    for i in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if exact:
            try:
                out[i] = float(exact)  # Python rounds a fraction once, to nearest even
            except OverflowError:
                out[i] = np.inf if exact > 0 else -np.inf
    return out


def maximum_minimum(ins: Instruction, operation: str, a: Lanes, b: Lanes) -> Lanes:
    """``max`` or ``min`` of floats under the modifiers ``.NaN`` and ``.xorsign.abs``."""
    unsigned = f"u{a.dtype.itemsize}"
    sign = np.zeros_like(a.view(unsigned))
    if "xorsign" in ins.modifiers:
        top = np.array(1 << 8 * a.dtype.itemsize - 1).astype(unsigned)
        sign = (a.view(unsigned) ^ b.view(unsigned)) & top
        a, b = np.abs(a), np.abs(b)
    # Zeros: -0 is below +0.
    is_max = operation == "max"
    first = (a > b if is_max else a < b) | ((a == b) & (np.signbit(a) ^ is_max))
    first |= np.isnan(a if "NaN" in ins.modifiers else b)
    chosen = np.where(first, a, b)
    return np.where(
        np.isnan(chosen), formats.canonical(chosen), formats.canonical(chosen) | sign
    ).view(a.dtype)


# --- one value, or the two halves of a register, per lane

_PACKED = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32", "s16x2": "s16", "u16x2": "u16"}


def _as(type_: str, values: Lanes) -> Lanes:
    """bfloat16 as float32, whose operations round to the same bits when rounded again."""
    return formats.from_bfloat16(values) if type_ == "bf16" else values.view(TYPES[type_])


def is_float(type_: str) -> bool:
    """Whether a PTX type is of floats, single or packed."""
    return type_[0] == "f" or type_.startswith("bf")


def _elementwise(machine: Machine, ins: Instruction, function: Callable[..., Lanes]) -> None:
    """Write ``function`` of the operands; float results get a GPU's NaN.

    In lanes that have not written an operand, but other lanes have, the result counts as not
    written: see `Machine.partly_written`.
    """
    sources, element = ins.operands[1:], _PACKED.get(ins.type, ins.type)
    if is_float(element) and (other := {"rz", "rm", "rp"} & set(ins.modifiers)):
        raise PtxError(f"{ins}: the rounding .{min(other)} is not supported")
    missing = machine.partly_written(*sources)
    read = [machine.read(o, ins.type, machine.partly_written(o) is None) for o in sources]
    parts = zip(*map(formats.halves, read), strict=True) if ins.type in _PACKED else [read]
    results = []
    for part in parts:
        operands = [_as(element, values) for values in part]
        flush = formats.flushed if "ftz" in ins.modifiers else np.asarray
        value = flush(function(*map(flush, operands)))
        if value.dtype.kind == "f":
            if "sat" in ins.modifiers:
                zero, one = value.dtype.type(0), value.dtype.type(1)
                value = np.where(np.isnan(value), zero, np.clip(value, zero, one))
            value = formats.to_bfloat16(value) if element == "bf16" else formats.canonical(value)
        results.append(value.view(f"u{value.dtype.itemsize}") if ins.type in _PACKED else value)
    machine.write(ins.operands[0], formats.pair(*results) if ins.type in _PACKED else results[0])
    if missing is not None:
        machine.forget(ins.operands[0], missing)


_OPERATORS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@instruction(*_OPERATORS)
def _add(machine: Machine, ins: Instruction) -> None:
    operator = _OPERATORS[ins.name]
    if ins.modifiers[-2:] in (("f32", "bf16"), ("f32", "f16")):  # a narrow first operand
        narrow = machine.read(ins.operands[1], ins.type)
        wide = machine.read(ins.operands[2], "f32")
        value = operator(_as(ins.type, narrow).astype(np.float32), wide)
        machine.write(ins.operands[0], formats.canonical(value))
    elif not is_float(ins.type) and {"wide", "hi"} & set(ins.modifiers):
        machine.write(ins.operands[0], _product(machine, ins))
    elif not is_float(ins.type) and "sat" in ins.modifiers:
        raise PtxError(f"{ins}: the modifier .sat is not supported")
    else:
        _elementwise(machine, ins, operator)


def _product(machine: Machine, ins: Instruction) -> Lanes:
    """The product of the first two operands, by ``.lo``, ``.hi`` or ``.wide``."""
    a, b = (machine.read(o, ins.type) for o in ins.operands[1:3])
    if not {"wide", "hi"} & set(ins.modifiers):
        return a * b
    size = a.dtype.itemsize
    if size == 8:
        exact = a.astype(object) * b.astype(object) >> 64
        return (exact & (1 << 64) - 1).astype(np.uint64)
    wide = f"{a.dtype.kind}{2 * size}"
    product = a.astype(wide) * b.astype(wide)
    return product if "wide" in ins.modifiers else (product >> 8 * size).astype(a.dtype)


@instruction("mad", "fma")
def _fma(machine: Machine, ins: Instruction) -> None:
    if "relu" in ins.modifiers:
        raise PtxError(f"{ins}: the modifier .relu is not supported")
    if is_float(ins.type):
        is_bfloat16 = _PACKED.get(ins.type, ins.type) == "bf16"
        _elementwise(machine, ins, _fused_wide if is_bfloat16 else fused)
        return
    product = _product(machine, ins)
    addend = machine.read(ins.operands[3], f"{ins.type[0]}{8 * product.dtype.itemsize}")
    machine.write(ins.operands[0], product + addend)


@instruction("div", "rem")
def _divide(machine: Machine, ins: Instruction) -> None:
    if is_float(ins.type):
        is_exact = not {"approx", "full"} & set(ins.modifiers)
        _elementwise(machine, ins, np.divide if is_exact else _approximate(np.divide))
        return
    a, b = (machine.read(o, ins.type) for o in ins.operands[1:])
    zero = b == 0
    if zero[machine.lanes].any():
        machine.report.find("division by zero", ins, "the result is not defined")
    b = np.where(zero, b.dtype.type(1), b)
    # Toward zero; the smallest number has no absolute value, but wraps to the right one.
    unsigned = f"u{a.dtype.itemsize}"
    size = np.abs(a).view(unsigned) // np.abs(b).view(unsigned)
    quotient = np.where((a < 0) != (b < 0), -size, size).view(a.dtype)
    machine.write(ins.operands[0], quotient if ins.name == "div" else a - quotient * b)


_FUNCTIONS: dict[str, Callable[..., Lanes]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "copysign": lambda sign, magnitude: np.copysign(magnitude, sign),
}


@instruction(*_FUNCTIONS)
def _function(machine: Machine, ins: Instruction) -> None:
    """Approximations in float64; sqrt.rn and rcp.rn: numpy rounds them once."""
    function = _FUNCTIONS[ins.name]
    _elementwise(machine, ins, _approximate(function) if "approx" in ins.modifiers else function)


def _approximate(function: Callable[..., Lanes]) -> Callable[..., Lanes]:
    """In float64, rounded once."""

    def of_float64(*operands: Lanes) -> Lanes:
        return function(*(v.astype(np.float64) for v in operands)).astype(operands[0].dtype)

    return of_float64


@instruction("min", "max")
def _extremum(machine: Machine, ins: Instruction) -> None:
    choose: Callable[[Lanes, Lanes], Lanes] = np.minimum if ins.name == "min" else np.maximum
    if is_float(ins.type):
        choose = partial(maximum_minimum, ins, ins.name)

    def chosen(*operands: Lanes) -> Lanes:
        value = reduce(choose, operands)
        return np.maximum(value, 0) if "relu" in ins.modifiers else value

    _elementwise(machine, ins, chosen)


@instruction("abs", "neg")
def _sign(machine: Machine, ins: Instruction) -> None:
    """Of floats, only the sign's bit changes, NaNs' too."""
    if not is_float(ins.type):
        _elementwise(machine, ins, np.abs if ins.name == "abs" else np.negative)
        return
    bits = 8 * TYPES[ins.type].itemsize
    sign = {"f16x2": 0x80008000, "bf16x2": 0x80008000}.get(ins.type, 1 << bits - 1)
    values = machine.read(ins.operands[1], f"b{bits}")
    if "ftz" in ins.modifiers:
        values = formats.flushed(values.view(np.float32)).view(np.uint32)
    mask = values.dtype.type(sign)
    machine.write(ins.operands[0], values & ~mask if ins.name == "abs" else values ^ mask)


# --- bits


def _shift(ins: Instruction, x: Lanes, count: Lanes) -> Lanes:
    """By more than the width, all bits leave."""
    bits = 8 * x.dtype.itemsize
    function = np.left_shift if ins.name == "shl" else np.right_shift
    shifted = function(x, np.minimum(count, bits - 1).astype(x.dtype))
    return shifted if x.dtype.kind == "i" else np.where(count < bits, shifted, 0)


def _funnel(ins: Instruction, low: Lanes, high: Lanes, count: Lanes) -> Lanes:
    """Shift the 64 bits of two registers; left gives the high word, right the low one."""
    count = count & 31 if "wrap" in ins.modifiers else np.minimum(count, 32)
    both, count = formats.pair(high, low), count.astype(np.uint64)
    word = both << count >> np.uint64(32) if "l" in ins.modifiers else both >> count
    return word.astype(np.uint32)


def _extracted(ins: Instruction, x: Lanes, start: Lanes, length: Lanes) -> Lanes:
    """A field of bits; signed, it is extended by its top bit, and beyond the word by the word's."""
    start, length = (v.astype(np.int64) & 255 for v in (start, length))
    bits = 8 * x.dtype.itemsize
    end = np.minimum(start + length, bits)
    left = np.clip(bits - end, 0, bits - 1).astype(x.dtype)
    right = np.clip(bits - np.maximum(end - start, 0), 0, bits - 1).astype(x.dtype)
    beyond = x >> x.dtype.type(bits - 1) if x.dtype.kind == "i" else x.dtype.type(0)
    field = np.where(start >= bits, beyond, x << left >> right)
    return np.where(length == 0, x.dtype.type(0), field)


def _permuted(ins: Instruction, a: Lanes, b: Lanes, choice: Lanes) -> Lanes:
    """Each nibble of the last operand chooses a byte of the first two; its top bit, its sign."""
    if ins.modifiers != ("b32",):
        raise PtxError(f"{ins}: this mode is not supported")
    nibble = choice[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
    byte = (formats.pair(b, a)[:, None] >> (nibble & 7).astype(np.uint64) * np.uint64(8)).astype(
        np.uint8
    )
    chosen = np.where(nibble & 8, (byte >> 7) * np.uint8(0xFF), byte)
    return np.ascontiguousarray(chosen).view("<u4")[:, 0]


def _looked_up(ins: Instruction, a: Lanes, b: Lanes, c: Lanes, table: Lanes) -> Lanes:
    """A truth table of three bits, applied to each."""
    result = np.zeros_like(a)
    for row in range(8):
        of_row = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        result |= np.where(table >> row & 1, of_row, 0)
    return result


def _counted(ins: Instruction, x: Lanes) -> Lanes:
    bits = 8 * x.dtype.itemsize
    place = x[:, None] >> np.arange(bits, dtype=x.dtype) & x.dtype.type(1)
    if ins.name == "popc":
        return place.sum(1).astype(np.uint32)
    if ins.name == "clz":
        return np.where(x == 0, bits, place[:, ::-1].argmax(1)).astype(np.uint32)
    return (place[:, ::-1] << np.arange(bits, dtype=x.dtype)).sum(1).astype(x.dtype)


_LOGIC: dict[str, Callable[..., Lanes]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}
_BITS: dict[str, Callable[..., Lanes]] = {
    **{name: lambda ins, *values: _LOGIC[ins.name](*values) for name in _LOGIC},
    **dict.fromkeys(("shl", "shr"), _shift),
    "shf": _funnel,
    "bfe": _extracted,
    "prmt": _permuted,
    "lop3": _looked_up,
    **dict.fromkeys(("popc", "clz", "brev"), _counted),
}


@instruction(*_BITS)
def _of_bits(machine: Machine, ins: Instruction) -> None:
    """Operands behind the first are numbers of bits where the instruction shifts."""
    first, *others = ins.operands[1:]
    type_ = "u32" if ins.name in ("shl", "shr", "bfe") else ins.type
    values = [machine.read(first, ins.type), *(machine.read(o, type_) for o in others)]
    machine.write(ins.operands[0], _BITS[ins.name](ins, *values))


# --- comparisons and moves

_COMPARISONS: dict[str, Callable[..., Lanes]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    **dict.fromkeys(("lt", "lo"), np.less),
    **dict.fromkeys(("le", "ls"), np.less_equal),
    **dict.fromkeys(("gt", "hi"), np.greater),
    **dict.fromkeys(("ge", "hs"), np.greater_equal),
}


def compared(how: str, a: Lanes, b: Lanes) -> Lanes:
    """``a how b``. Comparisons of floats are false with a NaN, those that end in u true."""
    if a.dtype.kind != "f":
        return _COMPARISONS[how](a, b)
    unordered = np.isnan(a) | np.isnan(b)
    if how in ("nan", "num"):
        return unordered == (how == "nan")
    value = _COMPARISONS[how[:2]](a, b) & ~unordered
    return value | unordered if len(how) == 3 else value


@instruction("setp")
def _compare(machine: Machine, ins: Instruction) -> None:
    result, a, b, *rest = ins.operands
    if ins.type in _PACKED:
        raise PtxError(f"{ins}: comparisons of packed values are not supported")
    x, y = (_as(ins.type, machine.read(o, ins.type)) for o in (a, b))
    if "ftz" in ins.modifiers:
        x, y = formats.flushed(x), formats.flushed(y)
    value = compared(ins.modifiers[0], x, y)
    other = ~value
    if rest:
        join = _LOGIC[ins.modifiers[1]]
        also = machine.read(rest[0], "pred")
        value, other = join(value, also), join(other, also)
    machine.write(result, value)
    if ins.second is not None:
        machine.write(ins.second, other)


@instruction("selp")
def _select(machine: Machine, ins: Instruction) -> None:
    """Only the operand that a lane selects needs a value."""
    result, a, b, predicate = ins.operands
    chosen = machine.read(predicate, "pred")
    bits = f"b{8 * TYPES[ins.type].itemsize}"
    first, other = machine.read(a, bits, chosen), machine.read(b, bits, ~chosen)
    machine.write(result, np.where(chosen, first, other))


@instruction("mov")
def _move(machine: Machine, ins: Instruction) -> None:
    """Moves a value, or splits it into parts, or joins parts; the first part is the lowest.

    The move of a register that was never written is not a use of it: compilers join two halves and
    take one of them out again. What it is moved to counts as not written; what it is joined with
    does not, and holds garbage.
    """
    result, source = ins.operands
    if ins.type == "pred":
        machine.write(result, machine.read(source, "pred"))
        return
    bits = 8 * TYPES[ins.type].itemsize
    unsigned = TYPES[f"b{bits}"]
    if isinstance(source, Vector):
        parts = machine.read_all(source, f"b{bits // len(source.elements)}", used=False)
        shifts = (unsigned.type(i * bits // len(parts)) for i in range(len(parts)))
        shifted = (part.astype(unsigned) << s for part, s in zip(parts, shifts, strict=True))
        machine.write(result, reduce(np.bitwise_or, shifted))
        return
    value, missing = machine.read(source, f"b{bits}", used=False), machine.unwritten(source)
    elements = result.elements if isinstance(result, Vector) else (result,)
    count = len(elements)
    for i, element in enumerate(elements):
        machine.write(
            element, (value >> unsigned.type(i * bits // count)).astype(f"u{bits // count // 8}")
        )
        if missing is not None and isinstance(element, Register):
            machine.forget(element, missing)


@instruction("cvta")
def _generic_address(machine: Machine, ins: Instruction) -> None:
    """Generic addresses are those of global memory here."""
    if "global" not in ins.modifiers:
        raise PtxError(f"{ins}: only addresses of global memory are supported")
    machine.write(ins.operands[0], machine.read(ins.operands[1], "b64"))


@instruction("nanosleep", "griddepcontrol")
def _nothing(machine: Machine, ins: Instruction) -> None:
    """Only changes the time that a kernel takes."""
