"""A mean of gradients that is reduced in float8 by N ranks, in one process.

`simulated` runs the arithmetic of `float8.distributed.gradient_reduction` to the same bits.
`error_on` compares it with a bfloat16 all-reduce, a ring's: each rank's gradient over N in
bfloat16, and every hop rounds its partial sum to bfloat16.

SQNR is ``10 log10(sum(mean^2) / sum((reduced - mean)^2))``, the mean in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from float8.distributed import gradient_reduction as reduction
from float8.formats import E4M3, Format

ELEMENTS = 1 << 15


class Error(NamedTuple):
    """SQNRs in dB: of the all-reduce, of its reduce-scatter alone, and of bfloat16's all-reduce."""

    ranks: int
    all_reduce: float
    reduce_scatter: float
    bfloat16: float


def simulated(
    gradients: list[Tensor],
    fmt: Format = E4M3,
    tile: int = reduction.TILE_SIZE,
) -> tuple[Tensor, Tensor]:
    """The reduced gradient of N ranks.

    Args:
        gradients: N of shape (n,), float32, bfloat16 or float16.
        fmt: the format that is sent.
        tile: elements that share a scale.

    Returns:
        (n,) in the gradients' dtype: the mean after both halves; (n,) float32: after the
        reduce-scatter alone.
    """
    world, n = len(gradients), gradients[0].numel()
    tiles, extent = reduction.extents(-(-n // world), tile)
    padding = world * tiles * extent - n
    parts = [
        reduction.in_tiles(torch.nn.functional.pad(g, (0, padding)).view(world, -1), extent)
        for g in gradients
    ]
    amax = torch.stack([reduction.amax_by_tile(x) for x in parts]).amax(0)
    scale = reduction.scale_by_tile(amax, fmt)
    data = [reduction.cast_by_tile(x, scale, fmt) for x in parts]
    sums = torch.stack([reduction.summed(torch.stack(own)) for own in zip(*data, strict=True)])
    half = (sums / world * scale).flatten()[:n]
    means = [
        reduction.cast_mean(x.unsqueeze(0), own, fmt)
        for x, own in zip(sums / world, scale, strict=True)
    ]
    mean_data, own_scale = (torch.cat(parts) for parts in zip(*means, strict=True))
    whole = reduction.dequantize_by_tile(mean_data, own_scale, gradients[0].dtype)
    return whole.flatten()[:n], half


def ring_bfloat16(gradients: list[Tensor]) -> Tensor:
    """The mean by a bfloat16 ring all-reduce, (n,) bfloat16."""
    parts = ((g.float() / len(gradients)).bfloat16() for g in gradients)
    return functools.reduce(torch.add, parts)


def sqnr(found: Tensor, exact: Tensor) -> float:
    """Signal to noise in dB; exact is float64."""
    noise = (found.double() - exact).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise))


def independent(rank: int, n: int) -> Tensor:
    """Noise, independent on each rank."""
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))


def agreeing(rank: int, n: int) -> Tensor:
    """A gradient that all ranks share, and independent noise of a tenth of its size."""
    return independent(1 << 40, n) + 0.1 * independent(rank, n)


def error_on(
    ranks: int, gradient: Callable[[int, int], Tensor] = independent, fmt: Format = E4M3
) -> Error:
    """The error on ``ranks`` ranks; ``gradient(rank, n)`` makes the gradient of each."""
    gradients = [gradient(rank, ELEMENTS) for rank in range(ranks)]
    exact = sum((g.double() for g in gradients), torch.zeros(ELEMENTS, dtype=torch.float64)) / ranks
    whole, half = simulated(gradients, fmt)
    return Error(
        ranks, sqnr(whole, exact), sqnr(half, exact), sqnr(ring_bfloat16(gradients), exact)
    )
