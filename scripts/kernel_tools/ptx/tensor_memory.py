"""`tcgen05`: the tensor cores of sm_100, whose accumulators lie in tensor memory.

A program has 128 lanes by 512 columns of 32 bits. An address has the lane in its upper half and
the column in its lower. One thread issues a product for the whole program; both operands come from
shared memory by descriptors (`descriptors`), and a number says their formats and extents. The
result lies in the lanes as in PTX ISA's data-path layouts D (128 rows: row r in lane r) and F (64
rows: row r in lane ``32 (r // 16) + r % 16``).

A product is asynchronous until a thread has seen the end of the `mbarriers` phase at which
``tcgen05.commit`` made it arrive: before that, an access to its result, or a write to its operands,
is a finding ("unfinished"). The registers of ``tcgen05.ld`` get their values at once;
``tcgen05.wait`` is not checked, nor is ``tcgen05.fence``.

Refused by name: pairs of programs (``cta_group::2``), A in tensor memory, formats of fewer than 8
bits and block scales, tf32, integers, sparse matrices, accumulators in float16, copies
(``tcgen05.cp``), and the shapes of ``ld`` and ``st`` that Triton's kernels have not needed so far.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scripts.kernel_tools.ptx.descriptors import of_tcgen05
from scripts.kernel_tools.ptx.formats import canonical
from scripts.kernel_tools.ptx.machine import WARP, Lanes, Machine, instruction
from scripts.kernel_tools.ptx.mbarriers import Barriers
from scripts.kernel_tools.ptx.program import Immediate, Instruction, PtxError, Vector
from scripts.kernel_tools.ptx.tensor_cores import BITS, CHUNK, read_matrix, values_of

_LANES, _COLUMNS = 128, 512
_FORMATS = {
    "kind::f16": {0: "f16", 1: "bf16"},
    "kind::f8f6f4": {0: "e4m3", 1: "e5m2"},
}


@dataclass
class _Product:
    """A product of one program that is not known to be finished."""

    program: int
    lanes: Lanes
    columns: slice
    reads: Lanes  # offsets of bytes in shared memory
    phase: tuple[int, int] | None = None  # of the mbarrier that it arrives at: address, number


class TensorMemory:
    """The tensor memory of each program."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        shape = (machine.programs, _LANES, _COLUMNS)
        self.cells = np.full(shape, 0xFFFFFFFF, np.uint32)  # NaN, until it is written
        self.unfinished = np.zeros(shape, bool)
        self.allocated = np.zeros(machine.programs, np.int64)  # columns
        self.products: list[_Product] = []
        machine.state(Barriers).when_seen.append(self.finish)

    def finish(self, program: int, address: int, phase: int) -> None:
        """A thread has seen the end of a phase, and so of the phases before it."""
        kept = []
        for product in self.products:
            of = product.phase
            is_done = of is not None and of[0] == address and of[1] <= phase
            if is_done and product.program == program:
                self._mark(product, False)
            else:
                kept.append(product)
        self.products = kept
        for product in kept:
            self._mark(product, True)

    def add(self, product: _Product) -> None:
        """A product has started."""
        self._mark(product, True)
        self.products.append(product)

    def _mark(self, product: _Product, is_unfinished: bool) -> None:
        self.unfinished[product.program, product.lanes, product.columns] = is_unfinished
        self.machine.shared.departing[product.reads] = is_unfinished

    def is_outside(self, programs: Lanes, lanes: Lanes, columns: Lanes) -> bool:
        """Whether any of these places were not allocated."""
        return bool((columns >= self.allocated[programs]).any() or (lanes >= _LANES).any())


@instruction("tcgen05")
def _tcgen05(machine: Machine, ins: Instruction) -> None:
    if "cta_group::2" in ins.modifiers:
        raise PtxError(f"{ins}: pairs of programs are not supported")
    execute = _FORMS.get(ins.modifiers[0].partition("::")[0])
    if execute is None:
        raise PtxError(f"{ins}: this form of tcgen05 is not supported")
    execute(machine, ins, machine.state(TensorMemory))


def _allocate(machine: Machine, ins: Instruction, memory: TensorMemory) -> None:
    """``alloc [place], columns``: a warp stores the address of new columns in shared memory."""
    lanes = machine.lanes[machine.lanes % WARP == 0]
    address = machine.address(ins.operands[0])[lanes]
    offset, lanes = machine.reach(machine.shared, address, 4, lanes, is_write=True)
    program = lanes // machine.threads
    machine.shared.data.view(np.uint32)[offset // 4] = memory.allocated[program]
    memory.allocated[program] += machine.read(ins.operands[1], "u32")[lanes]
    if (memory.allocated > _COLUMNS).any():
        most = memory.allocated.max()
        raise PtxError(f"{ins}: {most} columns of tensor memory; {_COLUMNS} exist")


def _free(machine: Machine, ins: Instruction, memory: TensorMemory) -> None:
    columns = machine.read(ins.operands[1], "u32")
    memory.allocated[machine.lanes // machine.threads] -= int(columns[machine.lanes[0]])
    if (memory.allocated < 0).any():
        raise PtxError(f"{ins}: more tensor memory is freed than was allocated")


def _multiply(machine: Machine, ins: Instruction, memory: TensorMemory) -> None:
    """``mma [d], a, b, kind, use_d``, issued by one thread of each program."""
    kind = next((m for m in ins.modifiers if m in _FORMATS), "")
    if not kind or len(ins.operands) != 5 or {"sp", "ws"} & set(ins.modifiers):
        raise PtxError(f"{ins}: this form of tcgen05.mma is not supported")
    lanes = machine.lanes
    d, *others = ins.operands
    types = ("b64", "b64", "b32", "pred")
    values = [machine.address(d), *map(machine.read, others, types)]
    if len(np.unique(lanes // machine.threads)) != len(lanes):
        raise PtxError(f"{ins}: several threads of a program issue it at once")
    of_lane = [tuple(int(v[lane]) for v in values) for lane in lanes]
    for asked in set(of_lane):
        same = np.array([values == asked for values in of_lane])
        _product(machine, memory, lanes[same], kind, *asked)


def _product(
    machine: Machine, memory: TensorMemory, lanes: Lanes, kind: str,
    d: int, a: int, b: int, number: int, uses: int,
) -> None:  # fmt: skip
    """One product, of the programs of ``lanes``. ``number``: the instruction descriptor."""
    rows, n = (number >> 24 & 31) << 4, (number >> 17 & 63) << 3
    types = [_FORMATS[kind].get(number >> at & 7, "") for at in (7, 10)]
    if number & 0b1000111 or number >> 4 & 3 != 1 or "" in types or rows not in (64, 128):
        detail = f"the instruction descriptor {number:#x} is not supported"
        raise PtxError(f"{machine.ins}: {detail}")
    sign = (-1) ** ((number >> 13 & 1) + (number >> 14 & 1))
    factors, chunks = [], []
    for i, (descriptor, extent) in enumerate(((a, rows), (b, n))):
        shape, k_contiguous = (extent, 256 // BITS[types[i]]), not number >> 15 + i & 1
        matrix = of_tcgen05(descriptor)
        codes, places = read_matrix(machine, matrix, shape, types[i], k_contiguous, lanes)
        factors.append(values_of(codes, types[i]))
        chunks.append(places)
    row, first = np.arange(rows), d & 0xFFFF
    places = (d >> 16) + (row if rows == 128 else row // 16 * 32 + row % 16)
    columns, programs = np.arange(first, first + n), lanes // machine.threads
    if memory.is_outside(programs, places, columns[-1:]):
        detail = f"columns {first} to {first + n - 1} of tensor memory"
        machine.find("out of bounds", detail, len(lanes))
        return
    total = sign * (factors[0] @ factors[1].transpose(0, 2, 1))
    at = np.ix_(programs, places, columns)
    if uses:
        total = total + memory.cells[at].view(np.float32)
    memory.cells[at] = canonical(total.astype(np.float32))
    for i, program in enumerate(programs):
        reads = np.concatenate([of_program[i] for of_program in chunks])
        reads = (reads[:, None] + np.arange(CHUNK)).ravel()
        memory.add(_Product(int(program), places, slice(first, first + n), reads))


def _commit(machine: Machine, ins: Instruction, memory: TensorMemory) -> None:
    """``commit [barrier]``: the products so far arrive at it when they are finished."""
    barriers = machine.state(Barriers)
    for program, place in barriers.places(ins.operands[0]):
        phase = barriers.arrive(program, place)
        for product in memory.products:
            if product.program == program and product.phase is None:
                product.phase = (place, phase)


def _move(machine: Machine, ins: Instruction, memory: TensorMemory) -> None:
    """``ld registers, [place]`` and ``st [place], registers``, by whole warps.

    In shape 32x32b, thread i has lane i, and its register j column j. In 16x32bx2, threads 16 to 31
    have the same 16 lanes as the first, an operand's number of columns further.
    """
    is_store, is_halved = ins.modifiers[0] == "st", "16x32bx2" in ins.modifiers
    if not (is_halved or "32x32b" in ins.modifiers) or re.search(r"pack|unpack", ins.opcode):
        raise PtxError(f"{ins}: this form is not supported")
    operands = list(ins.operands)
    offset = operands.pop(1 if is_store else 2) if is_halved else Immediate(0)
    place, vector = operands if is_store else operands[::-1]
    assert isinstance(vector, Vector), ins
    machine.all_of_warp()
    lanes, count = machine.lanes, len(vector.elements)
    address, thread = machine.address(place)[lanes], lanes % WARP
    first = address >> 16
    if (first // WARP != lanes % machine.threads // WARP % 4).any():
        detail = "a warp accesses tensor memory of another one of its four"
        machine.find("out of bounds", detail)
    column = (address & 0xFFFF) + np.where(thread >= 16, machine.read(offset, "u32")[lanes], 0)
    thread = thread % 16 if is_halved else thread
    at = (
        (lanes // machine.threads)[:, None],
        (first + thread)[:, None],
        column[:, None] + np.arange(count),
    )
    if memory.is_outside(*at):
        machine.find("out of bounds", "beyond the columns that were allocated")
        return
    busy = memory.unfinished[at]
    if busy.any():
        detail = f"column {at[2][busy][0]} of tensor memory, before the wait for the product there"
        machine.find("unfinished", detail, int(busy.any(1).sum()))
    if is_store:
        memory.cells[at] = np.stack([r[lanes] for r in machine.read_all(vector, "b32")], 1)
        return
    found = np.zeros((count, machine.count), np.uint32)
    found[:, lanes] = memory.cells[at].T
    machine.write_all(vector, list(found))


_FORMS: dict[str, Callable[[Machine, Instruction, TensorMemory], None]] = {
    "alloc": _allocate,
    "dealloc": _free,
    "mma": _multiply,
    "commit": _commit,
    **dict.fromkeys(("ld", "st"), _move),
    **dict.fromkeys(("wait", "fence", "relinquish_alloc_permit"), lambda *_: None),
}
