"""Which tile a GEMM runs in: measured on the device, once per class of sizes.

The fastest tile depends on the GPU, its caches and the sizes. Predictions from machine code do not
decide between tiles that are within a fifth of each other. So the first product of a class runs in
every tile of a committed list (`blockwise_mm.GEMM_TILES`, and two more of `grouped_mm`) on its own
operands, and the fastest one runs all later products of that class. A class holds the sizes that
have as many binary digits.

Every tile gives the same bits: tiles divide rows and columns, and each element is summed over the
contraction in the same order. Torch's kernel of `grouped_mm` does so too, and DeepGEMM's
(`deep_gemm`): tests compare their bits on a GPU, where torch's fast sums have not run yet. So ranks
of a job may choose differently.

Nothing is measured, and the first tile runs, while a CUDA graph is captured, on FakeTensors (the
op's fake runs instead) and on CPU tensors (which are interpreted). Under torch.compile the ops
are opaque, so it is measured where the kernel runs. The first product of a class waits for the GPU,
and later ones do not. It costs the compilation of up to four forms of the kernel, which Triton
keeps on disk, and `RUNS` + 1 launches of each. A thread compiles each form: Triton's passes and
ptxas leave Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from float8.kernels.gpu.launch import on_device_of

_T = TypeVar("_T")
RUNS = 5  # timed launches of each tile
_CHOSEN: dict[Hashable, object] = {}


def fastest(
    form: Hashable,
    x: Tensor,
    sizes: Sequence[int],
    tiles: Sequence[_T],
    run: Callable[[_T], object],
) -> _T:
    """The fastest of ``tiles`` for a product; the first one where nothing may be measured.

    ``form`` is what else decides which kernel is compiled: its name, the dtypes, the scales. ``x``
    is an operand, on the device of the product, and ``sizes`` are the product's. ``run`` launches
    the product in a tile. It may be called many times, and by several threads at once.
    """
    if x.device.type != "cuda":
        return tiles[0]
    key = (form, x.device, *(int(size).bit_length() for size in sizes))
    chosen = _CHOSEN.get(key)
    if chosen is None:
        if torch.cuda.is_current_stream_capturing():
            return tiles[0]
        stream = torch.cuda.current_stream(x.device)

        def compile_and_run(tile: _T) -> None:
            with torch.cuda.stream(stream):  # a thread has a current stream of its own
                run(tile)

        with ThreadPoolExecutor(len(tiles)) as threads:
            list(threads.map(compile_and_run, tiles))
        with on_device_of(x):
            seconds = [_seconds(run, tile) for tile in tiles]
        chosen = _CHOSEN[key] = tiles[seconds.index(min(seconds))]
    return chosen  # type: ignore[return-value]


def _seconds(run: Callable[[_T], object], tile: _T) -> float:
    """The time of `RUNS` launches on the current stream, which this waits for."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(RUNS):
        run(tile)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
