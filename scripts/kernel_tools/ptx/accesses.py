"""Loads, stores and atomics: of parameters, global memory and shared memory.

Lanes whose access is out of bounds or misaligned load garbage, or store nothing; `Report` has the
finding. Hints for caches have no effect.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.kernel_tools.ptx.machine import TYPES, Machine, instruction
from scripts.kernel_tools.ptx.program import Address, Instruction, Operand, PtxError, Symbol, Vector

Lanes = npt.NDArray[Any]
GARBAGE = 0xCB


def space_of(ins: Instruction) -> str:
    """``param``, ``global`` or ``shared``."""
    for modifier in ins.modifiers:
        space = modifier.partition("::")[0]
        if space in ("param", "global", "shared"):
            return space
    raise PtxError(f"{ins}: the state space is not supported")


def reach(
    machine: Machine, ins: Instruction, address: Lanes, width: int, lanes: Lanes, is_write: bool
) -> tuple[npt.NDArray[np.uint8], Lanes, Lanes]:
    """Check an access.

    Args:
        address: of ``lanes``, in the space that the instruction names.
        width: bytes.
        lanes: the numbers of the lanes that access.

    Returns:
        the bytes of that space, and for the accesses that are allowed: the offset and the lane.
    """
    report = machine.report
    if space_of(ins) == "global":
        allowed, offset = machine.memory.places(report, ins, address, width)
        lanes = lanes if len(offset) == len(lanes) else lanes[allowed]
        program = machine.number[lanes].astype(np.int32)
        if is_write:
            machine.memory.writer[offset[:, None] + np.arange(width)] = program[:, None]
        else:
            machine.memory.note_reads(report, ins, offset, width, program)
        data = machine.memory.data
    else:
        allowed, offset = machine.shared.places(report, ins, address, width, lanes)
        lanes = lanes if len(offset) == len(lanes) else lanes[allowed]
        machine.shared.note(report, ins, offset, width, lanes, is_write)
        data = machine.shared.data
    return data, offset, lanes


@instruction("ld")
def _load(machine: Machine, ins: Instruction) -> None:
    result, address = ins.operands[:2]
    if space_of(ins) == "param":
        assert isinstance(address, Address), ins
        assert isinstance(address.base, str), ins
        dtype = TYPES[ins.type]
        value = np.array(
            machine.arguments[address.base] & (1 << 8 * dtype.itemsize) - 1, f"u{dtype.itemsize}"
        )
        machine.write(result, np.full(machine.count, value.view(dtype)))
        return
    size = TYPES[ins.type].itemsize
    count = len(result.elements) if isinstance(result, Vector) else 1
    lanes = machine.lanes
    asked = machine.address(address)[lanes]
    data, offset, lanes = reach(machine, ins, asked, size * count, lanes, False)
    loaded = data.view(TYPES[ins.type])[offset[:, None] // size + np.arange(count)]
    values = []
    for i in range(count):
        value = np.full(machine.count, GARBAGE).astype(TYPES[ins.type])
        value[lanes] = loaded[:, i]
        values.append(value)
    machine.write_all(result, values)


@instruction("st")
def _store(machine: Machine, ins: Instruction) -> None:
    address, source = ins.operands[:2]
    size = TYPES[ins.type].itemsize
    unsigned = f"u{size}"
    values = machine.read_all(source, f"b{8 * size}")
    lanes = machine.lanes
    asked = machine.address(address)[lanes]
    data, offset, lanes = reach(machine, ins, asked, size * len(values), lanes, True)
    view = data.view(unsigned)
    at = offset[:, None] // size + np.arange(len(values))
    stored = np.stack([v[lanes] for v in values], 1)
    view[at] = stored
    lost = view[at] != stored
    if lost.any():
        row = int(np.argwhere(lost)[0][0])
        detail = f"thread {lanes[row] % machine.threads} and another one, at one address"
        machine.report.find("conflicting stores", ins, detail, int(lost.any(1).sum()))


# The new value, of the old one and the operand.
_COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "max": max,
    "min": min,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "exch": lambda old, value: value,
}


@instruction("atom", "red")
def _atomic(machine: Machine, ins: Instruction) -> None:
    """One lane after the other, in the order of their numbers."""
    result: Operand = Symbol("_")
    operands = ins.operands
    if ins.name == "atom":
        result, *operands = operands  # type: ignore[assignment]
    operation = next((m for m in ins.modifiers if m in (*_COMBINED, "cas")), None)
    if operation is None or isinstance(operands[1], Vector) or ins.type not in TYPES:
        raise PtxError(f"{ins}: this atomic is not supported")
    dtype = TYPES[ins.type]
    values = [machine.read(o, ins.type) for o in operands[1:]]
    lanes = machine.lanes
    asked = machine.address(operands[0])[lanes]
    data, offset, lanes = reach(machine, ins, asked, dtype.itemsize, lanes, True)
    view = data.view(dtype)
    found = np.zeros(machine.count, dtype)
    for at, lane in zip(offset // dtype.itemsize, lanes, strict=True):
        old = found[lane] = view[at]
        if operation == "cas":
            view[at] = values[1][lane] if old == values[0][lane] else old
        else:
            view[at] = _COMBINED[operation](old, values[0][lane])
    machine.write(result, found)


@instruction("fence", "membar", "prefetch", "createpolicy")
def _no_effect(machine: Machine, ins: Instruction) -> None:
    """Orders or places what is visible at once here."""
    if ins.modifiers[:2] == ("proxy", "async"):
        machine.shared.fence(np.unique(machine.lanes // machine.threads))
    if ins.name == "createpolicy":
        machine.write(ins.operands[0], np.zeros(machine.count, np.uint64))
