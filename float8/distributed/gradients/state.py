"""What the reductions of one model share: the format, mu, and counts of what was lost.

Counts are tensors on the gradients' device, added to without waiting; `Float8Gradients.report`
reads them. `state_dict` holds plain tensors (mu and the counts), so a checkpoint restores both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from float8.distributed.gradients.controller import ScalingController
from float8.distributed.gradients.wire import TILE
from float8.formats import E4M3, Format, format_of

_ON_HOST = ("steps", "elements", "sampled")  # counts that no device has to be asked for


@dataclass(frozen=True)
class GradientReport:
    """What float8 cost the gradients since the start (or the last `Float8Gradients.reset`).

    Args:
        steps: reductions of all gradients (microbatches that synchronise count each); of one
            FSDP2 unit each.
        elements: gradient values reduced in them.
        saturated: values of the mean that were clamped, over all ranks. FSDP2: always 0.
        flushed: nonzero values of the mean that became zero, over all ranks. FSDP2: always 0.
        sampled: values of ranks' own gradients that were looked at before the sum: each rank looks
            at the shard that it keeps. DDP: over all ranks; FSDP2: of this rank.
        flushed_before: nonzero ones of these that became zero.
        nonfinite: reductions, of one bucket or unit each, that a NaN or an infinity entered.
        mu: the pre-scaling factor now; None for FSDP2, whose half cannot saturate.
    """

    steps: int
    elements: int
    saturated: int
    flushed: int
    sampled: int
    flushed_before: int
    nonfinite: int
    mu: float | None

    def __str__(self) -> str:
        mu = "" if self.mu is None else f", mu {self.mu:.4g}"
        return (
            f"{self.steps} reductions of {self.elements} gradient values: "
            f"{self._share(self.saturated, self.elements)} saturated, "
            f"{self._share(self.flushed, self.elements)} of the means and "
            f"{self._share(self.flushed_before, self.sampled)} of the parts flushed to zero, "
            f"{self.nonfinite} not finite{mu}"
        )

    @staticmethod
    def _share(part: int, whole: int) -> str:
        return f"{part / max(1, whole):.3%}"


class Float8Gradients:
    """The state behind `float8_gradients`: read it with `report`, save it with the checkpoint.

    Args:
        fmt: `E4M3`, `E5M2` or their dtypes: what travels.
        controller: finds mu; None where nothing can saturate (FSDP2).
        tile: how many elements share a scale, at most.

    Raises:
        TypeError: ``fmt`` is no float8 format.
        ValueError: ``tile`` is below 1.
    """

    def __init__(
        self,
        fmt: Format | torch.dtype = E4M3,
        controller: ScalingController | None = None,
        tile: int = TILE,
    ) -> None:
        if tile < 1:
            raise ValueError(f"float8_gradients: a tile of {tile} elements holds no gradient")
        self.format = format_of(fmt)
        self.controller = controller
        self.tile = tile
        self._counts = dict.fromkeys(_ON_HOST, 0)
        self._lost = torch.zeros(4, dtype=torch.int64)  # wire.Counts, on the gradients' device
        self._of_step = torch.zeros(4, dtype=torch.int64)
        self._elements_of_step = 0
        self._agreed: set[dist.ProcessGroup] = set()

    def prepare(self, device: torch.device, world: int) -> None:
        """Move the counts and mu beside the gradients."""
        self._lost, self._of_step = self._lost.to(device), self._of_step.to(device)
        if self.controller is not None:
            self.controller.prepare(device, world)

    def agree(self, group: dist.ProcessGroup) -> None:
        """Make sure, once per group, that all of its ranks have the same settings.

        Raises:
            RuntimeError: on every rank, saying who has which.
        """
        if group in self._agreed:
            return
        mu = "" if self.controller is None else f", {self.controller}"
        mine = f"{self.format} in tiles of {self.tile}{mu}"
        every: list[str | None] = [None] * group.size()
        dist.all_gather_object(every, mine, group=group)
        if len(set(every)) > 1:
            said = "; ".join(f"rank {rank}: {settings}" for rank, settings in enumerate(every))
            raise RuntimeError(
                f"float8_gradients needs the same arguments on all ranks, got {said}"
            )
        self._agreed.add(group)

    def count(self, counts_4: Tensor, elements: int, sampled: int) -> None:
        """Add one reduction; `end_step` follows the last one of a step."""
        self._of_step += counts_4
        self._elements_of_step += elements
        self._counts["sampled"] += sampled

    def count_unit(self, counts_4: Tensor, elements: int, sampled: int) -> None:
        """Add one reduction that is a step of its own: an FSDP2 unit's."""
        if self._lost.device != counts_4.device:  # once; its parameters may be offloaded
            self._lost = self._lost.to(counts_4.device)
        self._lost += counts_4
        self._counts["steps"] += 1
        self._counts["elements"] += elements
        self._counts["sampled"] += sampled

    def end_step(self) -> None:
        """Update mu from this step's counts. Every rank calls it with equal ones."""
        saturated, _, _, nonfinite = self._of_step.unbind()
        if self.controller is not None:
            self.controller.update(saturated, nonfinite, self._elements_of_step)
        self._lost += self._of_step
        self._of_step.zero_()
        self._counts["elements"] += self._elements_of_step
        self._counts["steps"] += 1
        self._elements_of_step = 0

    def report(self) -> GradientReport:
        """What was lost so far. Waits for the device, but for no other rank."""
        self._wait()
        saturated, flushed, flushed_before, nonfinite = self._lost.tolist()
        return GradientReport(
            steps=self._counts["steps"],
            elements=self._counts["elements"],
            saturated=saturated,
            flushed=flushed,
            sampled=self._counts["sampled"],
            flushed_before=flushed_before,
            nonfinite=nonfinite,
            mu=None if self.controller is None else float(self.controller.mu),
        )

    def reset(self) -> None:
        """Start counting anew; mu stays."""
        self._wait()
        self._counts = dict.fromkeys(_ON_HOST, 0)
        self._lost.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """mu and the counts, as plain tensors, for `torch.distributed.checkpoint` too.

        Equal on all ranks under DDP. FSDP2's are this rank's, and have no mu to lose.
        """
        self._wait()
        counts = torch.tensor([self._counts[name] for name in _ON_HOST])
        state = {"lost": self._lost.clone(), "counts": counts}
        return state | (self.controller.state_dict() if self.controller is not None else {})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state_dict` was taken; on every rank, with the same state.

        Ranks decode with their own mu, and do not ask each other again: one that loads alone would
        end up with other gradients than the rest.

        Raises:
            ValueError: entries are missing, or mu is no positive finite number.
        """
        if missing := {"lost", "counts"} - state.keys():
            raise ValueError(f"Float8Gradients: the state lacks {sorted(missing)}")
        if self.controller is not None:
            self.controller.load_state_dict(state)
        self._wait()
        self._lost.copy_(state["lost"])
        self._counts = dict(zip(_ON_HOST, state["counts"].tolist(), strict=True))

    def _wait(self) -> None:
        # Reductions run in streams of their own; this is no hot path.
        if self._lost.device.type == "cuda":
            torch.cuda.synchronize(self._lost.device)
