"""The state of a model's float8 reductions: format, factor mu, and counts of lost values.

Counts are tensors on the gradients' device; adding to them does not wait for the device.
`Float8Gradients.report` reads them. `Float8Gradients.state_dict` holds plain tensors (mu and the
counts), so that a checkpoint restores both.

**The rule of mu** is the auto-scaling of FP8-LM (arXiv 2310.18313, section 2.1). If more than
0.001 % of the gradient values reach the largest float8 value, mu is halved for the next step.
Otherwise mu grows exponentially, by a factor of two in 1000 steps. So mu approaches the largest
value at which (almost) nothing saturates, and underflow is least. mu is a tensor on the gradients'
device, updated by a few kernels, so that no step waits for it. The counts are equal on all ranks,
so mu is equal without a collective of its own.

The paper leaves two cases open. *A ceiling*: the mean of N independent gradients can be smaller
than one of them by sqrt(N), and a larger mu would only clip; so sqrt(N) is the default ceiling. *A
step whose gradients are not finite* says nothing about saturation: mu does not change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from float8.distributed.gradients.reduction import LOST, TILE_SIZE
from float8.formats import E4M3, Format, format_of

THRESHOLD = 1e-5  # the share of saturated values above which mu is halved
GROWTH = 2.0 ** (1 / 1000)  # of mu in a step without saturation
_ON_HOST = ("steps", "elements", "sampled")  # counts that need no device


class ScalingController:
    """mu, halved on saturation and growing slowly otherwise.

    Args:
        initial: mu at the start; at 1 and below no gradient saturates.
        ceiling: mu never exceeds it; None is the square root of the number of ranks.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, initial: float = 1.0, ceiling: float | None = None) -> None:
        if not 0 < initial < math.inf or (ceiling is not None and ceiling < initial):
            needs = "0 < initial <= ceiling, and initial finite"
            raise ValueError(f"ScalingController: needs {needs}, got {initial=}, {ceiling=}")
        self.ceiling = ceiling
        self.mu = torch.full((), initial, dtype=torch.float32)

    def __repr__(self) -> str:  # exact: ranks compare it
        return f"ScalingController(mu={float(self.mu):.9g}, ceiling={self.ceiling})"

    def prepare(self, device: torch.device, world: int) -> None:
        """Move mu to the gradients' device, and set the default ceiling."""
        self.mu = self.mu.to(device)
        if self.ceiling is None:
            self.ceiling = max(math.sqrt(world), float(self.mu))

    def update(self, saturated: Tensor, nonfinite: Tensor, elements: int) -> None:
        """Update mu after one step; in place, without waiting for the device.

        Args:
            saturated: integer (): saturated values of the step, over all ranks.
            nonfinite: integer (): positive if the step's gradients were not finite.
            elements: how many values the step reduced.
        """
        share = saturated.to(torch.float32) / max(1, elements)
        grown = (self.mu * GROWTH).clamp(max=self.ceiling)
        following = torch.where(share > THRESHOLD, self.mu * 0.5, grown)
        self.mu.copy_(torch.where(nonfinite > 0, self.mu, following))


@dataclass(frozen=True)
class GradientReport:
    """Counts of the values that float8 reductions lost since the start (or the last reset).

    Args:
        steps: reductions of all gradients (each microbatch that synchronises counts); for FSDP2,
            reductions of one unit each.
        elements: gradient values reduced in them.
        saturated: values of the mean that were clamped, over all ranks. FSDP2: always 0.
        flushed: nonzero values of the mean that became zero, over all ranks. FSDP2: always 0.
        sampled: values of the ranks' own gradients that were counted before the sum: each rank
            counts those of its own shard. DDP: over all ranks; FSDP2: of this rank.
        flushed_before: nonzero values among ``sampled`` that became zero.
        nonfinite: reductions, of one bucket or unit each, that had a NaN or an infinity.
        mu: the pre-scaling factor now; None for FSDP2, where nothing can saturate.
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
        of = {"elements": max(1, self.elements), "sampled": max(1, self.sampled)}
        mu = "" if self.mu is None else f", mu {self.mu:.4g}"
        return (
            f"{self.steps} reductions of {self.elements} gradient values: "
            f"{self.saturated / of['elements']:.3%} saturated, "
            f"{self.flushed / of['elements']:.3%} of the means and "
            f"{self.flushed_before / of['sampled']:.3%} of the parts flushed to zero, "
            f"{self.nonfinite} not finite{mu}"
        )


class Float8Gradients:
    """The state of `float8_gradients`: read it with `report`, save it with the checkpoint.

    Args:
        fmt: `E4M3`, `E5M2` or their dtypes: the format that is sent.
        controller: computes mu; None if nothing can saturate (FSDP2).
        tile: how many elements share a scale, at most.

    Raises:
        TypeError: ``fmt`` is no float8 format.
    """

    def __init__(
        self,
        fmt: Format | torch.dtype = E4M3,
        controller: ScalingController | None = None,
        tile: int = TILE_SIZE,
    ) -> None:
        self.format = format_of(fmt)
        self.controller = controller
        self.tile = tile
        self._counts = dict.fromkeys(_ON_HOST, 0)
        self._elements_of_step = 0
        # As `LOST`, on the gradients' device: of all steps, and of the one that runs.
        self._lost, self._lost_now = torch.zeros(2, 4, dtype=torch.int64)

    def prepare(self, device: torch.device, world: int) -> None:
        """Move the counts and mu to the gradients' device."""
        self._lost, self._lost_now = self._lost.to(device), self._lost_now.to(device)
        if self.controller is not None:
            self.controller.prepare(device, world)

    def count(self, lost_4: Tensor, elements: int, sampled: int, ends_step: bool) -> None:
        """Add the reduction of one bucket or unit; at the end of a step, update mu.

        A step is the reduction of all buckets under DDP, and of one unit under FSDP2. Under DDP all
        ranks have equal counts.

        Args:
            lost_4: what it lost, `LOST`.
            elements, sampled: see `GradientReport`.
            ends_step: whether no other bucket follows.
        """
        if self._lost.device != lost_4.device:  # FSDP2, once; parameters may be offloaded
            self.prepare(lost_4.device, world=1)
        self._lost_now += lost_4
        self._elements_of_step += elements
        self._counts["sampled"] += sampled
        if not ends_step:
            return
        saturated, _, _, nonfinite = self._lost_now.unbind()
        if self.controller is not None:
            self.controller.update(saturated, nonfinite, self._elements_of_step)
        self._lost += self._lost_now
        self._lost_now.zero_()
        self._counts["elements"] += self._elements_of_step
        self._counts["steps"] += 1
        self._elements_of_step = 0

    def report(self) -> GradientReport:
        """The counts so far. It waits for the device, but not for other ranks."""
        self._wait()
        lost = dict(zip(LOST, self._lost.tolist(), strict=True))
        mu = None if self.controller is None else float(self.controller.mu)
        return GradientReport(**self._counts, **lost, mu=mu)

    def reset(self) -> None:
        """Set the counts to zero; mu stays."""
        self._wait()
        self._counts = dict.fromkeys(_ON_HOST, 0)
        self._lost.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """mu and the counts, as plain tensors, for `torch.distributed.checkpoint` too.

        Equal on all ranks under DDP. Under FSDP2 the counts are this rank's, and there is no mu.
        """
        self._wait()
        counts = torch.tensor([self._counts[name] for name in _ON_HOST])
        mu = {} if self.controller is None else {"mu": self.controller.mu.clone()}
        return {"lost": self._lost.clone(), "counts": counts, **mu}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`; call it on every rank, with the same state.

        Ranks dequantise with their own mu and do not compare it again. If one rank alone loaded a
        state, its gradients would differ from those of the others.

        Raises:
            KeyError: an entry is missing.
        """
        if self.controller is not None:
            self.controller.mu.copy_(state["mu"])
        self._wait()
        self._lost.copy_(state["lost"])
        self._counts = dict(zip(_ON_HOST, state["counts"].tolist(), strict=True))

    def _wait(self) -> None:
        # Reductions run in streams of their own. This is not called in a step.
        if self._lost.device.type == "cuda":
            torch.cuda.synchronize(self._lost.device)
