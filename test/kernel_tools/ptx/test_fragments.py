"""Fragments and layouts in shared memory: each element has one place, the documented one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from scripts.kernel_tools.ptx import PtxError
from scripts.kernel_tools.ptx.descriptors import SharedMatrix, addresses, of_tcgen05, of_wgmma
from scripts.kernel_tools.ptx.fragments import (
    accumulator,
    gather,
    matrix_8x8,
    operand_a,
    operand_b,
    scatter,
)

SIZES = [(8, 32), (8, 16), (16, 16), (16, 8), (32, 8), (32, 4)]
TABLES = [
    *((operand_a(bits, k), (16, k), bits) for bits, k in SIZES),
    *((operand_b(bits, k), (k, 8), bits) for bits, k in SIZES),
    *((accumulator(bits, n), (16, n), bits) for bits in (16, 32) for n in (8, 64)),
    *((matrix_8x8(transposed), (8, 8), 16) for transposed in (False, True)),
]


def test_a_fragment_holds_every_element_once():
    for table, shape, bits in TABLES:
        places = sorted(zip(table[0].ravel(), table[1].ravel(), strict=True))
        assert places == list(itertools.product(*map(range, shape)))
        matrices = np.random.default_rng(0).integers(0, 2**bits, (3, *shape), f"u{bits // 8}")
        assert np.array_equal(gather(scatter(matrices, table), table, bits), matrices)


# Lane, register, element -> row, column: corners of the figures of PTX ISA 9.7.14.5.
DOCUMENTED = [
    (operand_a(8, 32), (5, 0, 2), (1, 6)),  # mma.m16n8k32, .e4m3: row = groupID, col = 4 t + i
    (operand_a(8, 32), (5, 1, 2), (9, 6)),  # a4 to a7: 8 rows down
    (operand_a(8, 32), (5, 2, 2), (1, 22)),  # a8 on: 16 columns to the right
    (operand_b(8, 32), (5, 1, 0), (20, 1)),
    (operand_a(16, 16), (31, 3, 1), (15, 15)),  # mma.m16n8k16, .f16: a7
    (operand_b(16, 16), (31, 1, 1), (15, 7)),
    (accumulator(32), (5, 2, 0), (9, 2)),  # c2: row + 8
    (accumulator(32, 64), (5, 5, 0), (1, 11)),  # wgmma: d5
    (accumulator(16), (5, 1, 1), (9, 3)),
    (matrix_8x8(False), (13, 0, 1), (3, 3)),  # ldmatrix
    (matrix_8x8(True), (13, 0, 1), (3, 3)),
    (matrix_8x8(True), (12, 0, 1), (1, 3)),
]


def test_documented_places():
    for table, place, element in DOCUMENTED:
        assert (table[0][place], table[1][place]) == element, place


def descriptor(start, leading, stride, mode, mode_bits=62):
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << mode_bits


def test_descriptors():
    assert of_wgmma(descriptor(0x4020, 16, 1024, 1)) == SharedMatrix(0x4020, 16, 1024, 128)
    assert of_wgmma(descriptor(256, 128, 256, 3)) == SharedMatrix(256, 128, 256, 32)
    version = 1 << 46
    found = of_tcgen05(descriptor(0x8000, 0, 1024, 4, 61) | version)
    assert found == SharedMatrix(0x8000, 0, 1024, 64)
    for wrong in (descriptor(0, 0, 1024, 2, 61), descriptor(0, 0, 1024, 1, 61) | version):
        with pytest.raises(PtxError, match=r"not one of tcgen05|swizzle mode 1"):
            of_tcgen05(wrong)
    with pytest.raises(PtxError, match="base offset"):
        of_wgmma(descriptor(0, 0, 1024, 1) | 1 << 49)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("k_contiguous", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_a_layout_holds_every_element_once(swizzle, k_contiguous, size):
    """128 rows and 32 bytes of K: atoms side by side, with the least strides."""
    atom = 8 * (swizzle or 16)
    atoms_of_k, atoms_of_rows = 32 // size // 8, 128 * 8 * size // atom
    leading, stride = (0 if swizzle else 16 * atom), atom
    if not k_contiguous:
        leading = (atoms_of_k if swizzle else atoms_of_rows) * atom
    matrix = SharedMatrix(1024, leading, stride, swizzle)
    at = addresses(matrix, 128, 32 // size, size, k_contiguous)
    assert len(np.unique(at)) == at.size
    assert at.min() >= 1024
    assert at.max() < 1024 + 128 * (max(swizzle, 32) if k_contiguous else 32)
    run = at if k_contiguous else at.T
    assert (np.diff(run.reshape(-1, 16 // size)) == size).all()  # 16 bytes stay together
