"""Granularity is one field: ``block``, the extent per dimension that shares one scale.

==================== ================= =================================================
granularity          block of a matrix used by
==================== ================= =================================================
`Tensorwise`         ``(-1, -1)``      one scale per tensor
`Rowwise`            ``(1, -1)``       one scale per row: per token, per output channel
`Blockwise(1, 128)`  ``(1, 128)``      DeepSeek-V3 activations (arXiv 2412.19437, sec. 3.3.2)
`Blockwise(128,128)` ``(128, 128)``    DeepSeek-V3 weights
`Blockwise(1, 32)`   ``(1, 32)``       MX formats
`Blockwise(32, 32)`  ``(32, 32)``      MX formats, of weights: the same data for both GEMMs
==================== ================= =================================================

``-1`` stands for "the whole dimension", whatever its extent: one compiled graph then serves every
batch size, and slices and empty tensors keep a meaning. Everything else follows from the block:

- ``scale.shape == ceil(shape / block)`` (`scale_shape`); a whole dimension has extent 1;
- a transpose swaps the block together with the shape;
- granularity is stated in the orientation of a GEMM operand, the last dimension being the
  contraction;
- a vector is one row, and a number one element of it: its block has the last extents alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from float8.arguments import check_integer

Block = tuple[int, ...]
WHOLE = -1


@dataclass(frozen=True)
class Granularity(ABC):
    """Abstract: which elements share a scale. Final: `Tensorwise`, `Rowwise`, `Blockwise`."""

    @abstractmethod
    def block_of(self, shape: Sequence[int]) -> Block:
        """The block of a tensor of this shape, one extent (or -1) per dimension."""


@dataclass(frozen=True)
class Tensorwise(Granularity):
    """One scale for the whole tensor."""

    def block_of(self, shape: Sequence[int]) -> Block:
        """-1 along every dimension."""
        return (WHOLE,) * len(shape)


@dataclass(frozen=True)
class Rowwise(Granularity):
    """One scale per row, that is per index of all dimensions but the last."""

    def block_of(self, shape: Sequence[int]) -> Block:
        """1 along every dimension but the last, -1 along that one."""
        return ((1,) * len(shape) + (WHOLE,))[1:]


@dataclass(frozen=True)
class Blockwise(Granularity):
    """One scale per ``rows`` x ``cols`` block of the last two dimensions.

    Args:
        rows: the extent along the last dimension but one, at least 1.
        cols: the extent along the last dimension, at least 1.
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        for name, extent in (("rows", self.rows), ("cols", self.cols)):
            check_integer(extent, f"Blockwise: {name}", 1)

    def block_of(self, shape: Sequence[int]) -> Block:
        """``rows`` and ``cols`` along the last two dimensions, 1 along the others."""
        return ((1,) * len(shape) + (self.rows, self.cols))[2:]


def scale_shape(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """``ceil(shape / block)``: the shape of the scales of a tensor."""
    if len(shape) != len(block):
        raise ValueError(f"shape {tuple(shape)} needs one extent per dimension, got block {block}")
    pairs = zip(shape, block, strict=True)
    return tuple([1 if extent == WHOLE else ceil_div(size, extent) for size, extent in pairs])


def ceil_div(size: int, extent: int) -> int:
    """``ceil(size / extent)``, in the one spelling that torch.compile can work with.

    The lowering of ``_scaled_mm`` (torch/_inductor/kernel/mm.py, `get_scaling_options`) must prove
    that the scales have ``CeilDiv(size, 128)`` elements. That is ``(size + 127) // 128`` to sympy;
    the other spelling, ``-(-size // 128)``, it cannot prove equal for a dynamic size.
    """
    return (size + extent - 1) // extent


def transpose_block(block: Block) -> Block:
    """The block of a matrix's transpose."""
    rows, cols = block
    return (cols, rows)


def block_name(block: Block) -> str:
    """``tensorwise``, ``rowwise``, or the extents of a block, such as ``1x128``."""
    if set(block) <= {WHOLE}:
        return "tensorwise"
    if block[-1] == WHOLE and set(block[:-1]) == {1}:
        return "rowwise"
    return "x".join(["all" if extent == WHOLE else str(extent) for extent in block])
