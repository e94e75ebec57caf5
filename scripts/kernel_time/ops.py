"""Predicted times of whole ops: all launches of one, and what L2 still holds between two of them.

A second launch that reads a tensor again finds part of it in L2 if it begins where the first one
ended: as many bytes as L2 has. If both begin at the same end, what it needs first has been
replaced, unless all of it fits. Zero fills of small tensors are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from benchmarks.bench_casts import CASTS
from float8.kernels.gpu.launch import LAUNCHERS, Variant, variants
from scripts.kernel_time.devices import DEVICES
from scripts.kernel_time.launches import compile_for, predict_compiled
from scripts.kernel_time.requests import program_of


def launches_of(cast: str, M: int, K: int) -> list[Variant]:
    """The launches of a row of `bench_casts`, for a bfloat16 matrix (M, K)."""
    row = CASTS[cast]
    x = torch.empty((M, K), dtype=torch.bfloat16, device="meta")
    row.on(x)  # registers the op
    return variants(cast, LAUNCHERS[row.op], x, *row.arguments_for(x))


@cache
def predicted(cast: str, M: int, K: int, device: str) -> float:
    """Seconds of a row of `bench_casts`, predicted for a device of `DEVICES`.

    Args:
        cast: the row's name, such as ``"dynamic both"``.
        M, K: of the bfloat16 matrix.
        device: such as ``"H200"``.
    """
    return predicted_sequence(launches_of(cast, M, K), device)


def predicted_sequence(launches: Sequence[Variant], device: str) -> float:
    """Seconds of launches that follow one another."""
    figures = DEVICES[device]
    seconds = 0.0
    directions: dict[int, int] = {}  # storage -> in which direction it was read last
    for variant in launches:
        compiled = compile_for(variant, figures.arch)
        cached: dict[str, float] = {}
        for name, ascends in _directions(variant, compiled.asm["ttir"]).items():
            tensor = variant.arguments[name]
            size, storage = tensor.numel() * tensor.element_size(), tensor.untyped_storage()._cdata
            if storage in directions and (size <= figures.l2 or directions[storage] != ascends):
                cached[name] = min(figures.l2, size)
            directions[storage] = ascends
        seconds += predict_compiled(variant, device, compiled, cached).seconds
    return seconds


def _directions(variant: Variant, ttir: str) -> dict[str, int]:
    """Arguments that the launch reads, tile by tile -> 1 from the start on, -1 from the end."""
    starts = [
        {
            access.argument: access.start
            for access in reversed(
                program_of(
                    ttir, list(variant.types), variant.arguments, variant.programs, at
                ).accesses
            )
            if not access.writes and access.elements > 1
        }
        for at in (0, variant.programs[0] - 1)
    ]
    found = {}
    for name, start in starts[0].items():
        end = starts[1].get(name)
        if start is not None and end is not None and start != end:
            found[name] = 1 if end > start else -1
    return found
