"""Instructions of a listing, and the registers that they name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from scripts.kernel_tools.sass.kinds import WORD

UNIFORM = 1000  # number of UR0; R0 is 0
LOCAL = 2000  # local memory, all of it as one register
STACK_POINTER = 1


@dataclass(frozen=True)
class Instruction:
    """One line of a listing.

    ``guard`` is the predicate under which it runs, or "". Predicates among the operands, and marks
    of the register cache (``.reuse``), are left out of ``operands``; ``predicates`` are those that
    it may set.
    """

    address: int
    text: str
    guard: str
    opcode: str
    operands: tuple[str, ...]
    predicates: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.address:04x} {self.text}"

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> list[str]:
        return self.opcode.split(".")[1:]

    @property
    def label(self) -> str:
        """Where it jumps to; "" if it names no label."""
        found = re.search(r"`\((.+?)\)", self.text)
        return found[1] if found else ""


def parse(address: int, text: str) -> Instruction:
    """Read one instruction of a listing of nvdisasm."""
    guard, body = "", text
    if text.startswith("@"):
        guard, _, body = text[1:].partition(" ")
    opcode, _, rest = body.strip().partition(" ")
    operands = [o.strip().replace(".reuse", "") for o in re.split(r",(?![^\[]*\])", rest)]
    kept = tuple(o for o in operands if o and not re.fullmatch(r"!?U?P(T|\d|R)", o))
    if opcode.startswith("R2P") or "PR" in operands[:1]:
        predicates = tuple(f"P{i}" for i in range(7))
    else:  # those that it only reads among them
        predicates = tuple(o for o in operands if re.fullmatch(r"U?P\d", o))
    guard = "" if guard in ("PT", "UPT") else guard
    return Instruction(address, text, guard, opcode, kept, predicates)


def parse_listing(listing: str) -> Iterator[str | Instruction]:
    """The labels and the instructions of a listing of ``nvdisasm -ndf -c``."""
    for line in listing.splitlines():
        if label := re.match(r"([.$\w]+):\s*$", line):
            yield label[1]
        elif found := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line):
            yield parse(int(found[1], 16), found[2])


@cache  # the same few hundred operands in every pass over a listing
def register_number(operand: str) -> int | None:
    """R7 -> 7, UR7 -> UNIFORM + 7, others None."""
    found = re.match(r"[-|~!]*(U?)R(\d+)", operand)
    return None if found is None else int(found[2]) + (UNIFORM if found[1] else 0)


@cache
def immediate(operand: str) -> int | None:
    """An integer written in the instruction, as 32 bits."""
    if re.fullmatch(r"-?(0x[0-9a-f]+|0)", operand):
        return int(operand, 0) & WORD
    return None


def width_in_registers(instruction: Instruction) -> int:
    """How many registers a memory access moves."""
    for modifier in instruction.modifiers:
        if modifier in ("64", "128", "256"):
            return int(modifier) // 32
        if found := re.fullmatch(r"x(\d+)", modifier):  # tensor memory
            return int(found[1])
    if instruction.name in ("LDSM", "STSM", "MOVM") and instruction.modifiers[-1] in ("2", "4"):
        return int(instruction.modifiers[-1])
    return 1
