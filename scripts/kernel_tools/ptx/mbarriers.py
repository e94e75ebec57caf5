"""`mbarrier`: barriers in shared memory, which asynchronous products complete.

A barrier counts arrivals. When as many have come as it was made for, its phase ends, and the next
begins. A thread that waits (``try_wait``) for a phase that goes on sleeps until it ends. See the
PTX ISA, "Parallel synchronization and communication instructions: mbarrier".

Counts of bytes (``expect_tx``, of TMA copies) and waits without a parity are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scripts.kernel_tools.ptx.machine import Machine, instruction
from scripts.kernel_tools.ptx.program import Instruction, Operand, PtxError


@dataclass
class _Barrier:
    expected: int
    arrived: int = 0
    phase: int = 0  # how many have ended


class Barriers:
    """The mbarriers of a machine: (program, shared address) -> barrier."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.known: dict[tuple[int, int], _Barrier] = {}
        self.asleep = np.zeros(machine.count, bool)
        # Called with a program, an address and a phase when a thread has seen that phase's end.
        self.when_seen: list[Callable[[int, int, int], None]] = []

    def places(self, operand: Operand) -> list[tuple[int, int]]:
        """The program and the address of each of the current lanes."""
        machine = self.machine
        address = machine.address(operand)
        return [(int(lane) // machine.threads, int(address[lane])) for lane in machine.lanes]

    def at(self, program: int, address: int) -> _Barrier:
        """A barrier that was initialised."""
        if (program, address) not in self.known:
            ins = self.machine.ins
            raise PtxError(f"{ins}: no mbarrier was initialised at shared address {address}")
        return self.known[program, address]

    def arrive(self, program: int, address: int) -> int:
        """Count an arrival; the phase that it belongs to."""
        barrier = self.at(program, address)
        phase = barrier.phase
        barrier.arrived += 1
        if barrier.arrived == barrier.expected:
            barrier.arrived, barrier.phase = 0, phase + 1
            of_program = self.machine.all_lanes // self.machine.threads == program
            self.machine.waiting &= ~(self.asleep & of_program)
            self.asleep &= ~of_program
        return phase


@instruction("mbarrier")
def _mbarrier(machine: Machine, ins: Instruction) -> None:
    barriers, kind, first = machine.state(Barriers), ins.modifiers[0], ins.operands[0]
    if kind == "try_wait" and "parity" in ins.modifiers:
        _try_wait(machine, ins, barriers)
    elif kind == "init":
        counts = machine.read(ins.operands[1], "u32")[machine.lanes]
        for place, count in zip(barriers.places(first), counts, strict=True):
            barriers.known[place] = _Barrier(int(count))
    elif kind == "inval":
        for place in barriers.places(first):
            barriers.at(*place)
            del barriers.known[place]
    elif kind == "arrive" and "expect_tx" not in ins.modifiers and len(ins.operands) == 2:
        for place in barriers.places(ins.operands[1]):
            barriers.arrive(*place)
    else:
        raise PtxError(f"{ins}: this form of mbarrier is not supported")


def _try_wait(machine: Machine, ins: Instruction, barriers: Barriers) -> None:
    """``try_wait.parity done, [barrier], parity``: has the phase of that parity ended?"""
    result, where, parity = ins.operands[:3]
    odd, lanes, places = machine.read(parity, "u32"), machine.lanes, barriers.places(where)
    phases = [barriers.at(*place).phase for place in places]
    done = np.zeros(machine.count, bool)
    done[lanes] = np.array(phases) % 2 != odd[lanes] % 2
    ends = zip(lanes, places, phases, strict=True)
    for end in {(*place, phase - 1) for lane, place, phase in ends if done[lane]}:
        for function in barriers.when_seen:
            function(*end)
    sleeps = machine.live & ~done
    barriers.asleep |= sleeps
    machine.waiting |= sleeps
    machine.write(result, done)
