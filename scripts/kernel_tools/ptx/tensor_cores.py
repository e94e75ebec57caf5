"""Tensor cores: `ldmatrix`, `stmatrix`, `mma.sync` and `wgmma`.

A product is computed in float64 and rounded once to the accumulator's format. A GPU adds in an
order, and in a number of bits, that NVIDIA does not document: results agree where every sum is
exact (products of small integers), and are otherwise to be compared with a bound.

`wgmma` is asynchronous. Its accumulators get their values at the `wgmma.wait_group` that waits for
it: until then, reading one is a finding ("uninitialised register"), as the values do not exist yet.
Shared memory that it reads must not be written until then ("unfinished"), and what threads wrote
there must be made visible to it by ``fence.proxy.async`` first ("proxy"). `wgmma.fence` is not
checked.

Not supported, and refused by name: integers, tf32 and block-scaled inputs, sparse matrices, and the
8-bit forms of ldmatrix and stmatrix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scripts.kernel_tools.ptx import fragments
from scripts.kernel_tools.ptx.async_copies import Groups
from scripts.kernel_tools.ptx.descriptors import SharedMatrix, addresses, of_wgmma
from scripts.kernel_tools.ptx.formats import canonical, from_bfloat16, from_float8
from scripts.kernel_tools.ptx.machine import WARP, Lanes, Machine, instruction
from scripts.kernel_tools.ptx.program import Immediate, Instruction, Operand, PtxError, Vector

Matrices = npt.NDArray[np.float64]

_INPUTS = {"e4m3": 8, "e5m2": 8, "f16": 16, "bf16": 16}
BITS = _INPUTS | {"f32": 32}
_FLOAT8 = {f: from_float8(np.arange(256), f).astype(np.float64) for f in ("e4m3", "e5m2")}
_WARPGROUP = 128
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
CHUNK = 16  # bytes: what a swizzle moves


# --- between shared memory and fragments


@instruction("ldmatrix", "stmatrix")
def _matrices(machine: Machine, ins: Instruction) -> None:
    """Load or store 1, 2 or 4 matrices of 8 rows of 16 bytes; lane ``8 i + r`` has the address of
    row r of matrix i."""
    if "m8n8" not in ins.modifiers or ins.type != "b16":
        raise PtxError(f"{ins}: only matrices of m8n8 in b16 are supported")
    is_store = ins.name == "stmatrix"
    place, vector = ins.operands if is_store else ins.operands[::-1]
    count = len(vector.elements) if isinstance(vector, Vector) else 1
    warps = np.flatnonzero(machine.all_of_warp())
    lanes = (warps[:, None] * WARP + np.arange(8 * count)).ravel()
    address = machine.address(place)[lanes]
    offset, allowed = machine.reach(machine.shared, address, 16, lanes, is_store)
    if len(allowed) < len(lanes):
        return  # what a GPU would do is not defined
    table = fragments.matrix_8x8("trans" in ins.modifiers)
    at = offset[:, None] + np.arange(16)
    if is_store:
        held = np.stack([r.reshape(-1, WARP)[warps] for r in machine.read_all(vector, "b32")], 1)
        matrices = fragments.gather(held.reshape(-1, WARP, 1), table, 16)
        machine.shared.data[at] = np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, 16)
        return
    matrices = machine.shared.data[at].view(np.uint16).reshape(-1, 8, 8)
    found = fragments.scatter(matrices, table).reshape(-1, count, WARP)
    registers = np.zeros((count, machine.count // WARP, WARP), np.uint32)
    registers[:, warps] = found.transpose(1, 0, 2)
    machine.write_all(vector, [r.reshape(-1) for r in registers])


# --- mma.sync


@instruction("mma")
def _mma(machine: Machine, ins: Instruction) -> None:
    shape, types = _SHAPE.search(ins.opcode), ins.modifiers[-4:]
    known = shape is not None and shape.group(1, 2) == ("16", "8") and "sp" not in ins.modifiers
    if (
        not known
        or not {types[1], types[2]} <= _INPUTS.keys()
        or ins.modifiers[3:5] != ("row", "col")
    ):
        raise PtxError(f"{ins}: this form of mma is not supported")
    assert shape is not None
    machine.all_of_warp()
    k = int(shape[3])
    d, a, b, c = ins.operands
    A = _fragment(machine, a, fragments.operand_a(BITS[types[1]], k), types[1])
    B = _fragment(machine, b, fragments.operand_b(BITS[types[2]], k), types[2])
    C = _fragment(machine, c, fragments.accumulator(BITS[types[3]]), types[3])
    D = _codes(A @ B + C, types[0])
    held = fragments.scatter(D, fragments.accumulator(BITS[types[0]]))
    machine.write_all(d, list(np.ascontiguousarray(held.reshape(machine.count, -1).T)))


def values_of(codes: npt.NDArray[np.unsignedinteger], type_: str) -> Matrices:
    """float64, which holds every value of every format."""
    if type_ in ("e4m3", "e5m2"):
        return _FLOAT8[type_][codes]
    if type_ == "bf16":
        return from_bfloat16(codes).astype(np.float64)
    return codes.view({"f16": np.float16, "f32": np.float32}[type_]).astype(np.float64)


def _fragment(machine: Machine, operand: Operand, table: fragments.Table, type_: str) -> Matrices:
    """The values of matrices that warps hold in registers."""
    held = np.stack(machine.read_all(operand, "b32"), -1).reshape(-1, WARP, table[0].shape[1])
    return values_of(fragments.gather(held, table, BITS[type_]), type_)


def _codes(values: Matrices, type_: str) -> npt.NDArray[np.unsignedinteger]:
    """Round to the accumulator's format; its bits."""
    return canonical(values.astype({"f16": np.float16, "f32": np.float32}[type_]))


# --- wgmma


@dataclass
class _Pending:
    """A register that products will write: its values, and each lane's group (-1: none)."""

    values: Lanes
    group: Lanes


class Products(Groups):
    """The wgmmas of a machine that are not waited for."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.pending: dict[Operand, _Pending] = {}
        self.reads: list[tuple[Lanes, Lanes, Lanes]] = []  # offsets, lanes and groups of operands

    def accumulators(self, operand: Operand) -> list[Lanes]:
        """The registers of D, pending or not."""
        assert isinstance(operand, Vector), operand
        return [
            self.pending[r].values if r in self.pending else self.machine.read(r, "b32")
            for r in operand.elements
        ]

    def issue(self, operand: Operand, registers: list[Lanes]) -> None:
        """Let D have these values when their group is waited for."""
        assert isinstance(operand, Vector), operand
        machine = self.machine
        for register, values in zip(operand.elements, registers, strict=True):
            known = self.pending.get(register)
            if known is None:
                nothing = np.full(machine.count, -1, np.int64)
                known = self.pending[register] = _Pending(values, nothing)
            known.values = np.where(machine.live, values, known.values)
            known.group = np.where(machine.live, self.committed, known.group)
            machine.forget(register)

    def read(self, chunks: Lanes, lanes: Lanes) -> None:
        """Note that the current product of each of ``lanes`` reads its row of ``chunks``."""
        at = chunks[:, :, None] + np.arange(CHUNK)
        self.machine.shared.departing[at] = True
        self.reads.append((at, lanes, self.committed[lanes]))

    def wait(self, left: int) -> None:
        """Give registers their values, and shared memory back."""
        machine, outer = self.machine, self.machine.mask
        for register, product in list(self.pending.items()):
            lands = self.landing(machine.all_lanes, product.group, left) & (product.group >= 0)
            if not lands.any():
                continue
            machine.mask = None if lands.all() else lands
            machine.write(register, product.values)
            machine.mask = outer
            product.group = np.where(lands, -1, product.group)
            if (product.group < 0).all():
                del self.pending[register]
        kept = []
        for at, lanes, group in self.reads:
            lands = self.landing(lanes, group, left)
            machine.shared.departing[at[lands]] = False
            kept.append((at[~lands], lanes[~lands], group[~lands]))
        self.reads = [read for read in kept if read[0].size]
        for at, _, _ in self.reads:
            machine.shared.departing[at] = True  # read by a later product, too


@instruction("wgmma")
def _wgmma(machine: Machine, ins: Instruction) -> None:
    products = machine.state(Products)
    kind = ins.modifiers[0]
    if kind == "mma_async" and "sp" not in ins.modifiers:
        _mma_async(machine, ins, products)
    elif not products.run(ins) and kind != "fence":
        raise PtxError(f"{ins}: this form of wgmma is not supported")


def _mma_async(machine: Machine, ins: Instruction, products: Products) -> None:
    """``d, a, b, use_d, sign_a, sign_b, m_contiguous_a, n_contiguous_b``: of a, by 64 rows, and b
    by descriptors, or a in registers; the last two only of 16-bit inputs in shared memory."""
    shape, types = _SHAPE.search(ins.opcode), ins.modifiers[-3:]
    if shape is None or not {types[1], types[2]} <= _INPUTS.keys():
        raise PtxError(f"{ins}: this form of wgmma is not supported")
    n, k = int(shape[2]), int(shape[3])
    d, a, b, use_d, *flags = ins.operands
    numbers = [flag.value for flag in flags if isinstance(flag, Immediate)]
    sign, transposed = numbers[0] * numbers[1], [bool(flag) for flag in numbers[2:]]
    machine.all_of_warp()
    if isinstance(a, Vector):
        rows = _fragment(machine, a, fragments.operand_a(BITS[types[1]], k), types[1])
        A = rows.reshape(-1, 64, k)
        transposed = [False, *transposed]
    else:
        transposed = transposed or [False, False]
        A = _shared_operand(products, a, 64, k, types[1], not transposed[0])
    B = _shared_operand(products, b, n, k, types[2], not transposed[1])
    D = sign * (A @ B.transpose(0, 2, 1))
    table = fragments.accumulator(BITS[types[0]], n)
    used = machine.read(use_d, "pred")[::_WARPGROUP, None, None]
    if used.any():
        held = np.stack(products.accumulators(d), -1).reshape(-1, WARP, table[0].shape[1])
        C = values_of(fragments.gather(held, table, BITS[types[0]]), types[0])
        D = D + np.where(used, C.reshape(-1, 64, n), 0)
    registers = fragments.scatter(_codes(D, types[0]).reshape(-1, 16, n), table)
    products.issue(d, list(np.ascontiguousarray(registers.reshape(machine.count, -1).T)))


def _shared_operand(
    products: Products, operand: Operand, extent: int, k: int, type_: str, k_contiguous: bool
) -> Matrices:
    """What the descriptors of the warpgroups say: (warpgroups, extent, k)."""
    machine = products.machine
    descriptors = machine.read(operand, "b64").reshape(-1, _WARPGROUP)
    live = np.flatnonzero(machine.all_of_warp()[:: _WARPGROUP // WARP])
    if (descriptors[live] != descriptors[live, :1]).any():
        raise PtxError(f"{machine.ins}: the threads of a warpgroup have different descriptors")
    values = np.zeros((len(descriptors), extent, k))
    for descriptor in np.unique(descriptors[live, 0]):
        groups = live[descriptors[live, 0] == descriptor]
        matrix = of_wgmma(int(descriptor))
        lanes = groups * _WARPGROUP
        codes, chunks = read_matrix(machine, matrix, (extent, k), type_, k_contiguous, lanes)
        values[groups] = values_of(codes, type_)
        products.read(chunks, lanes)
    return values


def read_matrix(
    machine: Machine,
    matrix: SharedMatrix,
    shape: tuple[int, int],
    type_: str,
    k_contiguous: bool,
    lanes: Lanes,
) -> tuple[npt.NDArray[np.unsignedinteger], Lanes]:
    """A matrix in shared memory, read for ``lanes``, one of each product.

    Returns:
        its codes, (lanes, *shape), and the offsets of the chunks of 16 bytes that hold them,
        (lanes, chunks).
    """
    shared, size = machine.shared, BITS[type_] // 8
    at = addresses(matrix, *shape, size, k_contiguous)
    chunks = np.unique(at // CHUNK) * CHUNK
    asked, lane = np.tile(chunks, len(lanes)), np.repeat(lanes, len(chunks))
    offset, allowed = machine.reach(shared, asked, CHUNK, lane, is_write=False)
    if len(allowed) < len(lane):
        nothing = np.zeros((len(lanes), *shape), f"u{size}")
        return nothing, np.zeros((len(lanes), 0), np.int64)
    unfenced = shared.unfenced[offset]
    if unfenced.any():
        detail = f"shared address {int(asked[unfenced][0])} was written, and no fence followed"
        machine.find("proxy", detail, int(unfenced.sum()))
    program = (lanes // machine.threads * shared.size)[:, None, None]
    return shared.data.view(f"u{size}")[(program + at) // size], offset.reshape(len(lanes), -1)
