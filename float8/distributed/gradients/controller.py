"""The factor mu that keeps the mean of gradients inside float8's range (FP8-LM's auto-scaling).

FP8-LM (arXiv 2310.18313, section 2.1) watches the share of gradient values that reach the largest
float8 value. More than 0.001 % of them, and mu is halved for the next step; otherwise mu grows
exponentially, by a factor of two in 1000 steps. So it finds the largest mu that (almost) nothing
saturates under, and thereby the least underflow, and comes back slowly from a bad step.

mu is a tensor that lives beside the gradients and is updated by a few kernels: no step waits for
it. Its input, the counts, is equal on all ranks, so mu is too, without another collective.

Two things the paper leaves open. *A ceiling*: N independent gradients can shrink their mean by
sqrt(N), so mu beyond that could only clip; it is the default here. *A step whose gradients are not
finite* says nothing about saturation: mu stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


class ScalingController:
    """mu, halved on saturation and growing slowly otherwise.

    Args:
        initial: mu at the start; at 1 and below nothing saturates, whatever the gradients.
        threshold: the share of saturated values above which mu is halved.
        doubling_steps: how many steps without saturation double mu.
        ceiling: mu never exceeds it; None is the square root of the number of ranks.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        initial: float = 1.0,
        threshold: float = 1e-5,
        doubling_steps: int = 1000,
        ceiling: float | None = None,
    ) -> None:
        bounded = math.isfinite(initial) and initial > 0 and (ceiling is None or ceiling >= initial)
        if not bounded:
            raise ValueError(
                f"ScalingController: needs 0 < initial <= ceiling, got {initial=}, {ceiling=}"
            )
        if not 0 <= threshold < 1:
            raise ValueError(f"ScalingController: threshold is a share in [0, 1), got {threshold}")
        if doubling_steps < 1:
            raise ValueError(f"ScalingController: doubling_steps={doubling_steps} is below 1")
        self.threshold = threshold
        self.growth = 2.0 ** (1.0 / doubling_steps)
        self.ceiling = ceiling
        self.mu = torch.full((), initial, dtype=torch.float32)

    def __repr__(self) -> str:  # exact: ranks compare it
        return (
            f"ScalingController(mu={float(self.mu):.9g}, threshold={self.threshold!r}, "
            f"growth={self.growth!r}, ceiling={self.ceiling})"
        )

    def prepare(self, device: torch.device, world: int) -> None:
        """Move mu to where the gradients are, and settle the default ceiling."""
        self.mu = self.mu.to(device)
        if self.ceiling is None:
            self.ceiling = max(math.sqrt(world), float(self.mu))

    def update(self, saturated: Tensor, nonfinite: Tensor, elements: int) -> None:
        """Account for one step; in place, without asking the device.

        Args:
            saturated: integer (): saturated values of the step, over all ranks.
            nonfinite: integer (): positive if the step's gradients were not finite.
            elements: how many values the step reduced.
        """
        share = saturated.to(torch.float32) / max(1, elements)
        grown = (self.mu * self.growth).clamp(max=self.ceiling)
        following = torch.where(share > self.threshold, self.mu * 0.5, grown)
        self.mu.copy_(torch.where(nonfinite > 0, self.mu, following))

    def state_dict(self) -> dict[str, Tensor]:
        """mu, as a tensor of its own."""
        return {"mu": self.mu.detach().clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take mu over from `state_dict`, wherever it was saved.

        Raises:
            ValueError: mu is missing, or no positive finite number.
        """
        mu = state.get("mu")
        if mu is None or not (torch.isfinite(mu).all() and (mu > 0).all()):
            raise ValueError(f"ScalingController: a state needs a positive finite mu, got {mu}")
        self.mu.copy_(mu)
