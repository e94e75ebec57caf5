"""The instructions that one program issues, by pipe, and the loads that it waits for, from SASS.

A loop of the machine code counts as often as the loop of Triton's IR from which it comes; both are
listed in the order of the text. Slow paths of divisions, which rare operands take, are functions of
their own and are not counted.

A multiprocessor issues 4 instructions of a warp per clock. Each pipe takes fewer (results per clock
and multiprocessor: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", for
8.9, 9.0 and 10.0): 128 for float32 arithmetic, 64 for integers, comparisons, logic and conversions,
16 for transcendental functions, 32 for shuffles; shared memory moves 128 bytes a clock.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.kernel_tools.predict.requests import Loop
from scripts.kernel_tools.sass.instructions import (
    Instruction,
    parse_listing,
    register_number,
    width_in_registers,
)

ISSUE, FLOAT, INTEGER, IMAD = "issue", "float", "integer", "imad"
SPECIAL, MEMORY = "special", "load/store"
# Clocks of a pipe of one multiprocessor per instruction of a warp.
_CLOCKS = {ISSUE: 1 / 4, FLOAT: 1 / 4, IMAD: 1 / 2, INTEGER: 1 / 2, SPECIAL: 2, MEMORY: 1}
_PIPES = {
    FLOAT: "FADD FMUL FFMA HADD2 HMUL2 HFMA2 FADD2 FMUL2 FFMA2",
    IMAD: "IMAD UIMAD",
    SPECIAL: "MUFU F2F F2I I2F FRND POPC FLO",
    MEMORY: "LDG STG LDS STS LDGSTS SHFL LDSM STSM ATOMG RED ATOM ATOMS LD ST REDG REDUX",
    "tensor": "HMMA QMMA HGMMA QGMMA IGMMA UTCQMMA UTCHMMA UTCMMA",
    # Control flow, the uniform datapath and barriers use an issue slot alone.
    ISSUE: "BRA EXIT NOP BAR BSSY BSYNC WARPSYNC CALL RET DEPBAR LDGDEPBAR WARPGROUP S2R S2UR CS2R "
    "LDC LDCU ULDC MEMBAR ERRBAR CCTL ACQBULK ENDCOLLECTIVE ELECT SYNCS UTMALDG UTMASTG MOV FENCE",
}
_PIPE_OF = {name: pipe for pipe, names in _PIPES.items() for name in names.split()}


@dataclass(frozen=True)
class Wait:
    """Loads that are issued together, before one of them is used.

    Args:
        bytes: that a thread loads.
        times: how often a program waits for them.
        loops: those around them.
    """

    bytes: int
    times: float
    loops: tuple[Loop, ...]


@dataclass(frozen=True)
class Work:
    """What the warps of one program execute.

    Args:
        pipes: pipe -> instructions of each warp.
        memory_clocks: for which they keep the pipe of loads and stores busy, each warp.
        waits: for device memory or L2.
    """

    pipes: dict[str, float]
    memory_clocks: float
    waits: tuple[Wait, ...]

    @property
    def issued(self) -> float:
        """Instructions of each warp."""
        return sum(self.pipes.values())

    def clocks(self, warps: int) -> dict[str, float]:
        """Pipe -> clocks that a program keeps that pipe of a multiprocessor busy."""
        found = {p: n * _CLOCKS[p] * warps for p, n in self.pipes.items() if p in _CLOCKS}
        found[FLOAT] = found.get(FLOAT, 0) + self.pipes.get(IMAD, 0) * _CLOCKS[FLOAT] * warps
        found[ISSUE] = self.issued * _CLOCKS[ISSUE] * warps
        found[MEMORY] = self.memory_clocks * warps
        return found


def pipe_of(instruction: Instruction) -> str:
    """The pipe on which an instruction runs; most are integer operations."""
    name = instruction.name
    if name in _PIPE_OF:
        return _PIPE_OF[name]
    return ISSUE if name.startswith("U") else INTEGER


def work_of(listing: str, loops: Sequence[tuple[Loop, ...]]) -> Work:
    """The work of one program.

    Args:
        listing: of nvdisasm.
        loops: those of Triton's IR in the order of the text, each with those around it.

    Raises:
        ValueError: the machine code has other loops than the IR.
    """
    instructions, labels = _read(listing)
    around = _loops_around(instructions, labels, loops)
    pipes: dict[str, float] = defaultdict(float)
    memory_clocks = 0.0
    for instruction, inside in zip(instructions, around, strict=True):
        times = _times(inside)
        pipe = pipe_of(instruction)
        pipes[pipe] += times
        if pipe == MEMORY:
            is_shuffle = instruction.name in ("SHFL", "REDUX")
            width = 1 if is_shuffle else width_in_registers(instruction)
            memory_clocks += times * max(1, width)
    return Work(dict(pipes), memory_clocks, tuple(_waits(instructions, around)))


def _times(loops: tuple[Loop, ...]) -> float:
    return math.prod(loop.trips for loop in loops)


def _read(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions up to the padding behind the kernel, and the labels among them."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for found in parse_listing(listing):
        if isinstance(found, str):
            if "$__internal" in found or "slowpath" in found:
                break  # functions for rare operands
            labels[found] = len(instructions)
        elif found.name == "BRA" and labels.get(found.label) == len(instructions):
            break  # an endless loop stands behind the last EXIT
        else:
            instructions.append(found)
    return instructions, labels


def _loops_around(
    instructions: Sequence[Instruction],
    labels: dict[str, int],
    loops: Sequence[tuple[Loop, ...]],
) -> list[tuple[Loop, ...]]:
    """The loops around each instruction."""
    spans: dict[int, int] = {}  # first instruction -> last one
    # Behind the first EXIT of all threads stand ways that are rarely taken, and lead back.
    exits = (i for i, x in enumerate(instructions) if x.name == "EXIT" and not x.guard)
    end = next(exits, len(instructions))
    for i, instruction in enumerate(instructions[:end]):
        target = labels.get(instruction.label) if instruction.name == "BRA" else None
        if target is not None and target < i and not _spins(instructions[target : i + 1]):
            spans[target] = max(i, spans.get(target, i))
    found = sorted(spans.items(), key=lambda span: (span[0], -span[1]))
    if len(found) != len(loops):
        raise ValueError(f"{len(found)} loops in the machine code, {len(loops)} in the IR")
    around: list[tuple[Loop, ...]] = [()] * len(instructions)
    for (first, last), nest in zip(found, loops, strict=True):
        for i in range(first, last + 1):
            around[i] = (*around[i], nest[-1])
    return around


def _waits(instructions: Sequence[Instruction], around: Sequence[tuple[Loop, ...]]) -> list[Wait]:
    """Loads whose results are used, those together that no use separates."""
    waits: list[Wait] = []
    pending: dict[int, int] = {}  # register -> the load of it
    loads: dict[int, tuple[int, tuple[Loop, ...]]] = {}  # load -> bytes, loops
    for i, instruction in enumerate(instructions):
        read = _registers_read(instruction)
        if any(register in pending for register in read) or (pending and instruction.name == "BRA"):
            by_loop: Counter[tuple[Loop, ...]] = Counter()
            for size, inside in loads.values():
                by_loop[inside] += size
            waits += [Wait(size, _times(inside), inside) for inside, size in by_loop.items()]
            pending, loads = {}, {}
        if instruction.name in ("LDG", "LD"):
            register = register_number(instruction.operands[0])
            width = width_in_registers(instruction)
            if register is not None:
                pending |= dict.fromkeys(range(register, register + width), i)
            loads[i] = (4 * width, around[i])
    return waits


def _registers_read(instruction: Instruction) -> set[int]:
    is_store = instruction.name in ("STG", "STS", "ST")
    has_result = not is_store and instruction.name not in ("RED", "ATOMG", "REDG")
    width = width_in_registers(instruction) if is_store else 1
    names = re.findall(r"\bU?R\d+", " ".join(instruction.operands[has_result:]))
    found = (register_number(name) for name in names)
    return {r for first in found if first is not None for r in range(first, first + width)}


def _spins(body: Sequence[Instruction]) -> bool:
    """Whether a loop only waits for a barrier."""
    return len(body) < 10 and any(x.name in ("SYNCS", "NANOSLEEP") for x in body)
