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
from dataclasses import dataclass

import numpy as np

from scripts.kernel_tools.ptx.descriptors import of_tcgen05
from scripts.kernel_tools.ptx.formats import canonical
from scripts.kernel_tools.ptx.machine import WARP, Lanes, Machine, instruction
from scripts.kernel_tools.ptx.mbarriers import Barriers
from scripts.kernel_tools.ptx.program import Instruction, PtxError, Vector
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
    columns: range
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
        columns = slice(product.columns.start, product.columns.stop)
        self.unfinished[product.program, product.lanes, columns] = is_unfinished
        self.machine.shared.departing[product.reads] = is_unfinished


@instruction("tcgen05")
def _tcgen05(machine: Machine, ins: Instruction) -> None:
    memory = machine.state(TensorMemory)
    kind = ins.modifiers[0].partition("::")[0]
    if "cta_group::2" in ins.modifiers:
        raise PtxError(f"{ins}: pairs of programs are not supported")
    match kind:
        case "alloc":
            _allocate(machine, ins, memory)
        case "dealloc":
            columns = machine.read(ins.operands[1], "u32")
            memory.allocated[machine.lanes // machine.threads] -= int(columns[machine.lanes[0]])
            if (memory.allocated < 0).any():
                raise PtxError(f"{ins}: more tensor memory is freed than was allocated")
        case "mma":
            _multiply(machine, ins, memory)
        case "commit":
            _commit(machine, ins, memory)
        case "ld" | "st":
            _move(machine, ins, memory)
        case "wait" | "fence" | "relinquish_alloc_permit":
            pass
        case _:
            raise PtxError(f"{ins}: this form of tcgen05 is not supported")


def _allocate(machine: Machine, ins: Instruction, memory: TensorMemory) -> None:
    """``alloc [place], columns``: a warp stores the address of new columns in shared memory."""
    lanes = machine.lanes[machine.lanes % WARP == 0]
    columns = machine.read(ins.operands[1], "u32")[lanes]
    address = machine.address(ins.operands[0])[lanes]
    allowed, offset = machine.shared.places(machine.report, ins, address, 4, lanes)
    lanes, columns = lanes[allowed], columns[allowed]
    machine.shared.note(machine.report, ins, offset, 4, lanes, is_write=True)
    program = lanes // machine.threads
    machine.shared.data.view(np.uint32)[offset // 4] = memory.allocated[program]
    memory.allocated[program] += columns
    if (memory.allocated > _COLUMNS).any():
        raise PtxError(
            f"{ins}: {memory.allocated.max()} columns of tensor memory; {_COLUMNS} exist"
        )


def _multiply(machine: Machine, ins: Instruction, memory: TensorMemory) -> None:
    """``mma [d], a, b, kind, use_d``, issued by one thread of each program."""
    kind = next((m for m in ins.modifiers if m.startswith("kind::")), "")
    if kind not in _FORMATS or len(ins.operands) != 5 or {"sp", "ws"} & set(ins.modifiers):
        raise PtxError(f"{ins}: this form of tcgen05.mma is not supported")
    lanes = machine.lanes
    d = machine.address(ins.operands[0])[lanes]
    a, b = (machine.read(operand, "b64")[lanes] for operand in ins.operands[1:3])
    number = machine.read(ins.operands[3], "b32")[lanes]
    uses = machine.read(ins.operands[4], "pred")[lanes]
    if len(np.unique(lanes // machine.threads)) != len(lanes):
        raise PtxError(f"{ins}: several threads of a program issue it at once")
    for values in set(zip(d, a, b, number, uses, strict=True)):
        same = np.array([v == values for v in zip(d, a, b, number, uses, strict=True)])
        _product(machine, ins, memory, lanes[same], kind, *(int(v) for v in values))


def _product(
    machine: Machine,
    ins: Instruction,
    memory: TensorMemory,
    lanes: Lanes,
    kind: str,
    d: int,
    a: int,
    b: int,
    number: int,
    uses: int,
) -> None:
    """One product, of the programs of ``lanes``. ``number``: the instruction descriptor."""
    rows, n = (number >> 24 & 31) << 4, (number >> 17 & 63) << 3
    types = [_FORMATS[kind].get(number >> at & 7, "") for at in (7, 10)]
    if number & 0b1000111 or number >> 4 & 3 != 1 or "" in types or rows not in (64, 128):
        raise PtxError(f"{ins}: the instruction descriptor {number:#x} is not supported")
    sign = (-1) ** ((number >> 13 & 1) + (number >> 14 & 1))
    factors, chunks = [], []
    for descriptor, extent, type_, transposed in (
        (a, rows, types[0], number >> 15 & 1),
        (b, n, types[1], number >> 16 & 1),
    ):
        k = 256 // BITS[type_]
        matrix = of_tcgen05(descriptor)
        found = read_matrix(machine, ins, matrix, extent, k, type_, not transposed, lanes)
        factors.append(values_of(found[0], type_))
        chunks.append(found[1])
    row = np.arange(rows)
    places = (d >> 16) + (row if rows == 128 else row // 16 * 32 + row % 16)
    columns = range(d & 0xFFFF, (d & 0xFFFF) + n)
    programs = lanes // machine.threads
    if (memory.allocated[programs] < columns.stop).any() or places.max() >= _LANES:
        machine.report.find("out of bounds", ins, f"columns {columns} of tensor memory", len(lanes))
        return
    total = sign * (factors[0] @ factors[1].transpose(0, 2, 1))
    at = np.ix_(programs, places, np.asarray(columns))
    if uses:
        total = total + memory.cells[at].view(np.float32)
    memory.cells[at] = canonical(total.astype(np.float32))
    for i, program in enumerate(programs):
        reads = np.concatenate([of_program[i] for of_program in chunks])
        reads = (reads[:, None] + np.arange(CHUNK)).ravel()
        memory.add(_Product(int(program), places, columns, reads))


def _commit(machine: Machine, ins: Instruction, memory: TensorMemory) -> None:
    """``commit [barrier]``: the products so far arrive at it when they are finished."""
    barriers = machine.state(Barriers)
    address = machine.address(ins.operands[0])
    for lane in machine.lanes:
        program, place = int(lane) // machine.threads, int(address[lane])
        phase = barriers.arrive(program, place)
        for product in memory.products:
            if product.program == program and product.phase is None:
                product.phase = (place, phase)


def _move(machine: Machine, ins: Instruction, memory: TensorMemory) -> None:
    """``ld registers, [place]`` and ``st [place], registers``, by whole warps.

    In shape 32x32b, thread i has lane i, and its register j column j. In 16x32bx2, threads 16 to 31
    have the same 16 lanes as the first, an operand's number of columns further.
    """
    is_store = ins.modifiers[0] == "st"
    shape, count = next(
        (s for s in (("32x32b", 0), ("16x32bx2", 1)) if s[0] in ins.modifiers), (None, 0)
    )
    if shape is None or re.search(r"pack|unpack", ins.opcode):
        raise PtxError(f"{ins}: this form is not supported")
    operands = list(ins.operands)
    offset = operands.pop(2 if not is_store else 1) if count else None
    place, vector = operands if is_store else operands[::-1]
    assert isinstance(vector, Vector), ins
    machine.all_of_warp()
    lanes = machine.lanes
    address = machine.address(place)[lanes]
    first, thread = address >> 16, lanes % WARP
    if (first // WARP != lanes % machine.threads // WARP % 4).any():
        detail = "a warp accesses tensor memory of another one of its four"
        machine.report.find("out of bounds", ins, detail)
    column = address & 0xFFFF
    if offset is not None:
        column = column + np.where(thread >= 16, machine.read(offset, "u32")[lanes], 0)
        thread = thread % 16
    at = (
        (lanes // machine.threads)[:, None],
        (first + thread)[:, None],
        column[:, None] + np.arange(len(vector.elements)),
    )
    if (at[2] >= memory.allocated[at[0]]).any() or (at[1] >= _LANES).any():
        machine.report.find("out of bounds", ins, "beyond the columns that were allocated")
        return
    busy = memory.unfinished[at]
    if busy.any():
        detail = f"column {at[2][busy][0]} of tensor memory, before the wait for the product there"
        machine.report.find("unfinished", ins, detail, int(busy.any(1).sum()))
    if is_store:
        memory.cells[at] = np.stack([r[lanes] for r in machine.read_all(vector, "b32")], 1)
        return
    found = np.zeros((len(vector.elements), machine.count), np.uint32)
    found[:, lanes] = memory.cells[at].T
    machine.write_all(vector, list(found))
