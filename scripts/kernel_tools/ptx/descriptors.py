"""Matrices in shared memory as `wgmma` and `tcgen05.mma` read them: descriptors and swizzles.

A descriptor of 64 bits says where a matrix starts, two strides in bytes, and the swizzle. The
layouts are the "canonical layouts" of the PTX ISA, sections "Shared memory matrix layout" and
"Matrix descriptor format" (wgmma), and "Shared memory descriptor" (tcgen05). All are made of atoms:
8 rows of S bytes, S = 32, 64 or 128 the width of the swizzle, or 16 without one.

=========  ===========================================  ===========================================
           contraction contiguous ("K-major")           rows or columns contiguous ("MN-major")
=========  ===========================================  ===========================================
swizzled   an atom is 8 rows; ``stride`` bytes to the   an atom is 8 steps of K of S bytes;
           next 8; the contraction fits in an atom      ``leading`` to the next S bytes of rows,
                                                        ``stride`` to the next 8 steps of K
none       an atom is 8 rows of 16 bytes; ``stride``    an atom is 8 steps of K of 16 bytes;
           to the next 8 rows, ``leading`` to the       ``stride`` to the next 16 bytes of rows,
           next 16 bytes of K                           ``leading`` to the next 8 steps of K
=========  ===========================================  ===========================================

The swizzle then exchanges units of 16 bytes inside each atom: bits 4 to 6 of the address are
replaced by their exclusive or with bits 7 to 9 (two bits for a width of 64, one for 32).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scripts.kernel_tools.ptx.program import PtxError

_WGMMA_SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}
_TCGEN05_SWIZZLE = {0: 0, 2: 128, 4: 64, 6: 32}


@dataclass(frozen=True)
class SharedMatrix:
    """A decoded descriptor; all in bytes. ``swizzle`` is 0, 32, 64 or 128."""

    start: int
    leading: int
    stride: int
    swizzle: int


def of_wgmma(descriptor: int) -> SharedMatrix:
    """Decode the descriptor of an operand of wgmma."""
    return _decode(descriptor, _WGMMA_SWIZZLE[descriptor >> 62])


def of_tcgen05(descriptor: int) -> SharedMatrix:
    """Decode the descriptor of an operand of tcgen05.mma."""
    if descriptor >> 46 & 7 != 1 or descriptor >> 52 & 1:
        raise PtxError(f"descriptor {descriptor:#x}: not one of tcgen05 with relative strides")
    mode = descriptor >> 61
    if mode not in _TCGEN05_SWIZZLE:
        raise PtxError(f"descriptor {descriptor:#x}: swizzle mode {mode} is not supported")
    return _decode(descriptor, _TCGEN05_SWIZZLE[mode])


def _decode(descriptor: int, swizzle: int) -> SharedMatrix:
    if descriptor >> 49 & 7:
        raise PtxError(f"descriptor {descriptor:#x}: a base offset is not supported")
    start, leading, stride = (((descriptor >> at) & 0x3FFF) << 4 for at in (0, 16, 32))
    return SharedMatrix(start, leading, stride, swizzle)


def addresses(
    matrix: SharedMatrix, extent: int, k: int, size: int, k_contiguous: bool
) -> npt.NDArray[np.int64]:
    """The shared address of each element of a matrix.

    Args:
        matrix: its descriptor.
        extent: of its rows (of A) or columns (of B).
        k: of the contraction.
        size: bytes of an element.
        k_contiguous: the layout is K-major.

    Returns:
        (extent, k).
    """
    i, j = np.arange(extent)[:, None], np.arange(k)[None, :]
    width = matrix.swizzle or 16
    if k_contiguous:
        along, across, unit = j * size, i, matrix.leading if not matrix.swizzle else 0
        if matrix.swizzle and (matrix.start % width) + k * size > width:
            raise PtxError(f"{matrix}: a contraction of {k * size} bytes leaves the swizzle's atom")
        address = across % 8 * width + across // 8 * matrix.stride
        address = address + along % width + along // width * unit
    else:
        along, across = i * size, j
        next_along, next_across = matrix.leading, matrix.stride
        if not matrix.swizzle:
            next_along, next_across = next_across, next_along
        address = across % 8 * width + across // 8 * next_across
        address = address + along % width + along // width * next_along
    address = address + matrix.start
    exchanged = (address >> 3) & (matrix.swizzle // 16 - 1 << 4) if matrix.swizzle else 0
    return (address ^ exchanged).astype(np.int64)
