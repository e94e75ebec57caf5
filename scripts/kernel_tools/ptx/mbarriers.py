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

from scripts.kernel_tools.ptx.machine import Lanes, Machine, instruction
from scripts.kernel_tools.ptx.program import Instruction, PtxError


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
            of_program = np.arange(self.machine.count) // self.machine.threads == program
            self.machine.release(self.asleep & of_program)
            self.asleep &= ~of_program
        return phase


@instruction("mbarrier")
def _mbarrier(machine: Machine, ins: Instruction) -> None:
    barriers = machine.state(Barriers)
    lanes = machine.lanes
    kind = ins.modifiers[0]
    if kind == "try_wait" and "parity" in ins.modifiers:
        _try_wait(machine, ins, barriers, lanes)
        return
    where = ins.operands[1] if kind == "arrive" else ins.operands[0]
    places = _places(machine, machine.address(where), lanes)
    if kind == "init":
        count = machine.read(ins.operands[1], "u32")
        for lane, place in zip(lanes, places, strict=True):
            barriers.known[place] = _Barrier(int(count[lane]))
    elif kind == "inval":
        for place in places:
            barriers.at(*place)
            del barriers.known[place]
    elif kind == "arrive" and "expect_tx" not in ins.modifiers and len(ins.operands) == 2:
        for place in places:
            barriers.arrive(*place)
    else:
        raise PtxError(f"{ins}: this form of mbarrier is not supported")


def _places(machine: Machine, address: Lanes, lanes: Lanes) -> list[tuple[int, int]]:
    return [(int(lane) // machine.threads, int(address[lane])) for lane in lanes]


def _try_wait(machine: Machine, ins: Instruction, barriers: Barriers, lanes: Lanes) -> None:
    """``try_wait.parity done, [barrier], parity``: has the phase of that parity ended?"""
    result, where, parity = ins.operands[:3]
    odd = machine.read(parity, "u32")
    done = np.zeros(machine.count, bool)
    seen = set()
    for lane, place in zip(lanes, _places(machine, machine.address(where), lanes), strict=True):
        barrier = barriers.at(*place)
        done[lane] = barrier.phase % 2 != odd[lane] % 2
        if done[lane]:
            seen.add((*place, barrier.phase - 1))
    for end in seen:
        for function in barriers.when_seen:
            function(*end)
    sleeps = np.zeros(machine.count, bool)
    sleeps[lanes] = ~done[lanes]
    barriers.asleep |= sleeps
    machine.wait(sleeps)
    machine.write(result, done)
