"""`cast_tokens` where its mistakes show: around guarded memory.

`interpreter.py` loads this file in its child process. Memory that a launch does not write holds the
byte 0x55, so padding is zero only if a kernel wrote it. A write outside the outputs is an error.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from float8.kernels.gpu import cast, cast_tokens

GUARD, UNWRITTEN = (
    4096,
    0x55,
)  # bytes around each output, and what memory holds before it is written


def launch(*arguments: object) -> tuple[Tensor, ...]:
    """Cast tokens.

    Raises:
        IndexError: something outside the outputs was written.
    """
    memory: list[Tensor] = []

    def guarded(x: Tensor, rows: int, cols: int, wanted: bool, dtype: torch.dtype) -> Tensor:
        if not wanted:
            return torch.empty((0, 0), dtype=dtype)
        size = rows * cols * dtype.itemsize
        memory.append(torch.full((2 * GUARD + size,), UNWRITTEN, dtype=torch.uint8))
        return memory[-1][GUARD : GUARD + size].view(dtype).view(rows, cols)

    with (
        mock.patch.object(cast_tokens, "new_data", guarded),
        mock.patch.object(cast, "new_data", guarded),
    ):
        outputs = cast_tokens._launch(*arguments)
    for each in memory:
        if not (each[:GUARD] == UNWRITTEN).all() or not (each[-GUARD:] == UNWRITTEN).all():
            raise IndexError("a kernel wrote outside its outputs")
    return outputs
