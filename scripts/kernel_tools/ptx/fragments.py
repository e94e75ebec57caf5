"""Which element of a matrix each register of a warp holds, as tables of indices.

Every table has the shape (32 lanes, registers, elements of a register) and comes as a pair: the
row and the column of each element. The layouts are those of the PTX ISA, section "Warp-level matrix
instructions": "Matrix fragments for mma.m16n8k4" to "mma.m16n8k64", "ldmatrix", "stmatrix", and
"Asynchronous warpgroup-level matrix register fragments".

One rule gives the fragments of all element sizes: a register holds ``E = 32 / bits`` neighbours
along the contraction; lane ``4 g + t`` holds row ``g``, from column ``E t``. The further registers
of A are 8 rows down, and then 4 E columns to the right.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.intp]
Table = tuple[Indices, Indices]


@cache
def _lanes(registers: int, elements: int) -> tuple[Indices, Indices, Indices, Indices]:
    """g and t of the lane, the register, and the element in it."""
    lane, register, element = np.indices((32, registers, elements))
    return lane // 4, lane % 4, register, element


@cache
def operand_a(bits: int, k: int) -> Table:
    """A of mma.m16n8k``k``, (16, k), of elements of ``bits`` bits."""
    count = 32 // bits
    g, t, register, element = _lanes(16 * k // (32 * count), count)
    return g + 8 * (register % 2), t * count + element + 4 * count * (register // 2)


@cache
def operand_b(bits: int, k: int) -> Table:
    """B of mma.m16n8k``k``, (k, 8)."""
    count = 32 // bits
    g, t, register, element = _lanes(8 * k // (32 * count), count)
    return t * count + element + 4 * count * register, g


@cache
def accumulator(bits: int, columns: int = 8) -> Table:
    """C and D, (16, columns), in 32 or 16 bits: two neighbours, then 8 rows down, then 8 right.

    The accumulator of wgmma is that of four warps, each of which has 16 of its 64 rows.
    """
    count = 32 // bits
    g, t, register, element = _lanes(16 * columns // (32 * count), count)
    number = register * count + element
    return g + 8 * (number // 2 % 2), t * 2 + number % 2 + 8 * (number // 4)


@cache
def matrix_8x8(transposed: bool) -> Table:
    """An 8x8 matrix of 16-bit elements, of ldmatrix and stmatrix: one register of each lane."""
    g, t, _, element = _lanes(1, 2)
    return (2 * t + element, g) if transposed else (g, 2 * t + element)


def gather(
    registers: npt.NDArray[np.uint32], table: Table, bits: int
) -> npt.NDArray[np.unsignedinteger]:
    """The matrices that warps hold.

    Args:
        registers: (warps, 32, registers).
        table: the layout.
        bits: of an element: 8, 16 or 32.

    Returns:
        (warps, rows, columns), unsigned.
    """
    rows, columns = table
    elements = np.ascontiguousarray(registers).view(f"u{bits // 8}").reshape(-1, *rows.shape)
    matrices = np.zeros((len(elements), rows.max() + 1, columns.max() + 1), elements.dtype)
    matrices[:, rows, columns] = elements
    return matrices


def scatter(matrices: npt.NDArray[np.unsignedinteger], table: Table) -> npt.NDArray[np.uint32]:
    """The registers, (warps, 32, registers), that hold matrices of unsigned elements."""
    elements = np.ascontiguousarray(matrices[:, table[0], table[1]])
    return elements.view(np.uint32).reshape(len(matrices), 32, -1)
