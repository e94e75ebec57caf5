"""The machine: lanes, registers, the order in which lanes run, and the registry of instructions.

A *lane* is one thread of the programs that run together (a batch of the launch). A register is a
numpy array with an element per lane, of unsigned integers of its width, or of bools for predicates.
It is never changed in place: a write makes another array.

Lanes run in lockstep. Where a branch divides them, the basic block with the lowest number among
their program counters runs next, under the mask of its lanes. Those that wait at a barrier do not
run until all threads of their program have come. With a seed, warps and programs run in a random
order instead.

An instruction is a function of the machine and an `Instruction`, registered under its name, the
part of the opcode before the first dot::

    @instruction("not")
    def _not(machine, ins):
        machine.write(ins.operands[0], ~machine.read(ins.operands[1], ins.type))

`Machine.read` gives arrays over all lanes. `Machine.write` keeps the old values of lanes that are
masked out. An instruction with other effects than writes reads `Machine.lanes`: the numbers of the
lanes that execute it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from scripts.kernel_tools.ptx.memory import GlobalMemory, Memory, SharedMemory
from scripts.kernel_tools.ptx.program import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Program,
    PtxError,
    Register,
    Special,
    Symbol,
    Vector,
)
from scripts.kernel_tools.ptx.report import Report

Lanes = npt.NDArray[Any]  # an element per lane
Implementation = Callable[["Machine", Instruction], None]
State = TypeVar("State")

# PTX type -> how numpy reads its bits. bf16 and float8 have no numpy type: they are read as bits.
TYPES: dict[str, Any] = {
    "pred": np.bool_,
    **{f"b{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"u{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    **{f"f{n}": np.dtype(f"f{n // 8}") for n in (16, 32, 64)},
    "bf16": np.dtype("u2"),
    "e4m3x2": np.dtype("u2"),
    "e5m2x2": np.dtype("u2"),
    "bf16x2": np.dtype("u4"),
    "f16x2": np.dtype("u4"),
    "s16x2": np.dtype("u4"),
    "u16x2": np.dtype("u4"),
    "f32x2": np.dtype("u8"),
}
GARBAGE = 0xDEADBEEFDEADBEEF  # what a register holds before it is written
WARP = 32
JUMPS = ("bra", "ret", "exit")

INSTRUCTIONS: dict[str, Implementation] = {}


def instruction(*names: str) -> Callable[[Implementation], Implementation]:
    """Register the function that executes the instructions of these names."""

    def register(function: Implementation) -> Implementation:
        for name in names:
            assert name not in INSTRUCTIONS, name
            INSTRUCTIONS[name] = function
        return function

    return register


class Machine:
    """A batch of programs of one launch.

    Attributes:
        count: how many lanes; ``threads`` per program, ``programs`` in the batch.
        mask: bool per lane, the lanes that execute the current instruction; None for all.
        memory, shared: global memory; the shared memory of each program of the batch.
        report: what is found and counted.
    """

    def __init__(
        self,
        program: Program,
        arguments: Mapping[str, int],
        memory: GlobalMemory,
        numbers: Lanes,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        report: Report,
        random: np.random.Generator | None = None,
    ) -> None:
        self.program, self.arguments, self.memory, self.report = program, arguments, memory, report
        self.threads, self.programs, self.random = threads, len(numbers), random
        self.count = threads * self.programs
        self.all_lanes = np.arange(self.count)
        self.number = np.repeat(numbers, threads)  # each lane's program in the launch
        self.mask: Lanes | None = None
        self.ins = self.barrier = program.instructions[0]
        self._registers: dict[str, Lanes] = {}
        self._written: dict[str, Lanes] = {}  # of registers that not all lanes have written
        self._constants: dict[tuple[Any, str], Lanes] = {}
        self._variables = _place(program.shared)
        self.shared = SharedMemory(self.programs, threads, shared_bytes)
        x, y, _ = grid
        of_lane = {
            "%tid.x": np.tile(np.arange(threads), self.programs),
            "%ctaid.x": self.number % x,
            "%ctaid.y": self.number // x % y,
            "%ctaid.z": self.number // (x * y),
            "%laneid": self.all_lanes % threads % WARP,
            "%warpid": self.all_lanes % threads // WARP,
            "%ntid.x": threads,
            **dict.fromkeys(("%tid.y", "%tid.z", "%cluster_ctarank"), 0),
            **dict.fromkeys(("%ntid.y", "%ntid.z", "%cluster_nctarank"), 1),
            **{f"%nctaid.{axis}": n for axis, n in zip("xyz", grid, strict=True)},
        }
        self._special = {
            name: np.broadcast_to(np.asarray(v, np.uint32), (self.count,))
            for name, v in of_lane.items()
        }
        self.waiting = np.zeros(self.count, bool)  # lanes that may not run
        self._arrived: dict[int, Lanes] = {}  # barrier -> the lanes that wait at it
        self._states: dict[type, Any] = {}

    def state(self, kind: type[State]) -> State:
        """The only ``kind(machine)``: what instructions in another file remember."""
        if kind not in self._states:
            self._states[kind] = kind(self)  # type: ignore[call-arg]
        return self._states[kind]

    # --- operands

    @property
    def lanes(self) -> Lanes:
        """The numbers of the lanes that execute the current instruction."""
        return self.all_lanes if self.mask is None else np.flatnonzero(self.mask)

    @property
    def live(self) -> Lanes:
        """The same lanes as a mask."""
        return np.ones(self.count, bool) if self.mask is None else self.mask

    def find(self, kind: str, detail: str, count: int = 1, ins: Instruction | None = None) -> None:
        """Report a fault of the current instruction, or of ``ins``."""
        self.report.find(kind, ins or self.ins, detail, count)

    def reach(
        self, memory: Memory, address: Lanes, width: int, lanes: Lanes, is_write: bool
    ) -> tuple[Lanes, Lanes]:
        """Access ``width`` bytes; the offset into the memory, and the lane, of what is allowed.

        Args:
            memory: global or shared memory.
            address: of ``lanes``.
            lanes: the numbers of the lanes that access.
        """
        allowed, offset = memory.places(self.find, address, width, lanes)
        by = lanes = lanes[allowed]
        if memory is self.memory:
            by = self.number[lanes]
        memory.note(self.find, offset, width, by, is_write)
        return offset, lanes

    def read(self, operand: Operand, type_: str, used: Lanes | bool = True) -> Lanes:
        """The operand's values as a PTX type: an array (lanes,), not to be changed in place.

        ``used``: in which lanes it matters whether a register has been written.
        """
        if isinstance(operand, Register):
            values = self._register(operand, used)
            if type_ == "pred":
                return ~values if operand.negated else values
            dtype = TYPES[type_]
            if values.dtype.itemsize != dtype.itemsize:
                values = values.astype(f"u{dtype.itemsize}")  # the low bits
            return values.view(dtype)
        if isinstance(operand, Immediate):
            key = (operand, type_)
            if key not in self._constants:
                self._constants[key] = np.full(self.count, _constant(operand, type_))
            return self._constants[key]
        if isinstance(operand, Special):
            if operand.name not in self._special:
                raise PtxError(f"{self.ins}: the register {operand.name} is not known")
            return self._special[operand.name].astype(TYPES[type_])
        if isinstance(operand, Symbol) and operand.name in self._variables:
            return np.full(self.count, self._variables[operand.name], TYPES[type_])
        raise PtxError(f"{self.ins}: cannot read the operand {operand}")

    def read_all(self, operand: Operand, type_: str, used: Lanes | bool = True) -> list[Lanes]:
        """Of a vector, each element's values; of another operand, its own."""
        elements = operand.elements if isinstance(operand, Vector) else (operand,)
        return [self.read(e, type_, used) for e in elements]

    def unwritten(self, operand: Operand) -> Lanes | None:
        """The lanes in which a register has not been written; None if there are none."""
        if not isinstance(operand, Register):
            return None
        if operand.name not in self._registers:
            self._start(operand)
        written = self._written.get(operand.name)
        return None if written is None else ~written

    def partly_written(self, *operands: Operand) -> Lanes | None:
        """The lanes in which registers have not been written that other lanes have written.

        None if there are none. Where four warps reduce, Triton (3.6) lets four lanes read a number
        each, and all lanes shuffle and sum: what the others find is no fault unless it is used.
        """
        found = (self.unwritten(operand) for operand in operands)
        missing = [lanes for lanes in found if lanes is not None and not lanes.all()]
        return np.logical_or.reduce(missing) if missing else None

    def address(self, operand: Operand) -> Lanes:
        """The int64 address that ``[%rd1 + 16]`` means, in each lane."""
        assert isinstance(operand, Address), operand
        base = operand.base
        if isinstance(base, Register):
            values = self._register(base).astype(np.int64)
            return values + operand.offset if operand.offset else values
        if base and base not in self._variables:
            raise PtxError(f"{self.ins}: the variable {base} is not known")
        return np.full(self.count, self._variables.get(base, 0) + operand.offset, np.int64)

    def _register(self, register: Register, used: Lanes | bool = True) -> Lanes:
        unwritten = self.unwritten(register)
        if unwritten is not None and (missing := self.live & unwritten & used).any():
            self.find("uninitialised register", register.name, int(missing.sum()))
        return self._registers[register.name]

    def _start(self, register: Register) -> None:
        """Give a register the value that no instruction should see."""
        bits = register.bits
        garbage = False if bits == 1 else GARBAGE & (1 << bits) - 1
        dtype = TYPES["pred" if bits == 1 else f"b{bits}"]
        self._registers[register.name] = np.full(self.count, garbage, dtype)
        self._written[register.name] = np.zeros(self.count, bool)

    def forget(self, register: Operand, lanes: Lanes | bool = True) -> None:
        """Let the lanes that execute the instruction, of ``lanes``, find no value in a register."""
        assert isinstance(register, Register), register
        name, mask = register.name, self.live & lanes
        old, written = self._registers.get(name), self._written.get(name, True)
        self._start(register)
        if old is not None and not mask.all():
            self._registers[name] = np.where(mask, self._registers[name], old)
            self._written[name] = written & ~mask

    def write(self, operand: Operand, values: Lanes) -> None:
        """Give a register ``values`` (lanes,), in the lanes that execute the instruction.

        They are extended to a wider register: signed integers by their sign, others by zeros.
        """
        if not isinstance(operand, Register):
            if isinstance(operand, Symbol) and operand.name == "_":
                return
            raise PtxError(f"{self.ins}: cannot write the operand {operand}")
        if operand.bits > 1:
            size = operand.bits // 8
            if values.dtype.itemsize != size:
                values = values.astype(f"{'i' if values.dtype.kind == 'i' else 'u'}{size}")
            values = values.view(f"u{size}")
        assert values.shape == (self.count,), (self.ins, values.shape)
        name = operand.name
        if self.mask is None:
            self._registers[name] = values
            self._written.pop(name, None)
            return
        if name not in self._registers:
            self._start(operand)
        self._registers[name] = np.where(self.mask, values, self._registers[name])
        if name in self._written:
            self._written[name] = self._written[name] | self.mask
            if self._written[name].all():
                del self._written[name]

    def write_all(self, operand: Operand, values: Sequence[Lanes]) -> None:
        """`write` each element of a vector; of another operand, the only one of ``values``."""
        elements = operand.elements if isinstance(operand, Vector) else (operand,)
        for element, value in zip(elements, values, strict=True):
            self.write(element, value)

    def all_of_warp(self) -> Lanes:
        """The current lanes as a mask (warps,), of warps whose 32 lanes all execute it.

        A warp that executes an instruction for whole warps in part is a fault of the kernel.
        """
        by_warp = self.live.reshape(-1, WARP)
        partial = by_warp.any(1) & ~by_warp.all(1)
        if partial.any():
            detail = f"{int(by_warp[partial][0].sum())} of 32 threads of a warp execute it"
            self.find("barrier", detail, int(partial.sum()))
        return np.asarray(by_warp.all(1))

    # --- the order in which lanes run

    def run(self) -> None:
        """Run every lane to its end."""
        blocks, end = self.program.blocks, len(self.program.blocks)
        at = np.zeros(self.count, np.int64)  # each lane's block
        while True:
            running = (at < end) & ~self.waiting
            if not running.any():
                if not self.waiting.any():
                    return
                self._deadlock()
                continue
            running = self._chosen(running)
            block = int(at[running].min())
            live = running & (at == block)
            last = self._run_block(blocks[block], None if live.all() else live)
            at[live] = block + 1
            if last is not None and last.name in JUMPS:
                taken = live if last.guard is None else live & self.read(last.guard, "pred")
                at[taken] = end if last.name != "bra" else self._target(last)
                self.report.divergences += bool(taken.any() and (live & ~taken).any())

    def _target(self, branch: Instruction) -> int:
        label = branch.operands[0]
        assert isinstance(label, Symbol)
        return self.program.labels[label.name]

    def _chosen(self, running: Lanes) -> Lanes:
        """Of the lanes that can run, those that may: with a seed, of a random half of the warps."""
        if self.random is None:
            return running
        chosen = np.repeat(self.random.random(self.count // WARP) < 0.5, WARP) & running
        return chosen if chosen.any() else running

    def _run_block(self, instructions: range, live: Lanes | None) -> Instruction | None:
        """Run a basic block in the lanes ``live``; return its last instruction."""
        warps = self.count // WARP if live is None else int(live.reshape(-1, WARP).any(1).sum())
        ins = None
        for i in instructions:
            ins = self.ins = self.program.instructions[i]
            self.report.instructions[ins.opcode] += warps
            self.mask = live
            if ins.name in JUMPS:
                continue
            if ins.guard is not None:
                guard = self.read(ins.guard, "pred")
                if not guard.all() or live is not None:
                    self.mask = guard if live is None else guard & live
                    if not self.mask.any():
                        continue
            function = INSTRUCTIONS.get(ins.name)
            if function is None:
                raise PtxError(f"{ins}: this instruction is not known")
            try:
                function(self, ins)
            except KeyError as unknown:  # a type, or a modifier
                raise PtxError(f"{ins}: {unknown} is not supported") from unknown
        self.mask = live
        return ins

    def arrive(self, barrier: int, expected: int) -> None:
        """Let the current lanes wait at a barrier for ``expected`` threads of their program."""
        arrived = self._arrived.get(barrier)
        arrived = self.live if arrived is None else arrived | self.live
        complete = arrived.reshape(self.programs, -1).sum(1) >= expected
        self.shared.program_time += complete
        self.barrier = self.ins
        leaving = np.repeat(complete, self.threads) & arrived
        self.waiting = (self.waiting | self.live) & ~leaving
        self._arrived[barrier] = arrived & ~leaving

    def _deadlock(self) -> None:
        """All threads that have not ended wait: a fault at a barrier, or of another wait."""
        stuck = [arrived for arrived in self._arrived.values() if arrived.any()]
        if not stuck:
            raise PtxError(f"{self.program.name}: threads wait for what never comes")
        for arrived in stuck:
            counts = arrived.reshape(self.programs, -1).sum(1)
            first = int(np.flatnonzero(counts)[0])
            detail = f"{counts[first]} of {self.threads} threads of a program reach it"
            self.find("barrier", detail, int((counts > 0).sum()), self.barrier)
            self.waiting &= ~arrived
        self._arrived.clear()


def _constant(operand: Immediate, type_: str) -> Any:
    dtype = TYPES[type_]
    if type_ == "pred":
        return bool(operand.value)
    size = dtype.itemsize
    bits = operand.value if operand.bits_of_float is None else operand.bits_of_float
    return np.array(bits & (1 << 8 * size) - 1, f"u{size}").view(dtype)


def _place(variables: Mapping[str, int]) -> dict[str, int]:
    """Addresses of variables in shared memory; the dynamic one comes last."""
    places, at = {}, 0
    for name, size in sorted(variables.items(), key=lambda item: item[1] == 0):
        places[name] = at
        at = -(-(at + size) // 128) * 128
    return places


def execute(
    program: Program,
    grid: Sequence[int],
    arguments: Sequence[int | float],
    memory: GlobalMemory,
    *,
    threads: int | None = None,
    shared_bytes: int = 0,
    batch: int = 64,
    seed: int | None = None,
) -> Report:
    """Run a launch.

    Args:
        program: what `parse` returns.
        grid: programs in each dimension, up to three.
        arguments: of the kernel, in order; pointers are addresses that ``memory`` gave out.
            Parameters beyond them are 0.
        memory: uploaded; the caller downloads.
        threads: of a program, where the PTX does not say it.
        shared_bytes: of dynamic shared memory.
        batch: how many programs run together.
        seed: of a random order of programs, and of warps; compare the results of several. Compiled
            code lets warps write equal values to one place, which then counts as a race. None: in
            the order of their numbers, and warps in lockstep.

    Returns:
        the findings and counts; `Report.check` raises if there are findings.
    """
    x, y, z = (*grid, 1, 1, 1)[:3]
    number = program.threads if threads is None else threads
    if number is None or number % WARP:
        raise PtxError(f"{program.name}: {number} threads are not whole warps; pass threads=")
    padded = (*arguments, *[0] * (len(program.parameters) - len(arguments)))
    pairs = zip(program.parameters, padded, strict=True)
    values = {p.name: _bits_of_argument(value, p.type) for p, value in pairs}
    report = Report(program.name, x * y * z, number)
    size = shared_bytes + sum(-(-n // 128) * 128 for n in program.shared.values())
    random = None if seed is None else np.random.default_rng(seed)
    order = np.arange(x * y * z) if random is None else random.permutation(x * y * z)
    with np.errstate(all="ignore"):
        for first in range(0, x * y * z, batch):
            numbers = order[first : first + batch]
            Machine(program, values, memory, numbers, (x, y, z), number, size, report, random).run()
    return report


def _bits_of_argument(value: int | float, type_: str) -> int:
    size = int(type_[1:]) // 8
    if type_[0] == "f":
        return int(np.array(value, f"f{size}").view(f"u{size}"))
    return int(value) & (1 << 8 * size) - 1
