"""One training in segments, each of which continues the checkpoint of the one before.

A training of an hour is made piece by piece, so that a study that is stopped loses the steps of one
segment, its file has the curve so far, and curves of several contenders grow side by side. A
training has one checkpoint file, written again at the end of every segment with the segment's row:
a study that is killed between the two files finds the row in the checkpoint.

The model is nanoGPT's (`benchmarks/models/nanogpt.py`); text, schedule, optimizer and evaluation
are those of `run.py`. Batches follow from the step's number, and nothing else is drawn at random
after the first weights: segments end with the bits of a training in one piece.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring.harness import Row
from benchmarks.models.nanogpt import NanoGPT
from benchmarks.quality.contenders import Contender, contender
from benchmarks.quality.run import (
    Run,
    evaluate,
    optimizer_of,
    schedule,
    set_rate,
    text_of,
    train_step,
)
from benchmarks.quality.study import save
from scripts.training import corpus


@dataclass(frozen=True, kw_only=True)
class Segment(Run):
    """A part of the training that the fields of `Run` decide.

    Args:
        first: steps taken before it.
        until: steps taken after it.
    """

    first: int
    until: int

    @property
    def training(self) -> Row:
        """What decides the whole training."""
        return {key: value for key, value in asdict(self).items() if key not in ("first", "until")}

    @property
    def file(self) -> str:
        """The name of the training's checkpoint."""
        return f"{self.contender}-{self.seed}.pt"


def train(segment: Segment, folder: Path, data: Path | None = None, device: str = "cpu") -> Row:
    """Train one segment, and evaluate.

    Args:
        segment: which; its training's checkpoint is at ``segment.first``.
        folder: of checkpoints.
        data: a folder of text; None for torch's sources.
        device: to train on.

    Returns:
        ``train_loss`` of every step, ``loss`` on held-out text after the last one; ``error`` where
        a loss is not a number.

    Raises:
        ValueError: the checkpoint is another training's, or at another step.
    """
    text = text_of(data)
    path, training = folder / segment.file, {**segment.training, "text": text.digest}
    state = _checkpoint(path, training, device)
    if state["until"] == segment.until:
        row: Row = json.loads(state["row"])
        return row
    if segment.first not in (0, state["until"]):
        raise ValueError(
            f"{path} is a checkpoint after {state['until']} steps, and this segment begins after "
            f"{segment.first}: give -o another name to begin again"
        )
    torch.manual_seed(segment.seed)
    what = contender(segment.contender, NanoGPT(segment.sizes).to(device))
    optimizer = optimizer_of(what, segment.learning_rate)
    if segment.first:
        what.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    start = time.perf_counter()
    losses = _steps(segment, what, optimizer, text, device)
    loss = evaluate(what.model, segment.context, text, segment.held_out, device)
    if not math.isfinite(losses[-1] + loss):
        return {"error": f"diverged: a loss is not finite by step {segment.first + len(losses)}"}
    row = {
        "parameters": sum(p.numel() for p in what.model.parameters()),
        "text": text.digest,
        "train_loss": losses,
        "loss": loss,
        "seconds": round(time.perf_counter() - start, 1),
    }
    states = {"model": what.model.state_dict(), "optimizer": optimizer.state_dict()}
    end = {"training": training, "until": segment.until, "row": json.dumps(row)}
    save(states | end, path)
    return row


def _steps(
    segment: Segment,
    what: Contender,
    optimizer: torch.optim.Optimizer,
    text: corpus.Corpus,
    device: str,
) -> list[float]:
    """Losses of the segment's steps; the last one may not be a number."""
    losses: list[float] = []
    for step in range(segment.first, segment.until):
        set_rate(optimizer, schedule(step, segment.steps))
        batch = segment.batch_of(text, step, device)
        losses.append(round(train_step(what, optimizer, batch), 5))
        if not math.isfinite(losses[-1]):
            break
    return losses


def _checkpoint(path: Path, training: Row, device: str) -> dict[str, Any]:
    """What `train` wrote; without a file, the state before the first step."""
    if not path.exists():
        return {"until": 0}
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    for key, ours in training.items():
        theirs = state["training"].get(key)
        if theirs != ours:
            raise ValueError(
                f"{path} is of a training with {key} {theirs}, not {ours}: give -o another name, "
                "or delete that file"
            )
    return state
