"""Trains a small model and measures its held-out loss, for benchmarks of quality.

A run is decided by few things: weights and batches come from the seed, so that runs which compare
parametrisations or formats see the same text in the same order. The learning rate rises linearly
over the first tenth of the steps and falls as half a cosine to a tenth of its peak (arXiv
2302.13971, section 2.3). What counts is the loss of held-out files (`scripts/training/corpus.py`)
after the last step; a run whose loss is not a number stops at once and has none.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measuring.harness import Row
from scripts.training import corpus

Loss = Callable[[Tensor, Tensor], Tensor]  # tokens (B, T), targets (B, T) -> a scalar
Batches = Iterable[tuple[Tensor, Tensor]]

FINAL = 0.1  # of the peak learning rate
WARM_UP = 0.1  # of the steps
SIZES = {  # options of `benchmarks.quality.study.add_numbers`
    "steps": (150, "of a run"),
    "batch": (8, "windows of text in a step"),
    "context": (64, "bytes of a window"),
    "layers": (2, "transformer layers"),
    "val_batches": (32, "held-out batches that the final loss is the mean of"),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What decides a training, beside its model: the fields are options of `SIZES`."""

    seed: int
    steps: int
    batch: int
    context: int
    layers: int
    val_batches: int


@dataclass(frozen=True)
class Result:
    """The result of a run: losses of every step, the held-out loss (None: diverged), seconds."""

    train_loss: list[float]
    val_loss: float | None
    seconds: float

    def row(self) -> Row:
        """The columns of the run."""
        row: Row = {"seconds": self.seconds, "steps_taken": len(self.train_loss)}
        if self.val_loss is None:
            return {**row, "error": "diverged: the loss is not a number", "refused": False}
        return {**row, "loss": self.val_loss, "train_loss": self.train_loss}


def held_out(row: Row) -> float | None:
    """The held-out loss of a row, None if the run diverged; files before 0.13 say ``val_loss``."""
    loss: float | None = row.get("loss", row.get("val_loss"))
    return loss


def schedule(step: int, steps: int) -> float:
    """What the peak learning rate is multiplied by in a step, counted from 0."""
    warm_up = max(1, round(steps * WARM_UP))
    progress = max(0, step - warm_up) / max(1, steps - warm_up)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return min(1.0, (step + 1) / warm_up) * (FINAL + (1 - FINAL) * cosine)


def train(
    loss_of: Loss, optimizer: torch.optim.Optimizer, batches: Batches, steps: int, val: Batches
) -> Result:
    """Train for so many steps, and measure.

    Args:
        loss_of: the mean loss of a batch.
        optimizer: of the parameters behind it, at the peak learning rate.
        batches: at least ``steps`` of them.
        steps: how many to take.
        val: held-out batches of one size.

    Returns:
        The losses; none on held-out text where training or the held-out loss is not a number.
    """
    schedules = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    losses: list[float] = []
    start = time.perf_counter()
    for _, (tokens, targets) in zip(range(steps), batches, strict=False):
        loss = loss_of(tokens, targets)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return Result(losses[:-1], None, time.perf_counter() - start)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedules.step()
    seconds = time.perf_counter() - start
    held_out = mean_loss(loss_of, val)
    return Result(losses, held_out if math.isfinite(held_out) else None, seconds)


@torch.no_grad()
def mean_loss(loss_of: Loss, batches: Batches) -> float:
    """The mean over batches of one size."""
    losses = [loss_of(tokens, targets).item() for tokens, targets in batches]
    return sum(losses) / len(losses)


def load(options: argparse.Namespace) -> corpus.Corpus:
    """The text to train on; ends the program with one line where there is none, or too little."""
    try:
        text = corpus.load(options.data)
        text.check(options.context)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    return text


def train_batches(text: corpus.Corpus, run: Run, device: str) -> Batches:
    """The batches of every run with this seed: bytes and the bytes after them."""
    for step in range(run.steps):
        yield _on(device, text.batch(step, seed=run.seed, batch=run.batch, context=run.context))


def val_batches(text: corpus.Corpus, run: Run, device: str) -> Batches:
    """Windows spread over the held-out files."""
    for pair in text.val_batches(run.val_batches, batch=run.batch, context=run.context):
        yield _on(device, pair)


def _on(device: str, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].to(device), pair[1].to(device)
