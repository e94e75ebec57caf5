"""Instructions by which threads exchange values or wait for each other: shuffles, votes, barriers.

A barrier of only some threads of a program (``bar.sync 1, 64``) is taken to order the accesses of
all of them: races with the other threads can go unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
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


def members(machine: Machine, ins: Instruction, operand: Operand) -> Lanes:
    """The mask of the lanes that a ``.sync`` instruction names; each must execute it."""
    bit = (machine.all_lanes % WARP).astype(np.uint32)
    named_by = machine.read(operand, "b32")
    live = machine.live
    # Each lane names others; those of the warp's first live lane count.
    first = by_warp(live).argmax(1)
    mask = np.repeat(by_warp(named_by)[np.arange(len(first)), first], WARP)
    named = (mask >> bit & 1).astype(bool) & np.repeat(by_warp(live).any(1), WARP)
    missing = named & ~live
    if missing.any():
        lane = int(np.flatnonzero(missing)[0])
        detail = f"thread {lane % machine.threads} is named by the mask, but does not execute it"
        machine.find("barrier", detail, int(missing.sum()))
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
    unnamed = ~np.take_along_axis(by_warp(named), source, 1) & by_warp(machine.live)
    if unnamed.any():
        detail = "a thread takes the value of one that does not execute the shuffle"
        machine.find("barrier", detail, int(unnamed.sum()))
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
    operation, type_ = ins.modifiers[1], TYPES[ins.type]
    named, values = by_warp(members(machine, ins, mask)), by_warp(machine.read(source, ins.type))
    if ins.type == "f32":
        values = np.abs(values) if "abs" in ins.modifiers else values
        worst = -np.inf if operation == "max" else np.inf
        neutral = type_.type(worst if "NaN" in ins.modifiers else np.nan)
        columns = np.where(named, values, neutral).T
        total = reduce(partial(maximum_minimum, ins, operation), columns)
    else:
        limits = np.iinfo(type_)
        extrema = {"max": (np.maximum, limits.min), "min": (np.minimum, limits.max)}
        function, number = (_REDUCE | extrema)[operation]
        neutral = np.array(number).astype(type_)
        total = function.reduce(np.where(named, values, neutral), 1, dtype=type_)
    machine.write(result, np.repeat(total, WARP))


_VOTES: dict[str, Callable[[Any, Any], Any]] = {
    "ballot": lambda yes, no: np.packbits(yes, 1, "little").view("<u4")[:, 0],
    "all": lambda yes, no: ~no.any(1),
    "any": lambda yes, no: yes.any(1),
    "uni": lambda yes, no: ~(yes.any(1) & no.any(1)),
}


@instruction("vote")
def _vote(machine: Machine, ins: Instruction) -> None:
    result, predicate, mask = ins.operands
    named, values = members(machine, ins, mask), machine.read(predicate, "pred")
    vote = _VOTES[ins.modifiers[1]](by_warp(values & named), by_warp(~values & named))
    machine.write(result, np.repeat(vote, WARP))


@instruction("elect")
def _elect(machine: Machine, ins: Instruction) -> None:
    """The first thread of each warp's named ones."""
    named = by_warp(members(machine, ins, ins.operands[1]))
    leader = named.argmax(1)
    machine.write(ins.operands[0], np.repeat(leader.astype(np.uint32), WARP))
    if ins.second is not None:
        is_leader = np.arange(WARP) == leader[:, None]
        machine.write(ins.second, (is_leader & named).reshape(-1))


@instruction("bar", "barrier")
def _barrier(machine: Machine, ins: Instruction) -> None:
    if "warp" in ins.modifiers:
        members(machine, ins, ins.operands[0])
        machine.shared.warp_time[by_warp(machine.live).any(1)] += 1
        return
    if "sync" not in ins.modifiers:
        raise PtxError(f"{ins}: only bar.sync and bar.warp.sync are supported")
    first = machine.lanes[0]
    number, *expected = (int(machine.read(o, "u32")[first]) for o in ins.operands)
    machine.arrive(number, expected[0] if expected else machine.threads)
