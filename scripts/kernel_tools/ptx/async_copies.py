"""`cp.async`: copies from global to shared memory that a thread waits for later.

A copy reads global memory when it is issued. Its bytes reach shared memory when its thread waits
for the copy's group: until then, an access to them by any thread is a finding ("unfinished"), and
they hold what they held before. The wait counts as the thread's write of them, so that other
threads need a barrier behind it, as on a GPU.

The bulk forms (TMA), and arrivals of copies at an mbarrier, are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scripts.kernel_tools.ptx.machine import Lanes, Machine, instruction
from scripts.kernel_tools.ptx.program import Immediate, Instruction, PtxError


@dataclass
class _Copy:
    """One instruction's copies: of ``lanes``, each of ``data[i]`` to the offsets ``to[i]`` on."""

    ins: Instruction
    lanes: Lanes
    to: Lanes
    data: Lanes  # (lanes, bytes)
    group: Lanes  # the number of each lane's group


class Copies:
    """The copies of a machine that are on their way."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.committed = np.zeros(machine.count, np.int64)  # groups, of each lane
        self.pending: list[_Copy] = []

    def issue(self, ins: Instruction, lanes: Lanes, to: Lanes, data: Lanes) -> None:
        """Start a copy, of the group that its lanes commit next."""
        shared, width = self.machine.shared, data.shape[1]
        shared.note(self.machine.report, ins, to, width, lanes, is_write=True)
        shared.arriving[to[:, None] + np.arange(width)] = True
        self.pending.append(_Copy(ins, lanes, to, data, self.committed[lanes]))

    def wait(self, left: int) -> None:
        """Finish the copies of the current lanes, but for their last ``left`` groups."""
        machine = self.machine
        waits = np.ones(machine.count, bool) if machine.mask is None else machine.mask
        for copy in self.pending:
            lands = waits[copy.lanes] & (copy.group < self.committed[copy.lanes] - left)
            if not lands.any():
                continue
            to, width = copy.to[lands], copy.data.shape[1]
            at = to[:, None] + np.arange(width)
            machine.shared.arriving[at] = False
            machine.shared.note(
                machine.report, copy.ins, to, width, copy.lanes[lands], is_write=True
            )
            machine.shared.data[at] = copy.data[lands]
            copy.lanes, copy.to, copy.data, copy.group = (
                x[~lands] for x in (copy.lanes, copy.to, copy.data, copy.group)
            )
        self.pending = [copy for copy in self.pending if copy.lanes.size]


@instruction("cp")
def _cp(machine: Machine, ins: Instruction) -> None:
    copies = machine.state(Copies)
    if ins.opcode == "cp.async.commit_group":
        copies.committed[machine.lanes] += 1
    elif ins.opcode == "cp.async.wait_group":
        left = ins.operands[0]
        assert isinstance(left, Immediate), ins
        copies.wait(left.value)
    elif ins.opcode == "cp.async.wait_all":
        copies.committed[machine.lanes] += 1
        copies.wait(0)
    elif ins.modifiers[:2] in (("async", "ca"), ("async", "cg")):
        _copy(machine, ins, copies)
    else:
        raise PtxError(f"{ins}: this copy is not supported")


def _copy(machine: Machine, ins: Instruction, copies: Copies) -> None:
    """``cp.async.cg.shared.global [to], [from], bytes, bytes_read``: the others become zeros."""
    width = ins.operands[2]
    assert isinstance(width, Immediate), ins
    size, lanes = width.value, machine.lanes
    optional = ins.operands[3:-1] if "cache_hint" in ins.modifiers else ins.operands[3:]
    wanted = machine.read(optional[0], "u32") if optional else np.full(machine.count, size)
    if not np.isin(wanted[lanes], (0, size)).all():
        raise PtxError(f"{ins}: a copy of a part of its bytes is not supported")
    data = np.zeros((lanes.size, size), np.uint8)
    reads = wanted[lanes] == size
    allowed, offset = machine.memory.places(
        machine.report, ins, machine.address(ins.operands[1])[lanes[reads]], size
    )
    readers = lanes[reads][allowed]
    machine.memory.note_reads(machine.report, ins, offset, size, machine.number[readers])
    data[np.flatnonzero(reads)[allowed]] = machine.memory.data[offset[:, None] + np.arange(size)]
    allowed, to = machine.shared.places(
        machine.report, ins, machine.address(ins.operands[0])[lanes], size, lanes
    )
    copies.issue(ins, lanes[allowed], to, data[allowed])
