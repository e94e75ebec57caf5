"""`Float8Matrix`: what a cast returns and a product takes; and the blocks of its scales."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from float8.granularity import WHOLE, Block, transpose_block

# The blocks that kernels know, of a matrix in GEMM-operand orientation.
TENSOR: Block = (WHOLE, WHOLE)
ROW: Block = (1, WHOLE)
BY_128: Block = (1, 128)
SQUARE_128: Block = (128, 128)
BY_32: Block = (1, 32)  # the MX formats
SQUARE_32: Block = (32, 32)


class Float8Matrix(NamedTuple):
    """A matrix in float8, or a stack of them: ``value = data * scale``.

    Args:
        data: (M, K), or (E, N, K) of experts, in a float8 dtype.
        scale: float32 or E8M0 of shape ``ceil(shape / block)``; for a GEMM of MX formats also as
            `float8.kernels.cublas.swizzled` returns it, in one dimension.
        block: the extent per dimension that shares a scale; -1 is the whole dimension.
    """

    data: Tensor
    scale: Tensor
    block: Block

    def t(self) -> Float8Matrix:
        """The transpose, as views; a single scale stays, and a swizzled one."""
        scale, block = self.scale, self.block
        if scale.dim() > 1 and scale.numel() > 1:
            scale = scale.mT
        return Float8Matrix(self.data.mT, scale, (*block[:-2], *transpose_block(block[-2:])))
