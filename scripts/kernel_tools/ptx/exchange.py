"""Instructions by which threads exchange values or wait for each other: shuffles, votes, barriers.

A barrier of only some threads of a program (``bar.sync 1, 64``) is taken to order the accesses of
all of them: races with the other threads can go unseen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.kernel_tools.ptx.arithmetic import maximum_minimum
from scripts.kernel_tools.ptx.machine import TYPES, WARP, Machine, instruction
from scripts.kernel_tools.ptx.program import Instruction, Operand, PtxError

Lanes = npt.NDArray[Any]


def by_warp(values: Lanes) -> Lanes:
    """(lanes,) -> (warps, 32)."""
    return values.reshape(-1, WARP)


def current(machine: Machine) -> Lanes:
    """The lanes that execute the instruction, as a mask."""
    return np.ones(machine.count, bool) if machine.mask is None else machine.mask


def members(machine: Machine, ins: Instruction, operand: Operand) -> Lanes:
    """The mask of the lanes that a ``.sync`` instruction names; each must execute it."""
    bit = (machine.all_lanes % WARP).astype(np.uint32)
    named_by = machine.read(operand, "b32")
    live = current(machine)
    # Each lane names others; those of the warp's first live lane count.
    first = by_warp(live).argmax(1)
    mask = np.repeat(by_warp(named_by)[np.arange(len(first)), first], WARP)
    named = (mask >> bit & 1).astype(bool) & np.repeat(by_warp(live).any(1), WARP)
    missing = named & ~live
    if missing.any():
        lane = int(np.flatnonzero(missing)[0])
        detail = f"thread {lane % machine.threads} is named by the mask, but does not execute it"
        machine.report.find("barrier", ins, detail, int(missing.sum()))
    return named & live


@instruction("shfl")
def _shuffle(machine: Machine, ins: Instruction) -> None:
    """Passes on that a lane has not written its register; see `Machine.partly_written`."""
    result, a, b, c, mask = ins.operands
    named = members(machine, ins, mask)
    missing = machine.partly_written(a)
    values = by_warp(machine.read(a, "b32", used=missing is None))
    index, clamp = (by_warp(machine.read(o, "b32")) for o in (b, c))
    lane = np.arange(WARP)
    index, clamp = index.astype(np.int64) & 31, clamp.astype(np.int64)
    segment, bound = clamp >> 8 & 31, clamp & 31
    low = lane & segment
    high = low | bound & ~segment & 31
    mode = ins.modifiers[1]
    if mode == "up":
        source = lane - index
        inside = source >= high
    else:
        source = {"down": lane + index, "bfly": lane ^ index, "idx": low | index & ~segment}[mode]
        inside = source <= high
    source = np.where(inside, source, lane) & 31
    unnamed = ~np.take_along_axis(by_warp(named), source, 1) & by_warp(current(machine))
    if unnamed.any():
        detail = "a thread takes the value of one that does not execute the shuffle"
        machine.report.find("barrier", ins, detail, int(unnamed.sum()))
    machine.write(result, np.take_along_axis(values, source, 1).reshape(-1))
    if missing is not None:
        machine.forget(result, np.take_along_axis(by_warp(missing), source, 1).reshape(-1))
    if ins.second is not None:
        machine.write(ins.second, np.broadcast_to(inside, values.shape).reshape(-1))


_REDUCE: dict[str, tuple[Any, int]] = {
    "add": (np.add, 0),
    "or": (np.bitwise_or, 0),
    "xor": (np.bitwise_xor, 0),
    "and": (np.bitwise_and, -1),
}


@instruction("redux")
def _reduce(machine: Machine, ins: Instruction) -> None:
    result, source, mask = ins.operands
    operation = ins.modifiers[1]
    named = by_warp(members(machine, ins, mask))
    values = by_warp(machine.read(source, ins.type))
    if operation in ("max", "min"):
        if ins.type == "f32":
            if "abs" in ins.modifiers:
                values = np.abs(values)
            neutral: Any = -np.inf if operation == "max" else np.inf
            if "NaN" not in ins.modifiers:
                neutral = np.nan
            total = np.where(named[:, 0], values[:, 0], np.float32(neutral))
            for i in range(1, WARP):
                other = np.where(named[:, i], values[:, i], np.float32(neutral))
                total = maximum_minimum(ins, operation, total, other)
        else:
            limits = np.iinfo(TYPES[ins.type])
            neutral = limits.min if operation == "max" else limits.max
            chosen = np.where(named, values, TYPES[ins.type].type(neutral))
            total = chosen.max(1) if operation == "max" else chosen.min(1)
    else:
        function, number = _REDUCE[operation]
        neutral = np.array(number).astype(values.dtype)
        total = function.reduce(np.where(named, values, neutral), 1, dtype=values.dtype)
    machine.write(result, np.repeat(total, WARP))


@instruction("vote")
def _vote(machine: Machine, ins: Instruction) -> None:
    result, predicate, mask = ins.operands
    named = members(machine, ins, mask)
    values = machine.read(predicate, "pred")
    yes, no = by_warp(values & named), by_warp(~values & named)
    match ins.modifiers[1]:
        case "ballot":
            bits = (yes.astype(np.uint32) << np.arange(WARP, dtype=np.uint32)).sum(1)
            machine.write(result, np.repeat(bits.astype(np.uint32), WARP))
        case "all":
            machine.write(result, np.repeat(~no.any(1), WARP))
        case "any":
            machine.write(result, np.repeat(yes.any(1), WARP))
        case "uni":
            machine.write(result, np.repeat(~(yes.any(1) & no.any(1)), WARP))
        case other:
            raise PtxError(f"{ins}: vote.{other} is not supported")


@instruction("elect")
def _elect(machine: Machine, ins: Instruction) -> None:
    """The first thread of each warp's named ones."""
    named = by_warp(members(machine, ins, ins.operands[1]))
    leader = named.argmax(1)
    machine.write(ins.operands[0], np.repeat(leader.astype(np.uint32), WARP))
    if ins.second is not None:
        is_leader = np.arange(WARP) == leader[:, None]
        machine.write(ins.second, (is_leader & named).reshape(-1))


@instruction("activemask")
def _active(machine: Machine, ins: Instruction) -> None:
    live = by_warp(current(machine)).astype(np.uint32)
    bits = (live << np.arange(WARP, dtype=np.uint32)).sum(1).astype(np.uint32)
    machine.write(ins.operands[0], np.repeat(bits, WARP))


@instruction("bar", "barrier")
def _barrier(machine: Machine, ins: Instruction) -> None:
    if "warp" in ins.modifiers:
        members(machine, ins, ins.operands[0])
        machine.shared.warp_time[by_warp(current(machine)).any(1)] += 1
        return
    if "sync" not in ins.modifiers:
        raise PtxError(f"{ins}: only bar.sync and bar.warp.sync are supported")
    number = int(machine.read(ins.operands[0], "u32")[machine.lanes[0]])
    expected = machine.threads
    if len(ins.operands) > 1:
        expected = int(machine.read(ins.operands[1], "u32")[machine.lanes[0]])
    machine.arrive(number, expected)
