"""The error of float8 gradients against an exact mean, beside that of a bfloat16 all-reduce.

``python -m float8.distributed.gradients.measure`` prints it for several numbers of ranks; no
processes are started. `simulated` runs the arithmetic of `reduce.all_reduce_mean` for N ranks in
one process, to the same bits.

SQNR is ``10 log10(sum(mean^2) / sum((reduced - mean)^2))``, the mean in float64. The bfloat16
all-reduce is a ring's: each rank's gradient over N in bfloat16, and every hop rounds its partial
sum to bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from float8.distributed.gradients import wire
from float8.formats import E4M3, E5M2, Format

RANKS = (2, 4, 8, 64, 512)
ELEMENTS = 1 << 15


class Error(NamedTuple):
    """SQNRs in dB: of the all-reduce, of its reduce-scatter half alone, and of bfloat16's."""

    ranks: int
    all_reduce: float
    reduce_scatter: float
    bfloat16: float


def simulated(
    gradients: list[Tensor], fmt: Format = E4M3, mu: float = 1.0, tile: int = wire.TILE
) -> tuple[Tensor, Tensor]:
    """What N ranks reduce their flat gradients to.

    Args:
        gradients: N of shape (n,), float32, bfloat16 or float16.
        fmt: what travels.
        mu: the pre-scaling factor.
        tile: elements that share a scale.

    Returns:
        (n,) in the gradients' dtype: the mean after both halves; (n,) float32: after the
        reduce-scatter alone.
    """
    world, n = len(gradients), gradients[0].numel()
    tiles, extent = wire.extents(-(-n // world), tile)
    padding = world * tiles * extent - n
    folded = [
        wire.folded(torch.nn.functional.pad(g, (0, padding)).view(world, -1), extent)
        for g in gradients
    ]
    amax = torch.stack([wire.amax(x) for x in folded]).amax(0)
    scale = wire.shared_scale(amax, fmt)
    codes = [wire.encode(x, scale, fmt) for x in folded]
    sums = torch.stack([wire.summed(torch.stack(shards)) for shards in zip(*codes, strict=True)])
    half = (sums / world * scale).flatten()[:n]
    factor = torch.tensor(mu)
    mean_codes = wire.recast(wire.prescaled(sums, factor, world), fmt)
    whole = wire.decode(mean_codes, scale / factor, gradients[0].dtype)
    return whole.flatten()[:n], half


def ring_bfloat16(gradients: list[Tensor]) -> Tensor:
    """The mean by a bfloat16 ring all-reduce, (n,) bfloat16."""
    parts = [(g.float() / len(gradients)).bfloat16() for g in gradients]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def sqnr(found: Tensor, exact: Tensor) -> float:
    """Signal to noise in dB; exact is float64."""
    noise = (found.double() - exact).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise))


def independent(rank: int, n: int) -> Tensor:
    """A gradient of which ranks have nothing in common: all noise."""
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))


def agreeing(rank: int, n: int) -> Tensor:
    """A gradient of which ranks have most in common: a shared one, and noise a tenth of it."""
    return independent(1 << 40, n) + 0.1 * independent(rank, n)


def measure(
    ranks: int,
    gradient: Callable[[int, int], Tensor] = independent,
    fmt: Format = E4M3,
    n: int = ELEMENTS,
) -> Error:
    """The error on ``ranks`` ranks; ``gradient(rank, n)`` makes each rank's."""
    gradients = [gradient(rank, n) for rank in range(ranks)]
    exact = torch.zeros(n, dtype=torch.float64)
    for g in gradients:
        exact += g
    exact /= ranks
    whole, half = simulated(gradients, fmt)
    return Error(
        ranks, sqnr(whole, exact), sqnr(half, exact), sqnr(ring_bfloat16(gradients), exact)
    )


def table(fmt: Format, gradient: Callable[[int, int], Tensor], ranks: tuple[int, ...]) -> str:
    """One row per number of ranks."""
    rows = [measure(r, gradient, fmt) for r in ranks]
    lines = ["ranks   all-reduce   reduce-scatter   bfloat16 all-reduce"]
    lines += [
        f"{e.ranks:5} {e.all_reduce:9.1f} dB {e.reduce_scatter:13.1f} dB {e.bfloat16:18.1f} dB"
        for e in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m float8.distributed.gradients.measure",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="how many")
    ranks = tuple(parser.parse_args().ranks)
    if min(ranks) < 1:
        parser.error(f"argument --ranks: {min(ranks)} is not a positive number")
    for fmt in (E4M3, E5M2):
        for gradient in (independent, agreeing):
            print(f"\n{fmt}, {gradient.__name__} gradients\n{table(fmt, gradient, ranks)}")


if __name__ == "__main__":
    main()
