"""`cp.async`: copies from global to shared memory that a thread waits for later.

A copy reads global memory when it is issued. Its bytes reach shared memory when its thread waits
for the copy's group: until then, an access to them by any thread is a finding ("unfinished"), and
they hold what they held before. The wait counts as the thread's write of them, so that other
threads need a barrier behind it, as on a GPU.

The bulk forms (TMA), and arrivals of copies at an mbarrier, are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

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


class Groups:
    """What a machine's lanes commit in groups, and wait for by the number of later groups."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.committed = np.zeros(machine.count, np.int64)  # groups, of each lane

    def landing(self, lanes: Lanes, group: Lanes, left: int) -> Lanes:
        """Which of the groups of ``lanes`` the current lanes' wait for all but ``left`` ends."""
        return self.machine.live[lanes] & (group < self.committed[lanes] - left)

    def wait(self, left: int) -> None:
        """Finish what the current lanes have started, but for their last ``left`` groups."""
        raise NotImplementedError

    def run(self, ins: Instruction) -> bool:
        """Execute a commit or a wait; whether it is one."""
        kind = next((m for m in ins.modifiers if m in _GROUPS), None)
        if kind in ("commit_group", "wait_all"):
            self.committed[self.machine.lanes] += 1
        if kind in ("wait_group", "wait_all"):
            left = ins.operands[0] if ins.operands else Immediate(0)
            assert isinstance(left, Immediate), ins
            self.wait(left.value)
        return kind is not None


_GROUPS = ("commit_group", "wait_group", "wait_all")


class Copies(Groups):
    """The copies of a machine that are on their way."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.pending: list[_Copy] = []

    def issue(self, ins: Instruction, lanes: Lanes, to: Lanes, data: Lanes) -> None:
        """Start a copy, of the group that its lanes commit next."""
        shared, width = self.machine.shared, data.shape[1]
        shared.note(self.machine.find, to, width, lanes, is_write=True)
        shared.arriving[to[:, None] + np.arange(width)] = True
        self.pending.append(_Copy(ins, lanes, to, data, self.committed[lanes]))

    def wait(self, left: int) -> None:
        """Let the copies reach shared memory."""
        shared = self.machine.shared
        for copy in self.pending:
            lands = self.landing(copy.lanes, copy.group, left)
            if not lands.any():
                continue
            to, width = copy.to[lands], copy.data.shape[1]
            at = to[:, None] + np.arange(width)
            shared.arriving[at] = False
            find = partial(self.machine.find, ins=copy.ins)
            shared.note(find, to, width, copy.lanes[lands], is_write=True)
            shared.data[at] = copy.data[lands]
            copy.lanes, copy.to, copy.data, copy.group = (
                x[~lands] for x in (copy.lanes, copy.to, copy.data, copy.group)
            )
        self.pending = [copy for copy in self.pending if copy.lanes.size]


@instruction("cp")
def _cp(machine: Machine, ins: Instruction) -> None:
    """``cp.async.cg.shared.global [to], [from], bytes, bytes_read``: the others become zeros."""
    copies = machine.state(Copies)
    if "bulk" not in ins.modifiers and copies.run(ins):
        return
    if ins.modifiers[:2] not in (("async", "ca"), ("async", "cg")):
        raise PtxError(f"{ins}: this copy is not supported")
    width = ins.operands[2]
    assert isinstance(width, Immediate), ins
    size, lanes = width.value, machine.lanes
    optional = ins.operands[3:-1] if "cache_hint" in ins.modifiers else ins.operands[3:]
    wanted = machine.read(optional[0], "u32") if optional else np.full(machine.count, size)
    if not np.isin(wanted[lanes], (0, size)).all():
        raise PtxError(f"{ins}: a copy of a part of its bytes is not supported")
    data = np.zeros((machine.count, size), np.uint8)
    readers = lanes[wanted[lanes] == size]
    asked = machine.address(ins.operands[1])[readers]
    offset, readers = machine.reach(machine.memory, asked, size, readers, is_write=False)
    data[readers] = machine.memory.data[offset[:, None] + np.arange(size)]
    asked = machine.address(ins.operands[0])[lanes]
    allowed, to = machine.shared.places(machine.find, asked, size, lanes)
    copies.issue(ins, lanes[allowed], to, data[lanes[allowed]])
