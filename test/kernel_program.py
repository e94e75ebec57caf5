"""A program for a process of its own: tensors of more than 2^31 elements, by interpreted kernels.

    TRITON_INTERPRET=1 python kernel_program.py

Exits with 1 and says which op differs from its definition. `test_large_tensors.py` starts it on the
library, and on a copy of it with a fault planted, which it has to see.

Only that program of each launch runs which has the last tile: the first one of a kernel that takes
the last tiles first. The other memory is never touched, so it is not allocated; it reads as zeros.
If a 32-bit offset overflows, that program reads or writes elsewhere, or the process crashes.
"""

from __future__ import annotations

import importlib
import mmap
import sys

import torch
from interpreter import _mend_float8_casts
from torch import Tensor

from float8.kernels import definition

GPU = "float8.kernels.gpu"
launch = importlib.import_module(f"{GPU}.launch")
launch.register_op = lambda schema, *, kernel, **_: kernel
E4M3 = torch.float8_e4m3fn
WHOLE, BY_128, SQUARE = (-1, -1), (1, 128), (128, 128)
COLUMNS = 128  # one tile: a program has every column of the last rows
TAIL = 64
ROWS = 3 * 2**23 + TAIL  # times COLUMNS, half as much again as 32 bits count


def op(file: str, name: str):
    return getattr(importlib.import_module(f"{GPU}.{file}"), name)


def untouched(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written to."""
    memory = mmap.mmap(-1, rows * columns * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)


def only_last_tiles() -> None:
    """Make Triton's interpreter run one program of each launch, on the tensors themselves."""
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder
    call, place = executor.__call__, builder.set_grid_idx

    def last(self, *args, **kwargs):
        dims = (*self.grid, 1, 1)[:3]
        self.grid = (1,)
        builder.set_grid_dim = lambda *_: setattr(builder, "grid_dim", dims)
        is_first = "tile_of_program" in self.fn.__code__.co_names
        builder.set_grid_idx = lambda *_: place(*(0 if is_first else dim - 1 for dim in dims))
        return call(self, *args, **kwargs)

    executor.__call__ = last
    executor._restore_args_dev = lambda self, *_: None  # the host's arguments are the device's


def same(what: str, actual: Tensor, expected: Tensor) -> None:
    actual, expected = (
        x.contiguous().view(torch.uint8) if x.element_size() == 1 else x for x in (actual, expected)
    )
    if not torch.equal(actual, expected):
        sys.exit(f"{what}: {int((actual != expected).sum())} of {expected.numel()} differ")


def same_blocks(
    what: str, source: Tensor, block, data: Tensor, scale: Tensor, scale_format="power_of_two"
) -> None:
    expected, expected_scale = definition.cast_dynamic(source, block, E4M3, scale_format)
    same(f"{what} scales", scale, expected_scale)
    same(what, data, expected)


def check() -> None:
    """Every kernel on (ROWS, COLUMNS), all of it zero but the last rows, which are compared."""
    torch.manual_seed(0)
    x, end = untouched(ROWS, COLUMNS, torch.bfloat16), torch.randn(TAIL, COLUMNS).bfloat16()
    x[-TAIL:] = end

    scale = torch.full((1, 1), 0.01)
    cast = op("cast", "_launch")
    data, _, data_t, *_ = cast(x, scale, WHOLE, E4M3, "float32", False, True, True, False)
    codes = definition.cast_by_scale(end, scale, WHOLE, E4M3)
    same("cast", data[-TAIL:], codes)
    same("cast transposed", data_t[:, -TAIL:], codes.t())
    del data_t

    same("transpose", op("transpose", "_launch")(data)[:, -TAIL:], codes.t())
    del data

    data, scale, *_ = cast(x, None, (1, -1), E4M3, "power_of_two", False, True, False, False)
    few = 16  # a program has more
    same_blocks("cast rowwise", x[-few:], (1, -1), data[-few:], scale[-few:])
    del data

    for block in (BY_128, SQUARE):
        parts = cast(x, None, block, E4M3, "power_of_two", False, True, True, False)[:4]
        data, scale, data_t, scale_t = parts
        downs = TAIL if block[0] == 1 else 1
        same_blocks(f"cast {block}", end, block, data[-TAIL:], scale[-downs:])
        ends = data_t[:, -TAIL:], scale_t[:, -1:]
        same_blocks(f"cast {block} transposed", end.t(), block, *ends)
        del data, data_t, parts

    parts = cast(x, None, (1, 32), E4M3, "e8m0", False, True, True, False)[:4]
    data, scale, data_t, scale_t = parts
    same_blocks("cast mx", end, (1, 32), data[-TAIL:], scale[-TAIL:], "e8m0")
    same_blocks("cast mx transposed", end.t(), (1, 32), data_t[:, -TAIL:], scale_t[:, -2:], "e8m0")
    del data, data_t, parts

    offs = torch.tensor([0, ROWS], dtype=torch.int32)
    arguments = (x, offs, BY_128, E4M3, "power_of_two", None, 16, True, True)
    data, scale, data_t, scale_t = op("cast_tokens", "cast_tokens_op")(*arguments)
    same_blocks("cast_tokens", end, BY_128, data[-TAIL:], scale[-TAIL:])
    column = 1 + (ROWS - 1) // 128  # of the last block of the second group
    ends = data_t[:, ROWS - TAIL : ROWS], scale_t[:, column : column + 1]
    same_blocks("cast_tokens transposed", end.t(), BY_128, *ends)
    del data, data_t

    stack = x[ROWS % 3 :].unflatten(0, (3, -1))
    given = torch.full((1, 1), 0.01)
    data, *_ = cast(stack, given, WHOLE, E4M3, "float32", False, True, False, False)
    codes = definition.cast_by_scale(end[-few:], given, WHOLE, E4M3)
    same("cast of a stack", data[-1, -few:], codes)
    del data

    a = untouched(ROWS, COLUMNS, torch.uint8)
    a[-TAIL:] = torch.randint(0x60, (TAIL, COLUMNS), dtype=torch.uint8)
    b = torch.randint(0x60, (COLUMNS, COLUMNS), dtype=torch.uint8).view(E4M3)
    parts = a.view(E4M3), torch.ones(1, 1).expand(ROWS, 1), b, torch.ones(COLUMNS, 1)
    out = op("blockwise_mm", "_launch")(*parts, 1, 1, None, torch.float32)
    same_products("blockwise_mm", out[-TAIL:], a[-TAIL:].view(E4M3), b)
    check_groups(a.view(E4M3))


def check_groups(a: Tensor) -> None:
    """Two groups, the second of at most 64 tokens; by experts, so that the last program has it."""
    rows, columns = a.shape
    one, whole = torch.ones(1, 1), (WHOLE, WHOLE)
    module = importlib.import_module(f"{GPU}.grouped_mm")
    ends = max(rows - 64, 0), rows - 1
    offs = torch.tensor(ends, dtype=torch.int32)
    b = torch.randint(0x60, (2, columns, columns), dtype=torch.uint8).view(E4M3)
    parts = a[:-1], one, b, torch.ones(2, 1, 1), offs, *whole, torch.float32, 16, False
    out = module._launch(*parts, module.Tile(64, COLUMNS, 4, 3))
    for begin, end, expert in ((0, ends[0], b[0]), (*ends, b[1])):
        first = max(begin, rows - TAIL)
        same_products("grouped_mm by experts", out[first:end], a[first:end], expert)

    tokens = min(16 * (rows // 16), 2**23)
    a_t, b_t = untouched(4 * COLUMNS, tokens, torch.uint8), untouched(COLUMNS, tokens, torch.uint8)
    for x in (a_t, b_t):
        x[-COLUMNS:, -48:] = torch.randint(0x60, (COLUMNS, 48), dtype=torch.uint8)
    a_t, b_t = a_t.view(E4M3), b_t.view(E4M3)
    offs = torch.tensor((tokens - 48, tokens), dtype=torch.int32)
    parts = a_t, one, b_t, one, offs, *whole, torch.float32, 16, False
    out = module._launch(*parts, module.Tile(COLUMNS, COLUMNS, 8, 4))
    ends = (x[-COLUMNS:, -48:] for x in (a_t, b_t))
    same_products("grouped_mm by tokens", out[1, -COLUMNS:], *ends)


def same_products(what: str, out: Tensor, a: Tensor, b: Tensor) -> None:
    exact = a.to(torch.float64) @ b.to(torch.float64).t()
    if not (out - exact).norm() <= 1e-5 * exact.norm():
        sys.exit(f"{what} differ")


if __name__ == "__main__":
    _mend_float8_casts()
    only_last_tiles()
    check()
