"""A program for a process of its own: the kernels' sources, interpreted, against the definition.

    TRITON_INTERPRET=1 python kernel_program.py small      odd sizes, all of their elements
    TRITON_INTERPRET=1 python kernel_program.py large      tensors of more than 2^31 elements

Several words run in the given order; ``large`` must be the last.

Exits with 1 and says which op differs. `test_large_tensors.py` starts it on the library, and on
copies of it with a fault planted, which it has to see.

Of a large tensor only that program of each launch runs which has the last tile: the first one of a
kernel that takes the last tiles first. The other memory is never touched, so it is not allocated;
it reads as zeros. If a 32-bit offset overflows, that program reads or writes elsewhere, or the
process crashes.
"""

from __future__ import annotations

import importlib
import mmap
import sys

import torch
from interpreter import _mend_float8_casts
from torch import Tensor

from float8.kernels import cublas, definition

GPU = "float8.kernels.gpu"
importlib.import_module(f"{GPU}.launch").register = lambda schema, *, kernel, **_: kernel
E4M3 = torch.float8_e4m3fn
WHOLE, BY_128, SQUARE = (-1, -1), (1, 128), (128, 128)
COLUMNS = 128  # one tile: a program has every column of the last rows
ROWS = 3 * 2**23  # times COLUMNS, half as much again as 32 bits count
TAIL = 64


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


def same_blocks(what: str, source: Tensor, block, data: Tensor, scale: Tensor) -> None:
    expected, expected_scale = definition.cast_dynamic(source, block, E4M3, "power_of_two")
    same(f"{what} scales", scale, expected_scale)
    same(what, data, expected)


def check(rows: int, columns: int, tail: int) -> None:
    """Every kernel on (rows, columns), all of it zero but the last rows, which are compared."""
    torch.manual_seed(0)
    x, end = untouched(rows, columns, torch.bfloat16), torch.randn(tail, columns).bfloat16()
    x[-tail:] = end
    size = f"({rows}, {columns})"

    scale = torch.full((1, 1), 0.01)
    data, data_t = op("cast", "cast")(x, scale, E4M3, True, True)
    codes = definition.cast(end, scale, WHOLE, E4M3)
    same(f"cast {size}", data[-tail:], codes)
    same(f"cast {size} transposed", data_t[:, -tail:], codes.t())
    del data_t

    same(f"transpose {size}", op("transpose", "_launch")(data)[:, -tail:], codes.t())
    del data

    data, scale, *_ = op("cast_rowwise", "cast_rowwise")(x, E4M3, True, True, False)
    few = min(rows, 16)  # a program has more
    same_blocks(f"cast_rowwise {size}", x[-few:], (1, -1), data[-few:], scale[-few:])
    del data

    last = rows % 128 or 128  # rows of the last blocks
    for block in (BY_128, SQUARE):
        data, scale, data_t, scale_t = op("cast_blockwise", "cast_blockwise")(
            x, E4M3, True, *block, True, True
        )
        downs = last if block[0] == 1 else 1
        same_blocks(
            f"cast_blockwise {block} {size}", x[-last:], block, data[-last:], scale[-downs:]
        )
        ends = data_t[:, -last:], scale_t[:, -1:]
        same_blocks(f"cast_blockwise {block} {size} transposed", x[-last:].t(), block, *ends)
        del data, data_t

    # Swizzled, the last tile may be padding alone, so it is left out where only that one is cast.
    for swizzled in (True, False) if tail == rows else (False,):
        written = rows % 128 or 128 if swizzled else rows % 64 or 64
        data, scale, data_t, scale_t = op("cast_mx", "cast_mx")(
            x, E4M3, "e8m0", swizzled, True, True
        )
        codes, exponents = definition.cast_dynamic(x[-written:], (1, 32), E4M3, "e8m0")
        codes_t, exponents_t = definition.cast_dynamic(x[-written:].t(), (1, 32), E4M3, "e8m0")
        if swizzled:  # the last 128 rows; of the transpose, the last 128 of the last rows
            exponents = cublas.swizzled(exponents)
            exponents_t = cublas.swizzled(exponents_t)[-512:]
            scale, scale_t = scale[-exponents.numel() :], scale_t[-512:]
        else:
            scale, scale_t = scale[-written:], scale_t[:, -exponents_t.shape[1] :]
        same(f"cast_mx {size} scales", scale, exponents)
        same(f"cast_mx {size}", data[-written:], codes)
        same(f"cast_mx {size} transposed scales", scale_t, exponents_t)
        same(f"cast_mx {size} transposed", data_t[:, -written:], codes_t)
        del data, data_t

    offs = torch.tensor([0, rows], dtype=torch.int32)
    data, scale, data_t, scale_t = op("cast_tokens", "cast_tokens")(
        x, offs, BY_128, E4M3, "power_of_two", None, 16, True, True
    )
    same_blocks(f"cast_tokens {size}", x[-last:], BY_128, data[-last:], scale[-last:])
    column = 1 + (rows - 1) // 128  # of the last block of the second group
    ends = data_t[:, rows - last : rows], scale_t[:, column : column + 1]
    same_blocks(f"cast_tokens {size} transposed", x[-last:].t(), BY_128, *ends)
    del data, data_t

    stack = x[rows % 3 :].unflatten(0, (3, -1))
    data, _ = op("cast", "cast")(stack, torch.full((1, 1), 0.01), E4M3, True, False)
    codes = definition.cast(end[-few:], torch.full((1, 1), 0.01), WHOLE, E4M3)
    same(f"cast of a stack {size}", data[-1, -few:], codes)
    del data

    a = untouched(rows, columns, torch.uint8)
    a[-tail:] = torch.randint(0x60, (tail, columns), dtype=torch.uint8)
    b = torch.randint(0x60, (columns, columns), dtype=torch.uint8).view(E4M3)
    blocks = -(-columns // 128)
    a_scale = untouched(rows, blocks, torch.float32)
    a_scale[-tail:] = 2.0 ** torch.arange(blocks)
    b_scale = torch.ones(columns, blocks)
    parts = a.view(E4M3), a_scale, b, b_scale
    out = op("blockwise_mm", "_launch")(*parts, 1, 1, None, torch.float32)
    ends = a[-tail:].view(E4M3), a_scale[-tail:], b, b_scale
    exact = definition.scaled_mm(*ends, BY_128, BY_128, None, torch.float32)
    error = (out[-tail:] - exact).norm() / exact.norm()
    if not error < 1e-5:
        sys.exit(f"blockwise_mm {size}: error {error}")
    check_groups(size, a.view(E4M3), tail)


def check_groups(size: str, a: Tensor, tail: int) -> None:
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
        first = max(begin, rows - tail)
        same_products(f"{size} by experts", out[first:end], a[first:end], expert)

    tokens = min(16 * (rows // 16), 2**23)
    a_t, b_t = untouched(4 * COLUMNS, tokens, torch.uint8), untouched(COLUMNS, tokens, torch.uint8)
    for x in (a_t, b_t):
        x[-COLUMNS:, -48:] = torch.randint(0x60, (COLUMNS, 48), dtype=torch.uint8)
    a_t, b_t = a_t.view(E4M3), b_t.view(E4M3)
    offs = torch.tensor((tokens - 48, tokens), dtype=torch.int32)
    parts = a_t, one, b_t, one, offs, *whole, torch.float32, 16, False
    out = module._launch(*parts, module.Tile(COLUMNS, COLUMNS, 8, 4))
    ends = (x[-COLUMNS:, -48:] for x in (a_t, b_t))
    same_products(f"{size} by tokens", out[1, -COLUMNS:], *ends)


def same_products(what: str, out: Tensor, a: Tensor, b: Tensor) -> None:
    exact = a.to(torch.float64) @ b.to(torch.float64).t()
    if not (out - exact).norm() <= 1e-5 * exact.norm():
        sys.exit(f"grouped_mm {what} differ")


def main(which: list[str]) -> None:
    _mend_float8_casts()
    if "small" in which:
        for rows, columns in ((48, 37), (130, 129)):
            check(rows, columns, rows)
    if "large" in which:
        only_last_tiles()
        check(ROWS + TAIL, COLUMNS, TAIL)


if __name__ == "__main__":
    main(sys.argv[1:])
