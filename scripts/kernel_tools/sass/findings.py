"""Stores of garbage: bytes that no computation made.

ptxas 12.8 and 12.9 lose results of float8 conversions that are used twice (triton#11111): one use
then reads whatever lies in some register, and stores it. Reported is, of all that a kernel stores,
reduces into memory or passes to atomics,

- a byte that may come from the stack pointer, or from a register that no instruction on any path
  from the entry wrote;
- a byte that may come from floating-point arithmetic, device memory or an integer such as a size or
  a thread's number, in a word that holds results of a conversion to float8 too: a lost result was
  read from a register that is in use for something else;
- the same in a store of 8 or 16 bits, where another such store of the kernel writes float8.

A kernel without a report has no path, whatever its branches and predicates, on which it stores such
a byte. Not proven is more: a whole word may be lost and replaced by another of a plausible kind (a
float32 by a float32, a float8 result by another). Not followed is what passes through predicates or
through shared memory, nor are addresses. An instruction that is not known hands on all kinds of its
operands, and is named in `Scan.unknown`. A path that predicates exclude may be reported although it
cannot run: where several branches depend on one predicate, only the nearest is taken into account.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from scripts.kernel_tools.sass import kinds
from scripts.kernel_tools.sass.effects import stored
from scripts.kernel_tools.sass.flow import Flow
from scripts.kernel_tools.sass.instructions import UNIFORM, Instruction

_NAMES = {
    kinds.STACK: "the stack pointer",
    kinds.UNWRITTEN: "a register that nothing wrote",
    kinds.FLOAT: "floating-point arithmetic",
    kinds.GLOBAL: "device memory",
    kinds.INTEGER: "an integer",
}


@dataclass(frozen=True)
class Finding:
    """A store of a byte of ``register`` that may be garbage, and what it may come from."""

    register: str
    byte: int
    origin: str
    store: Instruction

    def __str__(self) -> str:
        return f"byte {self.byte} of {self.register} may come from {self.origin}: {self.store}"


@dataclass(frozen=True)
class Scan:
    """What was found in a listing, and the opcodes that are not known."""

    findings: tuple[Finding, ...]
    unknown: frozenset[str]

    def __str__(self) -> str:
        unknown = [f"not known: {', '.join(sorted(self.unknown))}"] if self.unknown else []
        return "\n".join([*map(str, self.findings), *unknown]) or "nothing found"


def scan(listing: str) -> Scan:
    """Scan the kernels of a listing of ``nvdisasm -ndf -c``.

    Raises:
        ValueError: the listing has no instructions, or a jump cannot be followed.
    """
    _, *parts = re.split(r"^\s*\.section\s+\.text\.([\w$.]+),.*$", listing, flags=re.M)
    named = list(zip(parts[::2], parts[1::2], strict=True)) or [("the kernel", listing)]
    flows = [Flow(name, text) for name, text in named]
    findings = tuple(finding for flow in flows for finding in _findings(flow))
    return Scan(findings, frozenset().union(*(flow.unknown for flow in flows)))


def _findings(flow: Flow) -> list[Finding]:
    """One for each instruction that stores garbage, in the order of the listing."""
    stores = [
        (node, i, register, flags)
        for node in flow.nodes
        for i, reader in flow.run(node)
        for register, flags in stored(flow.steps[i].instruction, reader).items()
    ]
    narrow_float8 = any(
        kinds.union(flags) & kinds.FLOAT8 and _narrow(flow, i) for _, i, _, flags in stores
    )
    found: dict[int, Finding] = {}
    for node, i, register, flags in stores:
        bad = kinds.GARBAGE
        if kinds.union(flags) & kinds.FLOAT8 or (narrow_float8 and _narrow(flow, i)):
            bad |= kinds.FLOAT | kinds.GLOBAL | kinds.INTEGER
        if i in found or not flags & bad * kinds.ALL_BYTES:
            continue
        instruction = flow.steps[i].instruction
        guarded = flow.run(node, instruction.guard, i)
        reader = next(reader for step, reader in guarded if step == i)
        runs = stored(instruction, reader)[register]
        if runs & bad * kinds.ALL_BYTES:
            byte = next(k for k in range(4) if kinds.byte_of(runs, k) & bad)
            kind = kinds.byte_of(runs, byte) & bad
            kind &= -kind  # one of them, the worst
            found[i] = Finding(_name(register), byte, _NAMES[kind], instruction)
    return [found[i] for i in sorted(found)]


def _narrow(flow: Flow, index: int) -> bool:
    return bool({"U8", "S8", "U16", "S16"} & set(flow.steps[index].instruction.modifiers))


def _name(register: int) -> str:
    return f"UR{register - UNIFORM}" if register >= UNIFORM else f"R{register}"
