"""What an instruction does to the bytes of its registers.

Instructions that copy (MOV, PRMT, shifts, AND and OR by masks, SEL, SHFL, conversions to float8)
are followed byte by byte. Integer arithmetic unites the kinds of its operands, carries included.
Floating-point arithmetic gives numbers of kind `FLOAT`; garbage stays garbage through everything.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence

from scripts.kernel_tools.sass.instructions import (
    LOCAL,
    STACK_POINTER,
    Instruction,
    immediate,
    register_number,
    width_in_registers,
)
from scripts.kernel_tools.sass.kinds import (
    ALL_BYTES,
    FLOAT,
    FLOAT8,
    GARBAGE,
    GLOBAL,
    INTEGER,
    KINDS,
    NONZERO,
    SHARED,
    STACK,
    UNWRITTEN,
    WORD,
    byte_of,
    complement,
    lut_byte,
    of_constant,
    shifted_left,
    shifted_right,
    smeared,
    total,
    union,
)

State = Mapping[int, int]  # number of a register -> flags of its bytes
Effect = Callable[["Reader"], list[int]]  # the flags of the registers that an instruction writes


class Reader:
    """Reads operands in one state."""

    def __init__(self, state: State, written: int) -> None:
        self.state = state
        self.written = written  # a bit per register that some path has written

    def register(self, number: int) -> int:
        if number == STACK_POINTER:
            return (STACK | NONZERO) * ALL_BYTES
        if not self.written >> number & 1:
            return (UNWRITTEN | NONZERO) * ALL_BYTES
        return self.state.get(number, 0)

    def operand(self, text: str, offset: int = 0) -> int:
        """Flags of an operand, or of the register ``offset`` after it."""
        number = register_number(text)
        if number is not None:
            flags = self.register(number + offset)
            return smeared(flags) if "-" in text else complement(flags) if "~" in text else flags
        if text.startswith(("RZ", "URZ", "-RZ", "|RZ", "SRZ")):
            return 0
        if (value := immediate(text)) is not None:
            return of_constant(value)
        if re.match(r"[-+]?(\d|INF|QNAN|SNAN)", text):  # a float
            return NONZERO * ALL_BYTES
        return (INTEGER | NONZERO) * ALL_BYTES  # a constant bank, a special register


def _product(a: str, b: str, read: Reader) -> int:
    for x, y in ((a, b), (b, a)):
        if (factor := immediate(y)) is not None and factor & (factor - 1) == 0:
            return shifted_left(read.operand(x), factor.bit_length() - 1) if factor else 0
    first, second = read.operand(a), read.operand(b)
    return smeared(first | second) if first and second else 0


def _lut(read: Reader, instruction: Instruction) -> int:
    """LOP3: any function of three bits, as a table."""
    operands, table = instruction.operands[1:4], immediate(instruction.operands[4])
    assert table is not None, instruction.text
    flags = [read.operand(o) for o in operands]
    constants = [immediate(o) for o in operands]
    result = 0
    for i in range(4):
        bits = []
        for word, constant in zip(flags, constants, strict=True):
            if constant is not None:
                byte = constant >> 8 * i & 0xFF
                bits.append((1 if byte != 0xFF else 0) | (2 if byte else 0))
            else:
                bits.append(3 if byte_of(word, i) else 1)
        depends, nonzero = lut_byte(table, (bits[0], bits[1], bits[2]))
        byte = NONZERO if nonzero else 0
        for word, used in zip(flags, depends, strict=True):
            byte |= byte_of(word, i) & KINDS if used and nonzero else 0
        result |= byte << 8 * i
    return result


def _permuted(read: Reader, instruction: Instruction) -> int:
    """PRMT: any four of eight bytes, or their signs."""
    operands = instruction.operands
    low, high, selector = (
        read.operand(operands[1]),
        read.operand(operands[3]),
        immediate(operands[2]),
    )
    if selector is None:
        return union(low | high) * ALL_BYTES
    both = low | high << 32
    return sum(byte_of(both, selector >> 4 * i & 7) << 8 * i for i in range(4))


def _halves(operand: str, flags: int) -> int:
    """A packed operand: ``.H0_H0`` is its lower half twice."""
    if ".H0_H0" in operand:
        return flags & 0xFFFF | (flags & 0xFFFF) << 16
    if ".H1_H1" in operand:
        return flags >> 16 | (flags >> 16) << 16
    return flags


def _number(flags: int, kind: int) -> int:
    """A number of ``kind`` computed from what has ``flags``; a constant from constants."""
    if not flags & KINDS:
        return NONZERO
    return flags & GARBAGE | kind | NONZERO


def _arithmetic(read: Reader, operands: Sequence[str], width: int = 1) -> int:
    """Every byte depends on every byte of the operands, of ``width`` registers each."""
    flags = 0
    for operand in operands:
        for offset in range(width if register_number(operand) is not None else 1):
            flags |= _halves(operand, read.operand(operand, offset))
    if not flags and all(immediate(o) == 0 or "RZ" in o for o in operands):
        return 0
    return _number(union(flags), FLOAT) * ALL_BYTES


def _packed(read: Reader, operands: Sequence[str]) -> int:
    """Two 16-bit numbers, each from the same halves of the operands."""
    result = 0
    words = [_halves(o, read.operand(o)) for o in operands]
    if not any(words):
        return 0
    for shift in (0, 16):
        flags = 0
        for word in words:
            flags |= union(word >> shift & 0xFFFF)
        result |= _number(flags, FLOAT) * 0x0101 << shift
    return result


def _converted(read: Reader, instruction: Instruction) -> int:
    """F2FP: packs two conversions; to float8, below the lower half of what it merges."""
    sources, modifiers = list(instruction.operands[1:]), instruction.modifiers
    to = modifiers[1] if modifiers[0] == "SATFINITE" else modifiers[0]
    if "UNPACK_B" in modifiers:  # from float8
        text = sources[0]
        flags = read.operand(text) >> (16 if ".H1" in text else 0) & 0xFFFF
        low, high = (_number(byte_of(flags, i), FLOAT) for i in (0, 1))
        return low * 0x0101 | high * 0x0101 << 16
    if to in ("E4M3", "E5M2"):
        if "UNPACK_B_MERGE_C" in modifiers:  # of a pair of 16-bit floats
            pair = read.operand(sources[0])
            given = [union(pair & 0xFFFF), union(pair >> 16)]
            merged = sources[1]
        else:
            given = [union(read.operand(s)) for s in (sources[1], sources[0])]
            merged = sources[2]
        low, high = ((g & GARBAGE) | FLOAT8 | NONZERO for g in given)
        return low | high << 8 | (read.operand(merged) & 0xFFFF) << 16
    result = 0
    for shift, source in ((16, sources[0]), (0, sources[1])):
        flags = read.operand(source)
        result |= (_number(union(flags), FLOAT) * 0x0101 << shift) if flags else 0
    return result


def _funnel(read: Reader, instruction: Instruction) -> int:
    """SHF: shifts of 32 and of 64 bits."""
    low, count, high = instruction.operands[1:4]
    modifiers = instruction.modifiers
    bits = immediate(count)
    if bits is None:
        flags = read.operand(low) | read.operand(high) | read.operand(count)
        return union(flags) * ALL_BYTES if flags else 0
    bits &= 63 if "U64" in modifiers or "S64" in modifiers else 31
    both = read.operand(low) | read.operand(high) << 32
    if modifiers[0] == "L":
        if "HI" in modifiers:  # the high word of (high:low) << bits
            whole, part = divmod(bits, 8)
            moved = both << 8 * whole
            return (moved | moved << 8 if part else moved) >> 32 & WORD
        return shifted_left(read.operand(low), bits)
    if "HI" in modifiers:
        return shifted_right(read.operand(high), bits, "S32" in modifiers)
    whole, part = divmod(bits, 8)
    moved = both >> 8 * whole
    return (moved | moved >> 8 if part else moved) & WORD


def _extended(read: Reader, instruction: Instruction) -> int:
    """SGXT: the low bits, by zeros or by their sign."""
    flags, bits = read.operand(instruction.operands[1]), immediate(instruction.operands[2])
    if bits is None:
        return union(flags) * ALL_BYTES
    kept = flags & (1 << -(-bits // 8) * 8) - 1
    if "U32" in instruction.modifiers:
        return kept
    sign = byte_of(flags, max(bits - 1, 0) // 8)
    return kept | sum(sign << 8 * i for i in range(-(-bits // 8), 4))


LOADS = {
    "LDG": GLOBAL, "LD": GLOBAL, "LDS": SHARED, "LDSM": SHARED, "LDTM": SHARED, "ATOMG": GLOBAL,
    "ATOM": GLOBAL, "ATOMS": SHARED,
}  # fmt: skip
STORES = {
    "STG", "ST", "STS", "STSM", "STTM", "STL", "RED", "REDG", "REDS", "ATOM", "ATOMG", "ATOMS",
}  # fmt: skip
COMPUTED_JUMPS = {"BRX", "BRXU", "JMP", "JMX", "JMXU"}
# They write no register, but perhaps predicates, memory, or what counts and waits.
NO_RESULT = {
    "ISETP", "UISETP", "FSETP", "UFSETP", "DSETP", "HSETP2", "PLOP3", "UPLOP3", "FCHK", "R2P",
    "BRA", "EXIT", "KILL", "CALL", "RET", "BPT", "BSSY", "BSYNC", "BREAK", "BMOV", "YIELD", "NOP",
    "BAR", "WARPSYNC", "MEMBAR", "FENCE", "ERRBAR", "CCTL", "CCTLL", "DEPBAR", "NANOSLEEP",
    "LDGSTS", "LDGDEPBAR", "SYNCS", "ARRIVES", "ACQBULK", "PREEXIT", "USETMAXREG", "UTMALDG",
    "UTMASTG", "UTMAPF", "UTMACMDFLUSH", "UBLKCP", "UTCBAR", "UTCQMMA", "UTCHMMA", "UVIRTCOUNT",
    "WARPGROUP", "UCGABAR_ARV", "UCGABAR_WAIT", *COMPUTED_JUMPS,
}  # fmt: skip


def effect(instruction: Instruction) -> tuple[list[int], Effect, bool]:
    """The registers that an instruction writes, what it gives them, and whether it is known here.

    An unknown one gives the kinds of all its operands to every byte of one register.
    """
    name, operands = instruction.name, instruction.operands
    if name == "STL":
        return [LOCAL], lambda read: [_local(instruction, read)], True
    if name in NO_RESULT or (name in STORES and name not in LOADS):
        return [], _nothing, True
    is_known = name in _TABLE
    first = register_number(operands[0]) if operands else None
    if first is None:  # a result that is dropped (RZ), or only predicates
        return [], _nothing, is_known
    count, gives = _TABLE[name](instruction) if is_known else _each(1, instruction, _unknown)
    return [first + i for i in range(count)], gives, is_known


def _nothing(read: Reader) -> list[int]:
    return []


def _local(instruction: Instruction, read: Reader) -> int:
    """All of local memory is one register, which only gains kinds."""
    return functools.reduce(
        int.__or__, stored(instruction, read).values(), read.state.get(LOCAL, 0)
    )


def _unknown(read: Reader, instruction: Instruction) -> int:
    flags = NONZERO
    for number in re.findall(r"(?<!\w)U?R\d+", " ".join(instruction.operands[1:])):
        flags |= union(read.operand(number))
    return flags * ALL_BYTES


Entry = Callable[[Instruction], tuple[int, Effect]]  # how many registers, and what they are given
Result = Callable[[Reader, Instruction], int]


def _each(count: int, instruction: Instruction, result: Result) -> tuple[int, Effect]:
    return count, lambda read: [result(read, instruction)] * count


def _one(result: Result) -> Entry:
    return lambda instruction: _each(1, instruction, result)


def _copied(read: Reader, instruction: Instruction) -> int:
    return read.operand(instruction.operands[1])


def _moved(instruction: Instruction) -> tuple[int, Effect]:
    """MOV, and UMOV.64 of a pair of registers or of a constant of 64 bits."""
    source = instruction.operands[1]
    if "64" not in instruction.modifiers:
        return 1, lambda read: [read.operand(source)]
    if immediate(source) is None:
        return 2, lambda read: [read.operand(source), read.operand(source, 1)]
    value = int(source, 0)
    return 2, lambda read: [of_constant(value & WORD), of_constant(value >> 32 & WORD)]


def _selected(read: Reader, instruction: Instruction) -> int:
    return read.operand(instruction.operands[1]) | read.operand(instruction.operands[2])


def _load(instruction: Instruction) -> tuple[int, Effect]:
    full = (LOADS[instruction.name] | NONZERO) * ALL_BYTES
    if "U8" in instruction.modifiers:
        full &= 0xFF
    elif "U16" in instruction.modifiers:
        full &= 0xFFFF
    return _each(width_in_registers(instruction), instruction, lambda read, _: full)


def _local_load(instruction: Instruction) -> tuple[int, Effect]:
    count = width_in_registers(instruction)
    return _each(count, instruction, lambda read, _: read.state.get(LOCAL, 0) | NONZERO * ALL_BYTES)


def _special(instruction: Instruction) -> tuple[int, Effect]:
    """A constant bank, or a special register; SRZ is zero."""
    count = width_in_registers(instruction)
    if instruction.name == "CS2R" and "32" not in instruction.modifiers:
        count = 2
    flags = 0 if instruction.operands[1] == "SRZ" else (INTEGER | NONZERO) * ALL_BYTES
    return _each(count, instruction, lambda read, _: flags)


def _added(instruction: Instruction) -> tuple[int, Effect]:
    sources, count = instruction.operands[1:], 2 if "64" in instruction.modifiers else 1
    return count, lambda read: _wide_sum(read, sources, count)


def _integers(instruction: Instruction) -> tuple[int, Effect]:
    name, modifiers, sources = instruction.name, instruction.modifiers, instruction.operands[1:]
    kind = INTEGER if name in _MAKES_INTEGERS else 0
    size = 2 if name == "F2I" and "F64" in modifiers else 1
    count = 2 if name == "F2I" and {"U64", "S64"} & set(modifiers) else 1
    return _each(count, instruction, lambda read, _: _integer(read, sources, kind, size))


def _floats(instruction: Instruction) -> tuple[int, Effect]:
    name, modifiers, sources = instruction.name, instruction.modifiers, instruction.operands[1:]
    if name in _PACKED and "F32" not in modifiers:
        return 1, lambda read: [_packed(read, sources)]
    if name in _PAIRS:
        return 2, lambda read: [_lane(read, sources, i) for i in (0, 1)]
    size, count = (2, 2) if name in _DOUBLES else _sizes(name, modifiers)
    return _each(count, instruction, lambda read, _: _arithmetic(read, sources, size))


_PACKED = ("HADD2", "HMUL2", "HFMA2", "HMNMX2", "HSET2", "VHMNMX")
_DOUBLES = ("DADD", "DMUL", "DFMA", "DMNMX")
_PAIRS = ("FADD2", "FMUL2", "FFMA2")
_MAKES_INTEGERS = ("P2R", "VOTE", "VOTEU", "MATCH", "ELECT", "F2I", "UF2I", "UTCATOMSWS")


def _sizes(name: str, modifiers: Sequence[str]) -> tuple[int, int]:
    """Registers per operand and per result of a conversion between numbers of 32 and 64 bits."""
    if name == "F2F":
        return 2 if modifiers[-1] == "F64" else 1, 2 if "F64" in modifiers[:-1] else 1
    if name in ("I2F", "UI2F"):
        return 2 if {"U64", "S64"} & set(modifiers) else 1, 2 if "F64" in modifiers else 1
    return 1, 1


def _multiplied(instruction: Instruction) -> tuple[int, Effect]:
    """IMAD: ``a * b + c``; WIDE: in 64 bits; HI: the high word of that."""
    a, b, c = instruction.operands[1:4]
    if "MOV" in instruction.modifiers:
        return 1, lambda read: [read.operand(c)]
    if "WIDE" in instruction.modifiers:
        return 2, lambda read: _wide_product(read, a, b, c)
    if "HI" in instruction.modifiers:
        return 1, lambda read: [
            union(read.operand(a) | read.operand(b) | read.operand(c)) * ALL_BYTES
        ]
    return 1, lambda read: [total(_product(a, b, read), read.operand(c))]


def _wide_product(read: Reader, a: str, b: str, c: str) -> list[int]:
    first, second = read.operand(a), read.operand(b)
    product = union(first | second) * ALL_BYTES if first and second else 0
    low, high = read.operand(c), read.operand(c, 1)
    carried = union(low) * ALL_BYTES if product else 0
    return [total(product, low), total(product, high) | carried]


def _scaled_sum(read: Reader, instruction: Instruction) -> int:
    """LEA: ``(a << k) + b``; HI: of the high word of ``(c:a) << k``."""
    sources, modifiers = instruction.operands[1:], instruction.modifiers
    bits = immediate(sources[-1])
    if bits is None:
        flags = functools.reduce(int.__or__, (read.operand(s) for s in sources), 0)
        return union(flags) * ALL_BYTES
    if "HI" not in modifiers:
        return total(shifted_left(read.operand(sources[0]), bits), read.operand(sources[1]))
    upper = read.operand(sources[2]) if len(sources) > 3 else 0
    if "SX32" in modifiers:
        upper = byte_of(read.operand(sources[0]), 3) * ALL_BYTES
    both = read.operand(sources[0]) | upper << 32
    whole, part = divmod(bits, 8)
    moved = both << 8 * whole
    shifted = (moved | moved << 8 if part else moved) >> 32 & WORD
    return total(shifted, read.operand(sources[1]))


def _wide_sum(read: Reader, sources: Sequence[str], count: int) -> list[int]:
    words = [total(*(read.operand(s) for s in sources))]
    if count == 2:
        high = [read.operand(s, 1) if register_number(s) is not None else 0 for s in sources]
        words.append(total(*high) | union(words[0]) * ALL_BYTES)
    return words


def _integer(read: Reader, sources: Sequence[str], kinds: int, size: int) -> int:
    flags = kinds | NONZERO
    for source in sources:
        for offset in range(size if register_number(source) is not None else 1):
            flags |= union(read.operand(source, offset))
    return flags * ALL_BYTES


def _lane(read: Reader, sources: Sequence[str], lane: int) -> int:
    """Of a pair of float32: lane i of each operand, or the one register that it names."""
    flags = 0
    for source in sources:
        paired = ".F32x2" in source and register_number(source) is not None
        flags |= union(read.operand(source, lane if paired else 0))
    return _number(flags, FLOAT) * ALL_BYTES


def _matrix(instruction: Instruction) -> tuple[int, Effect]:
    """A product of matrices; its operands are 4, 2 and 4 registers, or lie in memory."""
    shape = instruction.modifiers[0]
    if instruction.name == "QGMMA":  # 64 rows, over 128 threads
        count = int(shape.split("x")[1]) // 2
        sizes: tuple[int, ...] = (0, count)
    else:
        assert shape in ("16832", "16816"), instruction.text
        count, sizes = 4, (4, 2, 4)

    def result(read: Reader, instruction: Instruction) -> int:
        flags = 0
        for source, size in zip(instruction.operands[1:], sizes, strict=False):
            if register_number(source) is not None:
                for offset in range(size):
                    flags |= union(read.operand(source, offset))
        return (flags & GARBAGE | FLOAT | NONZERO) * ALL_BYTES

    return _each(count, instruction, result)


_TABLE: dict[str, Entry] = {
    **dict.fromkeys(LOADS, _load),
    **dict.fromkeys(("S2R", "S2UR", "CS2R", "LDC", "LDCU", "ULDC"), _special),
    **dict.fromkeys(("MOV", "UMOV"), _moved),
    **dict.fromkeys(("R2UR", "SHFL", "REDUX", "CREDUX"), _one(_copied)),
    **dict.fromkeys(("SEL", "USEL", "FSEL"), _one(_selected)),
    **dict.fromkeys(("LOP3", "ULOP3"), _one(_lut)),
    **dict.fromkeys(("PRMT", "UPRMT"), _one(_permuted)),
    **dict.fromkeys(("SHF", "USHF"), _one(_funnel)),
    **dict.fromkeys(("SGXT", "USGXT"), _one(_extended)),
    **dict.fromkeys(("LEA", "ULEA"), _one(_scaled_sum)),
    **dict.fromkeys(("IMAD", "UIMAD"), _multiplied),
    **dict.fromkeys(("IADD", "IADD3", "UIADD3", "VIADD"), _added),
    **dict.fromkeys(
        ("IABS", "IMNMX", "UIMNMX", "VIMNMX", "UVIMNMX", "VIMNMX3", "VIADDMNMX", "POPC", "UPOPC",
         "FLO", "UFLO", "BREV", "UBREV", *_MAKES_INTEGERS), _integers,
    ),
    **dict.fromkeys(
        ("FADD", "FMUL", "FFMA", "UFADD", "UFMUL", "UFFMA", "FHADD", "FMNMX", "FMNMX3", "MUFU",
         "FRND", "I2F", "UI2F", "I2FP", "F2F", *_PACKED, *_PAIRS, *_DOUBLES), _floats,
    ),
    **dict.fromkeys(("HMMA", "QMMA", "QGMMA"), _matrix),
    "F2FP": _one(_converted),
    "LDL": _local_load,
}  # fmt: skip


def stored(instruction: Instruction, read: Reader) -> dict[int, int]:
    """The registers that an instruction stores (or adds to memory), and the flags of the bytes."""
    if instruction.name not in STORES:
        return {}
    first = register_number(instruction.operands[-1])
    if first is None or "[" in instruction.operands[-1]:
        return {}
    mask = WORD
    if {"U8", "S8"} & set(instruction.modifiers):
        mask = 0xFF
    elif {"U16", "S16"} & set(instruction.modifiers):
        mask = 0xFFFF
    count = width_in_registers(instruction)
    return {first + i: read.register(first + i) & mask for i in range(count)}
