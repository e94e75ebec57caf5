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
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.kernel_tools.ptx.formats import (
    canonical,
    flushed,
    from_bfloat16,
    halves,
    pair,
    to_bfloat16,
)
from scripts.kernel_tools.ptx.machine import TYPES, Machine, instruction
from scripts.kernel_tools.ptx.program import Immediate, Instruction, PtxError, Register, Vector

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
    product = a.astype(np.float64) * b.astype(np.float64)  # exact
    return rounded_to_odd(*two_sum(product, c.astype(np.float64))).astype(a.dtype)


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
        else:
            out[i] = a[i] * b[i] + c[i]
    return out


def maximum_minimum(ins: Instruction, operation: str, a: Lanes, b: Lanes) -> Lanes:
    """``max`` or ``min`` of floats under the modifiers ``.NaN`` and ``.xorsign.abs``."""
    sign = None
    unsigned = f"u{a.dtype.itemsize}"
    if "xorsign" in ins.modifiers:
        top = np.array(1 << 8 * a.dtype.itemsize - 1).astype(unsigned)
        sign = (a.view(unsigned) ^ b.view(unsigned)) & top
        a, b = np.abs(a), np.abs(b)
    # Zeros: -0 is below +0.
    if operation == "max":
        first = (a > b) | ((a == b) & ~np.signbit(a))
    else:
        first = (a < b) | ((a == b) & np.signbit(a))
    chosen = np.where(first, a, b)
    if "NaN" in ins.modifiers:
        chosen = np.where(np.isnan(a), a, chosen)  # where b is NaN, `first` is false
    else:
        chosen = np.where(np.isnan(b), a, chosen)
    bits = canonical(chosen)
    if sign is not None:
        bits = np.where(np.isnan(chosen), bits, bits | sign)
    return bits.view(a.dtype)


# --- one value, or the two halves of a register, per lane

_PACKED = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32", "s16x2": "s16", "u16x2": "u16"}


def _numbers(machine: Machine, ins: Instruction, types: list[str]) -> list[list[Lanes]]:
    """The operands after the result; of a packed type, those of the high and the low halves.

    bfloat16 is read as float32, whose operations round to the same bits when rounded again.
    """
    operands = zip(ins.operands[1:], types, strict=False)
    read = [machine.read(o, t, used=machine.partly_written(o) is None) for o, t in operands]
    if ins.type in _PACKED:
        element = _PACKED[ins.type]
        both = [[_as(element, half) for half in halves(v)] for v in read]
        return [[v[0] for v in both], [v[1] for v in both]]
    return [[_as(t, v) for t, v in zip(types, read, strict=False)]]


def _as(type_: str, values: Lanes) -> Lanes:
    return from_bfloat16(values) if type_ == "bf16" else values.view(TYPES[type_])


def _elementwise(
    machine: Machine,
    ins: Instruction,
    function: Callable[..., Lanes],
    types: list[str] | None = None,
) -> None:
    """Write ``function`` of the operands; float results get a GPU's NaN.

    In lanes that have not written an operand, but other lanes have, the result counts as not
    written: see `Machine.partly_written`.
    """
    missing = machine.partly_written(*ins.operands[1:])
    types = types or [ins.type] * (len(ins.operands) - 1)
    results = []
    ftz = "ftz" in ins.modifiers
    for operands in _numbers(machine, ins, types):
        value = function(*map(flushed, operands)) if ftz else function(*operands)
        if value.dtype.kind == "f":
            if ftz:
                value = flushed(value)
            if "sat" in ins.modifiers:
                zero, one = value.dtype.type(0), value.dtype.type(1)
                value = np.where(np.isnan(value), zero, np.clip(value, zero, one))
            bf16 = _PACKED.get(ins.type, ins.type) == "bf16"
            value = to_bfloat16(value) if bf16 else canonical(value)
        results.append(value)
    machine.write(ins.operands[0], results[0] if len(results) == 1 else _packed(results))
    if missing is not None:
        machine.forget(ins.operands[0], missing)


def _packed(results: list[Lanes]) -> Lanes:
    high, low = (v.view(f"u{v.dtype.itemsize}") for v in results)
    return pair(high, low)


def is_float(type_: str) -> bool:
    """Whether a PTX type is of floats, single or packed."""
    return type_[0] == "f" or type_.startswith("bf")


def _directed(ins: Instruction) -> None:
    if other := {"rz", "rm", "rp"} & set(ins.modifiers):
        raise PtxError(f"{ins}: the rounding .{min(other)} is not supported")


_OPERATORS: dict[str, Callable[..., Lanes]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
}


@instruction("add", "sub", "mul")
def _add(machine: Machine, ins: Instruction) -> None:
    operator = _OPERATORS[ins.name]
    if is_float(ins.type):
        _directed(ins)
        if ins.modifiers[-2:] in (("f32", "bf16"), ("f32", "f16")):  # a narrow first operand
            narrow = machine.read(ins.operands[1], ins.type)
            wide = machine.read(ins.operands[2], "f32")
            value = operator(_as(ins.type, narrow).astype(np.float32), wide)
            machine.write(ins.operands[0], canonical(value))
            return
        _elementwise(machine, ins, operator)
    elif "wide" in ins.modifiers or "hi" in ins.modifiers:
        machine.write(ins.operands[0], _product(machine, ins))
    else:
        if "sat" in ins.modifiers:
            raise PtxError(f"{ins}: the modifier .sat is not supported")
        _elementwise(machine, ins, operator)


def _product(machine: Machine, ins: Instruction) -> Lanes:
    """The product of the first two operands, by ``.lo``, ``.hi`` or ``.wide``."""
    a, b = (machine.read(o, ins.type) for o in ins.operands[1:3])
    if "wide" in ins.modifiers or "hi" in ins.modifiers:
        size = a.dtype.itemsize
        if size == 8:
            exact = a.astype(object) * b.astype(object) >> 64
            return (exact & (1 << 64) - 1).astype(np.uint64)
        wide = f"{a.dtype.kind}{2 * size}"
        product = a.astype(wide) * b.astype(wide)
        return product if "wide" in ins.modifiers else (product >> 8 * size).astype(a.dtype)
    return a * b


@instruction("mad")
def _mad(machine: Machine, ins: Instruction) -> None:
    if is_float(ins.type):
        _fma(machine, ins)
        return
    product = _product(machine, ins)
    addend = machine.read(ins.operands[3], f"{ins.type[0]}{8 * product.dtype.itemsize}")
    machine.write(ins.operands[0], product + addend)


@instruction("fma")
def _fma(machine: Machine, ins: Instruction) -> None:
    _directed(ins)
    if "relu" in ins.modifiers:
        raise PtxError(f"{ins}: the modifier .relu is not supported")
    if _PACKED.get(ins.type, ins.type) != "bf16":
        _elementwise(machine, ins, fused)
        return

    def fused_wide(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
        product = a.astype(np.float64) * b.astype(np.float64)
        return rounded_to_odd(*two_sum(product, c.astype(np.float64)))

    _elementwise(machine, ins, fused_wide)


@instruction("div", "rem")
def _divide(machine: Machine, ins: Instruction) -> None:
    if is_float(ins.type):
        _directed(ins)
        if "approx" in ins.modifiers or "full" in ins.modifiers:
            _approximate(machine, ins, np.divide)
        else:
            _elementwise(machine, ins, np.divide)
        return
    a, b = (machine.read(o, ins.type) for o in ins.operands[1:])
    zero = b == 0
    if zero[machine.lanes].any():
        machine.report.find("division by zero", ins, "the result is not defined")
    b = np.where(zero, b.dtype.type(1), b)
    if ins.type[0] == "u":
        quotient = a // b
    else:  # toward zero; the smallest number has no absolute value, but wraps to the right one
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
}


@instruction("ex2", "lg2", "sin", "cos", "tanh", "sqrt", "rcp", "rsqrt")
def _function(machine: Machine, ins: Instruction) -> None:
    function = _FUNCTIONS[ins.name]
    if "approx" in ins.modifiers:
        _approximate(machine, ins, function)
    else:  # sqrt.rn and rcp.rn: numpy rounds them once
        _directed(ins)
        _elementwise(machine, ins, function)


def _approximate(machine: Machine, ins: Instruction, function: Callable[..., Lanes]) -> None:
    """In float64, rounded once."""

    def of_float64(*operands: Lanes) -> Lanes:
        return function(*(v.astype(np.float64) for v in operands)).astype(operands[0].dtype)

    _elementwise(machine, ins, of_float64)


@instruction("min", "max")
def _extremum(machine: Machine, ins: Instruction) -> None:
    def chosen(*operands: Lanes) -> Lanes:
        value = operands[0]
        for other in operands[1:]:
            if is_float(ins.type):
                value = maximum_minimum(ins, ins.name, value, other)
            else:
                value = (np.minimum if ins.name == "min" else np.maximum)(value, other)
        return np.maximum(value, 0) if "relu" in ins.modifiers else value

    _elementwise(machine, ins, chosen)


@instruction("copysign")
def _copysign(machine: Machine, ins: Instruction) -> None:
    """The second operand, with the sign of the first."""
    _elementwise(machine, ins, lambda sign, magnitude: np.copysign(magnitude, sign))


@instruction("abs", "neg")
def _sign(machine: Machine, ins: Instruction) -> None:
    """Of floats, only the sign's bit changes, NaNs' too."""
    if not is_float(ins.type):
        function = np.abs if ins.name == "abs" else np.negative
        _elementwise(machine, ins, function)
        return
    bits = 8 * TYPES[ins.type].itemsize
    sign = {"f16x2": 0x80008000, "bf16x2": 0x80008000}.get(ins.type, 1 << bits - 1)
    values = machine.read(ins.operands[1], f"b{bits}")
    if "ftz" in ins.modifiers:
        values = flushed(values.view(np.float32)).view(np.uint32)
    mask = values.dtype.type(sign)
    machine.write(ins.operands[0], values & ~mask if ins.name == "abs" else values ^ mask)


# --- logic


_LOGIC: dict[str, Callable[..., Lanes]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "cnot": lambda x: (x == 0).astype(x.dtype),
}


@instruction("and", "or", "xor", "not", "cnot")
def _logic(machine: Machine, ins: Instruction) -> None:
    values = [machine.read(o, ins.type) for o in ins.operands[1:]]
    machine.write(ins.operands[0], _LOGIC[ins.name](*values))


@instruction("shl", "shr")
def _shift(machine: Machine, ins: Instruction) -> None:
    """By more than the width, all bits leave."""
    x = machine.read(ins.operands[1], ins.type)
    count = machine.read(ins.operands[2], "u32")
    bits = 8 * x.dtype.itemsize
    function = np.left_shift if ins.name == "shl" else np.right_shift
    if x.dtype.kind == "i":
        machine.write(ins.operands[0], function(x, np.minimum(count, bits - 1).astype(x.dtype)))
        return
    shifted = function(x, np.minimum(count, bits - 1).astype(x.dtype))
    inside = count < bits
    machine.write(ins.operands[0], shifted if inside.all() else np.where(inside, shifted, 0))


@instruction("shf")
def _funnel(machine: Machine, ins: Instruction) -> None:
    """Shift the 64 bits of two registers; left gives the high word, right the low one."""
    low, high, count = (machine.read(o, "u32").astype(np.uint64) for o in ins.operands[1:])
    count = count & np.uint64(31) if "wrap" in ins.modifiers else np.minimum(count, 32)
    both = high << np.uint64(32) | low
    left = "l" in ins.modifiers
    word = both << count >> np.uint64(32) if left else both >> count
    machine.write(ins.operands[0], word.astype(np.uint32))


@instruction("bfe")
def _extract(machine: Machine, ins: Instruction) -> None:
    """A field of bits; signed, it is extended by its top bit, and beyond the word by the word's."""
    x = machine.read(ins.operands[1], ins.type)
    start, length = (machine.read(o, "u32").astype(np.int64) & 255 for o in ins.operands[2:])
    bits = 8 * x.dtype.itemsize
    end = np.minimum(start + length, bits)
    left = np.clip(bits - end, 0, bits - 1).astype(x.dtype)
    right = np.clip(bits - np.maximum(end - start, 0), 0, bits - 1).astype(x.dtype)
    field = x << left >> right
    if x.dtype.kind == "i":
        beyond = (x >> x.dtype.type(bits - 1)).astype(x.dtype)
        field = np.where(length == 0, x.dtype.type(0), np.where(start >= bits, beyond, field))
    else:
        field = np.where((length == 0) | (start >= bits), x.dtype.type(0), field)
    machine.write(ins.operands[0], field)


@instruction("bfi")
def _insert(machine: Machine, ins: Instruction) -> None:
    x, into = (machine.read(o, ins.type) for o in ins.operands[1:3])
    start, length = (machine.read(o, "u32") & np.uint32(255) for o in ins.operands[3:])
    bits = 8 * x.dtype.itemsize
    position = np.arange(bits)
    inside = (position >= start[:, None]) & (position < (start + length)[:, None])
    weights = np.array([1 << i for i in range(bits)], x.dtype)
    mask = np.where(inside, weights, x.dtype.type(0)).sum(1, dtype=x.dtype)
    shifted = np.where(start < bits, x << np.minimum(start, bits - 1).astype(x.dtype), 0)
    machine.write(ins.operands[0], (into & ~mask | shifted & mask).astype(x.dtype))


@instruction("prmt")
def _permute(machine: Machine, ins: Instruction) -> None:
    """Each nibble of the last operand chooses a byte of the first two; its top bit, its sign."""
    if ins.modifiers != ("b32",):
        raise PtxError(f"{ins}: this mode is not supported")
    a, b, choice = (machine.read(o, "u32") for o in ins.operands[1:])
    pool = (b.astype(np.uint64) << np.uint64(32) | a)[:, None]
    nibble = choice[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
    byte = (pool >> ((nibble & 7).astype(np.uint64) * np.uint64(8))).astype(np.uint8)
    sign = np.where(byte & 0x80, np.uint8(0xFF), np.uint8(0))
    chosen = np.where(nibble & 8, sign, byte)
    machine.write(ins.operands[0], np.ascontiguousarray(chosen).view("<u4")[:, 0])


@instruction("lop3")
def _lookup(machine: Machine, ins: Instruction) -> None:
    """A truth table of three bits, applied to each."""
    a, b, c = (machine.read(o, "u32") for o in ins.operands[1:4])
    table = ins.operands[4]
    if ins.modifiers != ("b32",) or not isinstance(table, Immediate):
        raise PtxError(f"{ins}: this form is not supported")
    result = np.zeros(machine.count, np.uint32)
    for row in range(8):
        if table.value >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    machine.write(ins.operands[0], result)


@instruction("popc", "clz", "brev")
def _count_bits(machine: Machine, ins: Instruction) -> None:
    x = machine.read(ins.operands[1], ins.type)
    bits = 8 * x.dtype.itemsize
    place = x[:, None] >> np.arange(bits, dtype=x.dtype) & x.dtype.type(1)
    if ins.name == "popc":
        value = place.sum(1).astype(np.uint32)
    elif ins.name == "clz":
        value = np.where(x == 0, bits, place[:, ::-1].argmax(1)).astype(np.uint32)
    else:
        value = (place[:, ::-1] << np.arange(bits, dtype=x.dtype)).sum(1).astype(x.dtype)
    machine.write(ins.operands[0], value)


# --- comparisons and moves


def compared(ins: Instruction, how: str, a: Lanes, b: Lanes) -> Lanes:
    """``a how b``. Comparisons of floats are false with a NaN, those that end in u true."""
    if a.dtype.kind == "f":
        unordered = np.isnan(a) | np.isnan(b)
        if how in ("nan", "num"):
            return unordered if how == "nan" else ~unordered
        if how == "ne":
            return (a != b) & ~unordered
        if len(how) == 3:
            return compared(ins, how[:2], a, b) | unordered
    how = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(how, how)
    functions = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }
    if how not in functions:
        raise PtxError(f"{ins}: the comparison .{how} is not supported")
    return functions[how](a, b)


@instruction("setp")
def _compare(machine: Machine, ins: Instruction) -> None:
    result, a, b, *rest = ins.operands
    if ins.type in _PACKED:
        raise PtxError(f"{ins}: comparisons of packed values are not supported")
    x, y = _as(ins.type, machine.read(a, ins.type)), _as(ins.type, machine.read(b, ins.type))
    if "ftz" in ins.modifiers:
        x, y = flushed(x), flushed(y)
    value = compared(ins, ins.modifiers[0], x, y)
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
        value = np.zeros(machine.count, unsigned)
        for i, part in enumerate(parts):
            value |= part.astype(unsigned) << unsigned.type(i * bits // len(parts))
        machine.write(result, value)
        return
    value = machine.read(source, f"b{bits}", used=False)
    missing = machine.unwritten(source)
    if isinstance(result, Vector):
        count = len(result.elements)
        narrow = f"u{bits // count // 8}"
        shifts = (unsigned.type(i * bits // count) for i in range(count))
        machine.write_all(result, [(value >> s).astype(narrow) for s in shifts])
    else:
        machine.write(result, value)
    if missing is not None:
        for element in result.elements if isinstance(result, Vector) else (result,):
            if isinstance(element, Register):
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
