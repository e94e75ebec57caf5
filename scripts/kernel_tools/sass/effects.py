"""What an instruction does to the bytes of its registers.

Instructions that copy (MOV, PRMT, shifts, AND and OR by masks, SEL, SHFL, conversions to float8)
are followed byte by byte. Integer arithmetic unites the kinds of its operands, carries included.
Floating-point arithmetic gives numbers of kind `FLOAT`; garbage stays garbage through everything.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence

from scripts.kernel_tools.sass import kinds
from scripts.kernel_tools.sass.instructions import (
    LOCAL,
    STACK_POINTER,
    Instruction,
    immediate,
    register_number,
    width_in_registers,
)
from scripts.kernel_tools.sass.kinds import ALL_BYTES, FLOAT, INTEGER, NONZERO, WORD, union

State = Mapping[int, int]  # number of a register -> flags of its bytes
Effect = Callable[["Reader"], list[int]]  # the flags of the registers that an instruction writes
Result = Callable[["Reader", Instruction], int]  # the same as one number, the first register lowest


class Reader:
    """Reads operands in one state."""

    def __init__(self, state: State, written: int) -> None:
        self.state = state
        self.written = written  # a bit per register that some path has written

    def register(self, number: int) -> int:
        if number == STACK_POINTER:
            return (kinds.STACK | NONZERO) * ALL_BYTES
        if not self.written >> number & 1:
            return (kinds.UNWRITTEN | NONZERO) * ALL_BYTES
        return self.state.get(number, 0)

    def operand(self, text: str, offset: int = 0) -> int:
        """Flags of an operand, or of the register ``offset`` after it."""
        number = register_number(text)
        if number is not None:
            flags = self.register(number + offset)
            if "-" in text:
                return kinds.smeared(flags)
            return kinds.complement(flags) if "~" in text else flags
        if text.startswith(("RZ", "URZ", "-RZ", "|RZ", "SRZ")):
            return 0
        if (value := immediate(text)) is not None:
            return kinds.of_constant(value)
        if re.match(r"[-+]?(\d|INF|QNAN|SNAN)", text):  # a float
            return NONZERO * ALL_BYTES
        return (INTEGER | NONZERO) * ALL_BYTES  # a constant bank, a special register

    def united(self, operands: Sequence[str], size: int = 1) -> int:
        """All flags of any byte of the operands, of ``size`` registers each."""
        flags = 0
        for operand in operands:
            for offset in range(size if register_number(operand) is not None else 1):
                flags |= _halves(operand, self.operand(operand, offset))
        return union(flags)


def _halves(operand: str, flags: int) -> int:
    """A packed operand: ``.H0_H0`` is its lower half twice."""
    if ".H0_H0" in operand:
        return (flags & 0xFFFF) * 0x10001
    if ".H1_H1" in operand:
        return (flags >> 16) * 0x10001
    return flags


def _number(flags: int, kind: int = FLOAT) -> int:
    """A number of ``kind`` computed from what has ``flags``; a constant from constants."""
    return flags & kinds.GARBAGE | kind | NONZERO if flags & kinds.KINDS else NONZERO


# --- what moves bytes


def _copied(read: Reader, ins: Instruction) -> int:
    return read.operand(ins.operands[1])


def _moved(read: Reader, ins: Instruction) -> int:
    """MOV, and UMOV.64 of a pair of registers or of a constant of 64 bits."""
    source = ins.operands[1]
    if "64" in ins.modifiers and immediate(source) is not None:
        value = int(source, 0)
        return kinds.of_constant(value & WORD) | kinds.of_constant(value >> 32 & WORD) << 32
    return read.operand(source) | read.operand(source, 1) << 32


def _selected(read: Reader, ins: Instruction) -> int:
    return read.operand(ins.operands[1]) | read.operand(ins.operands[2])


def _lut(read: Reader, ins: Instruction) -> int:
    """LOP3: any function of three bits, as a table."""
    operands, table = ins.operands[1:4], immediate(ins.operands[4])
    assert table is not None, ins.text
    words = [(read.operand(o), immediate(o)) for o in operands]
    result = 0
    for i in range(4):
        flags = [kinds.byte_of(word, i) for word, _ in words]
        bits = [3 if f else 1 for f in flags]
        for j, (_, constant) in enumerate(words):
            if constant is not None:
                byte = constant >> 8 * i & 0xFF
                bits[j] = (byte != 0xFF) | (byte > 0) << 1
        depends, nonzero = kinds.lut_byte(table, (bits[0], bits[1], bits[2]))
        if nonzero:
            used = (f & kinds.KINDS for f, is_used in zip(flags, depends, strict=True) if is_used)
            result |= functools.reduce(int.__or__, used, NONZERO) << 8 * i
    return result


def _permuted(read: Reader, ins: Instruction) -> int:
    """PRMT: any four of eight bytes, or their signs."""
    _, low, choice, high = ins.operands[:4]
    both, selector = read.operand(low) | read.operand(high) << 32, immediate(choice)
    if selector is None:
        return union(both | both >> 32) * ALL_BYTES
    return sum(kinds.byte_of(both, selector >> 4 * i & 7) << 8 * i for i in range(4))


def _funnel(read: Reader, ins: Instruction) -> int:
    """SHF: shifts of 32 and of 64 bits."""
    low, count, high = ins.operands[1:4]
    bits, modifiers = immediate(count), ins.modifiers
    if bits is None:
        return read.united((low, high, count)) * ALL_BYTES
    bits &= 63 if {"U64", "S64"} & set(modifiers) else 31
    both = read.operand(low) | read.operand(high) << 32
    if modifiers[0] == "L":  # HI: the high word of (high:low) << bits
        moved = kinds.shifted_left(both, bits)
        return moved >> 32 if "HI" in modifiers else moved
    if "HI" in modifiers:
        return kinds.shifted_right(both >> 32, bits, "S32" in modifiers)
    return kinds.shifted_right(both, bits)


def _extended(read: Reader, ins: Instruction) -> int:
    """SGXT: the low bits, by zeros or by their sign."""
    flags, bits = read.operand(ins.operands[1]), immediate(ins.operands[2])
    if bits is None:
        return union(flags) * ALL_BYTES
    count = -(-bits // 8)
    kept = flags & (1 << 8 * count) - 1
    if "U32" in ins.modifiers:
        return kept
    sign = kinds.byte_of(flags, max(bits - 1, 0) // 8)
    return kept | sum(sign << 8 * i for i in range(count, 4))


def _converted(read: Reader, ins: Instruction) -> int:
    """F2FP: packs two conversions; to float8, below the lower half of what it merges."""
    sources, modifiers = ins.operands[1:], ins.modifiers
    to = modifiers[1] if modifiers[0] == "SATFINITE" else modifiers[0]
    if "UNPACK_B" in modifiers:  # from float8
        flags = read.operand(sources[0]) >> (16 if ".H1" in sources[0] else 0)
        return sum(_number(kinds.byte_of(flags, i)) * 0x0101 << 16 * i for i in (0, 1))
    if to in ("E4M3", "E5M2"):
        if "UNPACK_B_MERGE_C" in modifiers:  # of a pair of 16-bit floats
            pair = read.operand(sources[0])
            given = [union(pair & 0xFFFF), union(pair >> 16)]
        else:
            given = [union(read.operand(s)) for s in (sources[1], sources[0])]
        low, high = (g & kinds.GARBAGE | kinds.FLOAT8 | NONZERO for g in given)
        merged = sources[1 if "UNPACK_B_MERGE_C" in modifiers else 2]
        return low | high << 8 | (read.operand(merged) & 0xFFFF) << 16
    given = [read.operand(s) for s in (sources[1], sources[0])]
    return sum(_number(union(g)) * 0x0101 << 16 * i for i, g in enumerate(given) if g)


LOADS = {
    "LDG": kinds.GLOBAL, "LD": kinds.GLOBAL, "LDS": kinds.SHARED, "LDSM": kinds.SHARED,
    "LDTM": kinds.SHARED, "ATOMG": kinds.GLOBAL, "ATOM": kinds.GLOBAL, "ATOMS": kinds.SHARED,
}  # fmt: skip


def _load(read: Reader, ins: Instruction) -> int:
    full = (LOADS[ins.name] | NONZERO) * _every(ins)
    return full & (0xFF if "U8" in ins.modifiers else 0xFFFF if "U16" in ins.modifiers else full)


def _local_load(read: Reader, ins: Instruction) -> int:
    flags = read.state.get(LOCAL, 0) | NONZERO * ALL_BYTES
    return sum(flags << 32 * i for i in range(_count(ins)))


# --- integer arithmetic


def _added(read: Reader, ins: Instruction) -> int:
    sources = ins.operands[1:]
    low = kinds.total(*(read.operand(s) for s in sources))
    high = [read.operand(s, 1) if register_number(s) is not None else 0 for s in sources]
    return low | (kinds.total(*high) | union(low) * ALL_BYTES) << 32


def _multiplied(read: Reader, ins: Instruction) -> int:
    """IMAD: ``a * b + c``; WIDE: in 64 bits; HI: the high word of that."""
    a, b, c = ins.operands[1:4]
    first, second, low = (read.operand(o) for o in (a, b, c))
    if "MOV" in ins.modifiers:
        return low
    if "HI" in ins.modifiers and "WIDE" not in ins.modifiers:
        return union(first | second | low) * ALL_BYTES
    if "WIDE" in ins.modifiers:
        product = union(first | second) * ALL_BYTES if first and second else 0
        high = kinds.total(product, read.operand(c, 1))
        carried = union(low) * ALL_BYTES if product else 0
        return kinds.total(product, low) | (high | carried) << 32
    product = kinds.smeared(first | second) if first and second else 0
    for flags, other in ((second, a), (first, b)):
        if (factor := immediate(other)) is not None and factor & (factor - 1) == 0:
            product = kinds.shifted_left(flags, factor.bit_length() - 1) if factor else 0
    return kinds.total(product, low)


def _scaled_sum(read: Reader, ins: Instruction) -> int:
    """LEA: ``(a << k) + b``; HI: of the high word of ``(c:a) << k``."""
    sources, bits = ins.operands[1:], immediate(ins.operands[-1])
    if bits is None:
        return read.united(sources) * ALL_BYTES
    low, addend = read.operand(sources[0]), read.operand(sources[1])
    if "HI" not in ins.modifiers:
        return kinds.total(kinds.shifted_left(low, bits) & WORD, addend)
    high = read.operand(sources[2]) if len(sources) > 3 else 0
    if "SX32" in ins.modifiers:
        high = kinds.byte_of(low, 3) * ALL_BYTES
    return kinds.total(kinds.shifted_left(low | high << 32, bits) >> 32 & WORD, addend)


def _integers(read: Reader, ins: Instruction) -> int:
    kind = INTEGER if ins.name in _MAKES_INTEGERS else 0
    size = 2 if ins.name == "F2I" and "F64" in ins.modifiers else 1
    return (kind | NONZERO | read.united(ins.operands[1:], size)) * _every(ins)


def _special(read: Reader, ins: Instruction) -> int:
    """A constant bank, or a special register; SRZ is zero."""
    return 0 if ins.operands[1] == "SRZ" else (INTEGER | NONZERO) * _every(ins)


# --- floating-point arithmetic


def _floats(read: Reader, ins: Instruction) -> int:
    """Every byte depends on every byte of the operands."""
    sources, modifiers = ins.operands[1:], ins.modifiers
    is_wide = ins.name in _DOUBLES or (ins.name == "F2F" and modifiers[-1] == "F64")
    is_wide |= ins.name in ("I2F", "UI2F") and bool({"U64", "S64"} & set(modifiers))
    flags = read.united(sources, 2 if is_wide else 1)
    if not flags and all(immediate(o) == 0 or "RZ" in o for o in sources):
        return 0
    return _number(flags) * _every(ins)


def _packed(read: Reader, ins: Instruction) -> int:
    """Two 16-bit numbers, each from the same halves of the operands."""
    if "F32" in ins.modifiers:
        return _floats(read, ins)
    words = [_halves(o, read.operand(o)) for o in ins.operands[1:]]
    flags = functools.reduce(int.__or__, words, 0)
    parts = (union(flags & 0xFFFF), union(flags >> 16))
    return sum(_number(part) * 0x0101 << 16 * i for i, part in enumerate(parts)) if flags else 0


def _pair(read: Reader, ins: Instruction) -> int:
    """Of a pair of float32: lane i of each operand, or the one register that it names."""
    result = 0
    for lane in (0, 1):
        flags = 0
        for source in ins.operands[1:]:
            is_paired = ".F32x2" in source and register_number(source) is not None
            flags |= union(read.operand(source, lane if is_paired else 0))
        result |= _number(flags) * ALL_BYTES << 32 * lane
    return result


def _matrix(read: Reader, ins: Instruction) -> int:
    """A product of matrices; its operands are 4, 2 and 4 registers, or lie in memory."""
    sizes = (0, _count(ins)) if ins.name == "QGMMA" else (4, 2, 4)
    flags = 0
    for source, size in zip(ins.operands[1:], sizes, strict=False):
        if register_number(source) is not None:
            flags |= read.united((source,), size)
    return (flags & kinds.GARBAGE | FLOAT | NONZERO) * _every(ins)


def _unknown(read: Reader, ins: Instruction) -> int:
    """The kinds of all operands, in every byte of one register."""
    names = re.findall(r"(?<!\w)U?R\d+", " ".join(ins.operands[1:]))
    return (NONZERO | read.united(names)) * ALL_BYTES


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
_DOUBLES = ("DADD", "DMUL", "DFMA", "DMNMX")
_PAIRS = ("FADD2", "FMUL2", "FFMA2")
_MAKES_INTEGERS = ("P2R", "VOTE", "VOTEU", "MATCH", "ELECT", "F2I", "UF2I", "UTCATOMSWS")
_SUMS = ("IADD", "IADD3", "UIADD3", "VIADD")
_CONSTANTS = ("S2R", "S2UR", "CS2R", "LDC", "LDCU", "ULDC")
_EFFECTS: dict[Result, tuple[str, ...]] = {
    _load: tuple(LOADS),
    _local_load: ("LDL",),
    _special: _CONSTANTS,
    _moved: ("MOV", "UMOV"),
    _copied: ("R2UR", "SHFL", "REDUX", "CREDUX"),
    _selected: ("SEL", "USEL", "FSEL"),
    _lut: ("LOP3", "ULOP3"),
    _permuted: ("PRMT", "UPRMT"),
    _funnel: ("SHF", "USHF"),
    _extended: ("SGXT", "USGXT"),
    _scaled_sum: ("LEA", "ULEA"),
    _multiplied: ("IMAD", "UIMAD"),
    _added: _SUMS,
    _integers: (
        "IABS", "IMNMX", "UIMNMX", "VIMNMX", "UVIMNMX", "VIMNMX3", "VIADDMNMX", "POPC", "UPOPC",
        "FLO", "UFLO", "BREV", "UBREV", *_MAKES_INTEGERS,
    ),
    _floats: (
        "FADD", "FMUL", "FFMA", "UFADD", "UFMUL", "UFFMA", "FHADD", "FMNMX", "FMNMX3", "MUFU",
        "FRND", "I2F", "UI2F", "I2FP", "F2F", *_DOUBLES,
    ),
    _packed: ("HADD2", "HMUL2", "HFMA2", "HMNMX2", "HSET2", "VHMNMX"),
    _pair: _PAIRS,
    _matrix: ("HMMA", "QMMA", "QGMMA"),
    _converted: ("F2FP",),
}  # fmt: skip
_TABLE = {name: function for function, names in _EFFECTS.items() for name in names}


def _count(ins: Instruction) -> int:
    """How many registers an instruction writes."""
    name, modifiers = ins.name, ins.modifiers
    if name in ("HMMA", "QMMA"):
        assert modifiers[0] in ("16832", "16816"), ins.text
        return 4
    if name == "QGMMA":  # 64 rows, over 128 threads
        return int(modifiers[0].split("x")[1]) // 2
    is_pair = {
        "CS2R": "32" not in modifiers,
        "F2F": "F64" in modifiers[:-1],
        **dict.fromkeys(("I2F", "UI2F"), "F64" in modifiers),
        "F2I": bool({"U64", "S64"} & set(modifiers)),
        **dict.fromkeys(("IMAD", "UIMAD"), "WIDE" in modifiers),
        **dict.fromkeys((*_DOUBLES, *_PAIRS), True),
    }
    if is_pair.get(name):
        return 2
    is_sized = name in (*LOADS, *_CONSTANTS, *_SUMS, "LDL", "MOV", "UMOV")
    return width_in_registers(ins) if is_sized else 1


def _every(ins: Instruction) -> int:
    """Times a set: the same in every byte of the result."""
    return int.from_bytes(b"\1" * 4 * _count(ins), "little")


def effect(ins: Instruction) -> tuple[list[int], Effect, bool]:
    """The registers that an instruction writes, what it gives them, and whether it is known here.

    An unknown one gives the kinds of all its operands to every byte of one register.
    """
    name = ins.name
    if name == "STL":  # all of local memory is one register, which only gains kinds
        return [LOCAL], functools.partial(_local, ins), True
    if name in NO_RESULT or (name in STORES and name not in LOADS):
        return [], lambda read: [], True
    is_known = name in _TABLE
    first = register_number(ins.operands[0]) if ins.operands else None
    if first is None:  # a result that is dropped (RZ), or only predicates
        return [], lambda read: [], is_known
    function, count = _TABLE.get(name, _unknown), _count(ins)

    def gives(read: Reader) -> list[int]:
        flags = function(read, ins)
        return [flags >> 32 * i & WORD for i in range(count)]

    return [first + i for i in range(count)], gives, is_known


def _local(ins: Instruction, read: Reader) -> list[int]:
    return [functools.reduce(int.__or__, stored(ins, read).values(), read.state.get(LOCAL, 0))]


def stored(ins: Instruction, read: Reader) -> dict[int, int]:
    """The registers that an instruction stores (or adds to memory), and the flags of the bytes."""
    first = register_number(ins.operands[-1]) if ins.name in STORES else None
    if first is None or "[" in ins.operands[-1]:
        return {}
    modifiers = set(ins.modifiers)
    mask = 0xFF if {"U8", "S8"} & modifiers else 0xFFFF if {"U16", "S16"} & modifiers else WORD
    return {r: read.register(r) & mask for r in range(first, first + width_in_registers(ins))}
