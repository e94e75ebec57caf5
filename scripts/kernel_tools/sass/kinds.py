"""Of what kind may each byte of a register be? Sets of kinds, and arithmetic on them.

The value of a 32-bit register is not known here, only, for each of its four bytes, a set of flags:
the kinds of value that the byte may hold, and whether it may be other than zero. A byte without
flags is zero. The four sets lie in one integer, byte i in bits 8 * i, so that what moves bytes
moves the flags in the same way.
"""

from __future__ import annotations

import functools
import itertools

STACK = 1  # the stack pointer, R1
UNWRITTEN = 2  # a register that no instruction on any path wrote
FLOAT8 = 4  # a result of a conversion to float8
FLOAT = 8  # a result of floating-point arithmetic
GLOBAL = 16  # read from device memory
SHARED = 32  # read from shared, tensor or local memory
INTEGER = 64  # kernel arguments, thread numbers and the like
NONZERO = 128  # may be other than zero
GARBAGE = STACK | UNWRITTEN
KINDS = NONZERO - 1

WORD = 0xFFFFFFFF
ALL_BYTES = 0x01010101  # times a set: the same in every byte


def of_constant(value: int) -> int:
    """Of an integer that is known."""
    return sum(NONZERO << 8 * i for i in range(4) if value >> 8 * i & 0xFF)


def byte_of(flags: int, i: int) -> int:
    """The set of byte i."""
    return flags >> 8 * i & 0xFF


def union(flags: int) -> int:
    """All flags of any byte."""
    return (flags | flags >> 8 | flags >> 16 | flags >> 24) & 0xFF


def smeared(flags: int) -> int:
    """Each byte depends on itself and on those below, as where a carry runs."""
    flags |= flags << 8
    return (flags | flags << 16) & WORD


def complement(flags: int) -> int:
    """Of ``~x``."""
    return flags | NONZERO * ALL_BYTES


def shifted_left(flags: int, bits: int) -> int:
    """Of ``x << bits``, in as many bytes as that has."""
    moved = flags << bits // 8 * 8
    return moved | moved << 8 if bits % 8 else moved


def shifted_right(flags: int, bits: int, signed: bool = False) -> int:
    """Of ``x >> bits``, in 32 bits."""
    if signed:
        flags |= byte_of(flags, 3) * ALL_BYTES << 32
    moved = flags >> bits // 8 * 8
    return (moved | moved >> 8 if bits % 8 else moved) & WORD


def total(*terms: int) -> int:
    """Of a sum of integers.

    A byte carries into those above it where two of its terms may be other than zero.
    """
    result = carry = 0
    for i in range(4):
        parts = [byte_of(term, i) for term in terms]
        byte = carry
        for part in parts:
            byte |= part
        if sum(part >> 7 for part in parts) + (carry > 0) > 1:
            carry |= byte
        result |= byte << 8 * i
    return result


@functools.cache
def lut_byte(table: int, bits: tuple[int, int, int]) -> tuple[tuple[bool, ...], bool]:
    """Which operands of a LOP3 a byte of its result depends on, and whether it may be nonzero.

    ``bits``: what the bits of each operand's byte may be: 1 for only 0, 2 for only 1, 3 for both.
    """
    rows = [
        (x, y, z)
        for x, y, z in itertools.product((0, 1), repeat=3)
        if bits[0] >> x & bits[1] >> y & bits[2] >> z & 1
    ]
    results = {row: table >> (4 * row[0] + 2 * row[1] + row[2]) & 1 for row in rows}

    def changes(row: tuple[int, int, int], operand: int) -> bool:
        x, y, z = (bit ^ (i == operand) for i, bit in enumerate(row))
        return results.get((x, y, z), results[row]) != results[row]

    depends = tuple(any(changes(row, operand) for row in rows) for operand in range(3))
    return depends, any(results.values())
