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
from scripts.kernel_tools.ptx.memory import Memory
from scripts.kernel_tools.ptx.program import Address, Instruction, PtxError, Symbol, Vector

Lanes = npt.NDArray[Any]
GARBAGE = 0xCB


def memory_of(machine: Machine, ins: Instruction) -> Memory:
    """Global or shared memory, as the instruction says."""
    spaces = {modifier.partition("::")[0] for modifier in ins.modifiers}
    if not spaces & {"global", "shared"}:
        raise PtxError(f"{ins}: the state space is not supported")
    return machine.memory if "global" in spaces else machine.shared


@instruction("ld")
def _load(machine: Machine, ins: Instruction) -> None:
    result, address = ins.operands[:2]
    if "param" in ins.modifiers:
        assert isinstance(address, Address), ins
        assert isinstance(address.base, str), ins
        size = TYPES[ins.type].itemsize
        value = np.uint64(machine.arguments[address.base]).astype(f"u{size}")
        machine.write(result, np.full(machine.count, value).view(TYPES[ins.type]))
        return
    size = TYPES[ins.type].itemsize
    count = len(result.elements) if isinstance(result, Vector) else 1
    memory, lanes = memory_of(machine, ins), machine.lanes
    asked = machine.address(address)[lanes]
    offset, lanes = machine.reach(memory, asked, size * count, lanes, is_write=False)
    loaded = memory.data.view(TYPES[ins.type])[offset[:, None] // size + np.arange(count)]
    values = np.full((count, machine.count), GARBAGE).astype(TYPES[ins.type])
    values[:, lanes] = loaded.T
    machine.write_all(result, list(values))


@instruction("st")
def _store(machine: Machine, ins: Instruction) -> None:
    address, source = ins.operands[:2]
    size = TYPES[ins.type].itemsize
    values = machine.read_all(source, f"b{8 * size}")
    memory, lanes = memory_of(machine, ins), machine.lanes
    asked = machine.address(address)[lanes]
    offset, lanes = machine.reach(memory, asked, size * len(values), lanes, is_write=True)
    view = memory.data.view(f"u{size}")
    at = offset[:, None] // size + np.arange(len(values))
    stored = np.stack([v[lanes] for v in values], 1)
    view[at] = stored
    lost = view[at] != stored
    if lost.any():
        row = int(np.argwhere(lost)[0][0])
        detail = f"thread {lanes[row] % machine.threads} and another one, at one address"
        machine.find("conflicting stores", detail, int(lost.any(1).sum()))


# The new value, of the old one and the operands.
_COMBINED: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "max": max,
    "min": min,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "exch": lambda old, value: value,
    "cas": lambda old, expected, value: value if old == expected else old,
}


@instruction("atom", "red")
def _atomic(machine: Machine, ins: Instruction) -> None:
    """One lane after the other, in the order of their numbers."""
    result, address, *sources = (Symbol("_"),) * (ins.name == "red") + ins.operands
    operation = next((m for m in ins.modifiers if m in _COMBINED), None)
    if operation is None or isinstance(sources[0], Vector) or ins.type not in TYPES:
        raise PtxError(f"{ins}: this atomic is not supported")
    dtype = TYPES[ins.type]
    values = [machine.read(o, ins.type) for o in sources]
    memory, lanes = memory_of(machine, ins), machine.lanes
    asked = machine.address(address)[lanes]
    offset, lanes = machine.reach(memory, asked, dtype.itemsize, lanes, is_write=True)
    view, found = memory.data.view(dtype), np.zeros(machine.count, dtype)
    for at, lane in zip(offset // dtype.itemsize, lanes, strict=True):
        found[lane] = view[at]
        view[at] = _COMBINED[operation](found[lane], *(v[lane] for v in values))
    machine.write(result, found)


@instruction("fence", "membar", "prefetch", "createpolicy")
def _no_effect(machine: Machine, ins: Instruction) -> None:
    """Orders or places what is visible at once here."""
    if ins.modifiers[:2] == ("proxy", "async"):
        machine.shared.fence(np.unique(machine.lanes // machine.threads))
    if ins.name == "createpolicy":
        machine.write(ins.operands[0], np.zeros(machine.count, np.uint64))
