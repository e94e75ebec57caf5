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
from collections import deque
from dataclasses import dataclass

from scripts.kernel_tools.sass.effects import Reader, stored
from scripts.kernel_tools.sass.flow import Flow, Node
from scripts.kernel_tools.sass.instructions import UNIFORM, Instruction
from scripts.kernel_tools.sass.kinds import (
    ALL_BYTES,
    FLOAT,
    FLOAT8,
    GARBAGE,
    GLOBAL,
    INTEGER,
    SHARED,
    STACK,
    UNWRITTEN,
    byte_of,
    union,
)

_NAMES = {
    STACK: "the stack pointer",
    UNWRITTEN: "a register that nothing wrote",
    FLOAT: "floating-point arithmetic",
    GLOBAL: "device memory",
    INTEGER: "an integer",
}


@dataclass(frozen=True)
class Finding:
    """A store of garbage; ``path`` leads from where the byte comes from to the store."""

    register: str
    byte: int
    origin: str
    path: tuple[Instruction, ...]

    @property
    def store(self) -> Instruction:
        return self.path[-1]

    def __str__(self) -> str:
        head = f"byte {self.byte} of {self.register} may come from {self.origin}:"
        return "\n".join([head, *(f"    {step}" for step in self.path)])


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
    narrow_float8 = any(union(flags) & FLOAT8 and _narrow(flow, i) for _, i, _, flags in stores)
    found: dict[int, Finding] = {}
    for node, i, register, flags in stores:
        bad = GARBAGE
        if union(flags) & FLOAT8 or (narrow_float8 and _narrow(flow, i)):
            bad |= FLOAT | GLOBAL | INTEGER
        if i in found or not flags & bad * ALL_BYTES:
            continue
        instruction = flow.steps[i].instruction
        runs = stored(instruction, _reader(flow, node, i, instruction.guard))[register]
        if runs & bad * ALL_BYTES:
            byte = next(k for k in range(4) if byte_of(runs, k) & bad)
            kind = byte_of(runs, byte) & bad
            kind &= -kind  # one of them, the worst
            path = _path(flow, node, i, (register, byte), kind)
            found[i] = Finding(_name(register), byte, _NAMES[kind], path)
    return [found[i] for i in sorted(found)]


def _narrow(flow: Flow, index: int) -> bool:
    return bool({"U8", "S8", "U16", "S16"} & set(flow.steps[index].instruction.modifiers))


def _name(register: int) -> str:
    return f"UR{register - UNIFORM}" if register >= UNIFORM else f"R{register}"


def _reader(flow: Flow, node: Node, index: int, guard: str = "") -> Reader:
    return next(reader for i, reader in flow.run(node, guard, index) if i == index)


Byte = tuple[int, int]  # of a register: its number, and which


def _path(
    flow: Flow, node: Node, index: int, target: Byte | None, kind: int
) -> tuple[Instruction, ...]:
    """Backwards from a store: what wrote this byte, from which byte of an operand, and so on."""
    path = [flow.steps[index].instruction]
    seen: set[tuple[Node, int, Byte]] = set()
    while target is not None and (found := _writer(flow, node, index, target, kind)) is not None:
        node, index = found
        if (node, index, target) in seen:
            break
        seen.add((node, index, target))
        path.append(flow.steps[index].instruction)
        target = _source(flow, node, index, target, kind)
    return tuple(reversed(path))


def _writer(flow: Flow, node: Node, index: int, target: Byte, kind: int) -> tuple[Node, int] | None:
    """The nearest instruction before ``index`` that may give this byte this kind."""
    register, byte = target
    todo, seen = deque([(node, index)]), set[Node]()
    while todo:
        node, end = todo.popleft()
        last, overwritten = None, False
        for i, reader in flow.run(node):
            step = flow.steps[i]
            if i == end:
                break
            if register in step.writes:
                if byte_of(step.effect(reader)[step.writes.index(register)], byte) & kind:
                    last = i
                elif not step.instruction.guard:
                    last, overwritten = None, True
        if last is not None:
            return node, last
        if not overwritten:
            for before in flow.before[node]:
                if before not in seen:
                    seen.add(before)
                    todo.append((before, flow.indices(before).stop))
    return None


def _source(flow: Flow, node: Node, index: int, target: Byte, kind: int) -> Byte | None:
    """The byte of an operand from which this one has its kind; None if it begins here.

    Found by trying: with the kind in one byte of one operand and in no other, does the result have
    it? In place of a kind that arithmetic makes anew, other operands have another one.
    """
    reader, step = _reader(flow, node, index), flow.steps[index]
    at, byte = step.writes.index(target[0]), target[1]
    other = 0 if kind & GARBAGE else SHARED

    def results_in(instead: dict[int, int]) -> bool:
        trial = Reader(reader.state, reader.written, instead)
        return bool(byte_of(step.effect(trial)[at], byte) & kind)

    operands = " ".join(step.instruction.operands[1:])
    numbers = [int(n) + UNIFORM * bool(u) for u, n in re.findall(r"(?<!\w)(U?)R(\d+)", operands)]
    held = {n + i: reader.register(n + i) for n in numbers for i in range(4)}
    without = {
        register: sum(
            (byte_of(flags, k) & ~kind | (other if byte_of(flags, k) & kind else 0)) << 8 * k
            for k in range(4)
        )
        for register, flags in held.items()
    }
    if results_in(without):
        return None
    for register, flags in held.items():
        for k in range(4):
            if byte_of(flags, k) & kind and results_in(
                {**without, register: without[register] | kind << 8 * k}
            ):
                begins = kind & GARBAGE and not reader.state.get(register, 0) & kind << 8 * k
                return None if begins else (register, k)
    return None
