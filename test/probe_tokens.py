"""`cast_tokens` where its mistakes show: around guarded memory, and with faults planted.

`interpreter.py` loads this file in its child process. Memory that a launch does not write holds the
byte 0x55, so padding is zero only if a kernel wrote it. A write outside the outputs is an error.
"""

from __future__ import annotations

from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.kernels.gpu import cast, cast_tokens, jit
from float8.kernels.gpu.jit import group_of_tile, store_packed

GUARD, UNWRITTEN = (
    4096,
    0x55,
)  # bytes around each output, and what memory holds before it is written


@triton.jit
def wrong_start(
    tile, offs_ptr, E, T, P, ROWS: tl.constexpr, ALIGN: tl.constexpr, GROUPS: tl.constexpr
):
    """Groups that are not aligned in the transposed operand: counted as on a CPU."""
    group, begin, size, _, first = group_of_tile(tile, offs_ptr, E, T, P, ROWS, ALIGN, GROUPS)
    return group, begin, size, begin // 16 * 16, first


@triton.jit
def tail_is_read(
    tile, offs_ptr, E, T, P, ROWS: tl.constexpr, ALIGN: tl.constexpr, GROUPS: tl.constexpr
):
    """The last group has the rows that are in no group."""
    group, begin, size, start, first = group_of_tile(tile, offs_ptr, E, T, P, ROWS, ALIGN, GROUPS)
    return group, begin, tl.where(group == E - 1, T - begin, size), start, first


@triton.jit
def no_padding(out_ptr, packed, first_m4, k, size, start, K, P):
    """The last columns of a group and of its padding keep what was in memory."""
    store_packed(out_ptr, packed, first_m4, k, size - 16, start, K, P)


@triton.jit
def neighbours_tokens(
    tile, offs_ptr, E, T, P, ROWS: tl.constexpr, ALIGN: tl.constexpr, GROUPS: tl.constexpr
):
    """A group takes the last tokens of the group before it."""
    group, begin, size, start, first = group_of_tile(tile, offs_ptr, E, T, P, ROWS, ALIGN, GROUPS)
    return group, begin - begin % 4, size + begin % 4, start, first


FAULTS = {
    "wrong_start": ("group_of_tile", wrong_start),
    "tail_is_read": ("group_of_tile", tail_is_read),
    "neighbours_tokens": ("group_of_tile", neighbours_tokens),
    "no_padding": ("store_packed", no_padding),
}


def launch(fault: str | None, *arguments: object) -> tuple[Tensor, ...]:
    """`cast_tokens` with one of `FAULTS`, or without.

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

    name, instead = FAULTS[fault] if fault else ("group_of_tile", group_of_tile)
    with (
        mock.patch.object(cast_tokens, "new_data", guarded),
        mock.patch.object(cast, "new_data", guarded),
        mock.patch.object(jit, name, instead),
    ):
        outputs = cast_tokens._launch(*arguments)
    for each in memory:
        if not (each[:GUARD] == UNWRITTEN).all() or not (each[-GUARD:] == UNWRITTEN).all():
            raise IndexError("a kernel wrote outside its outputs")
    return outputs
