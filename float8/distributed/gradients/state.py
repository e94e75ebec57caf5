"""The state of a model's float8 reductions: format, tile, and counts of lost values.

Counts are tensors on the gradients' device; adding to them does not wait for the device.
`Float8Gradients.report` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from float8.distributed.gradients.reduction import LOST, TILE_SIZE
from float8.formats import E4M3, Format, format_of


@dataclass(frozen=True)
class GradientReport:
    """Counts of the values that float8 reductions lost since the start (or the last reset).

    Args:
        steps: reductions of all gradients (each microbatch that synchronises counts); for FSDP2,
            reductions of one unit each.
        elements: gradient values reduced in them.
        flushed: nonzero values of the mean that became zero, over all ranks. FSDP2: always 0.
        sampled: values of the ranks' own gradients that were counted before the sum: each rank
            counts those of its own shard. DDP: over all ranks; FSDP2: of this rank.
        flushed_before: nonzero values among ``sampled`` that became zero.
        nonfinite: reductions, of one bucket or unit each, that had a NaN or an infinity.
    """

    steps: int
    elements: int
    flushed: int
    sampled: int
    flushed_before: int
    nonfinite: int

    def __str__(self) -> str:
        return (
            f"{self.steps} reductions of {self.elements} gradient values: "
            f"{self.flushed / max(1, self.elements):.3%} of the means and "
            f"{self.flushed_before / max(1, self.sampled):.3%} of the parts flushed to zero, "
            f"{self.nonfinite} not finite"
        )


class Float8Gradients:
    """The state of `float8_gradients`: read it with `report`.

    Args:
        fmt: `E4M3`, `E5M2` or their dtypes: the format that is sent.
        tile: how many elements share a scale, at most.

    Raises:
        TypeError: ``fmt`` is no float8 format.
    """

    _lost: Tensor  # as `LOST`, int64, on the gradients' device

    def __init__(self, fmt: Format | torch.dtype = E4M3, tile: int = TILE_SIZE) -> None:
        self.format = format_of(fmt)
        self.tile = tile
        self.reset()

    def count(self, lost_3: Tensor, elements: int, sampled: int, ends_step: bool) -> None:
        """Add the reduction of one bucket or unit.

        A step is the reduction of all buckets under DDP, and of one unit under FSDP2. Under DDP all
        ranks have equal counts.

        Args:
            lost_3: what it lost, `LOST`.
            elements, sampled: see `GradientReport`.
            ends_step: whether no other bucket follows.
        """
        self._lost = lost_3 + self._lost.to(lost_3.device)
        self._counts["elements"] += elements
        self._counts["sampled"] += sampled
        self._counts["steps"] += ends_step

    def report(self) -> GradientReport:
        """The counts so far. It waits for the device, but not for other ranks."""
        if self._lost.device.type == "cuda":  # reductions run in streams of their own
            torch.cuda.synchronize(self._lost.device)
        lost = dict(zip(LOST, self._lost.tolist(), strict=True))
        return GradientReport(**self._counts, **lost)

    def reset(self) -> None:
        """Set the counts to zero."""
        self._counts = dict.fromkeys(("steps", "elements", "sampled"), 0)
        self._lost = torch.zeros(3, dtype=torch.int64)
