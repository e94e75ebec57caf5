"""One training of a model of another kind: a task, a contender, a 16-bit format.

Parameters are float32, the arithmetic is autocast to bfloat16, or to float16 with
`torch.amp.GradScaler`. Its scale starts at 2^16, torch's value, and doubles every `GROWTH` steps:
torch's 2000 is longer than a run, and growth until the next overflow is part of float16 training.
A step that the scaler skips is taken again with the same batch, so that all runs take the same
batches. AdamW decays matrices by 0.1, gradients are clipped to a norm of 1, and the learning rate
is the triangle of `run.py`.

With ``overflow`` the scale is set to 2^32 before the first step and again in the middle: all
gradients are infinite until the scaler has halved it often enough. The largest gradients that are
still finite then enter the histories of delayed scales. Such a run should end as one without.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measuring.harness import Row
from benchmarks.models.bert import IGNORED
from benchmarks.quality.contenders import Contender, round_parameters
from benchmarks.quality.run import optimizer_of, schedule, set_rate
from benchmarks.quality.tasks import TASKS, Batch, Task
from float8 import Float8LinearConfig, after_step, convert_to_float8_training
from float8.config import RECIPES
from scripts.train_gpt import CLIP

PLAIN, ROUNDED = "plain", "rounded"
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
READOUTS = ("head", "readout")  # they keep high precision
FIRST_SCALE, OVERFLOWING, GROWTH = 2.0**16, 2.0**32, 50
MOST_SKIPPED = 200


@dataclass(frozen=True, kw_only=True)
class Run:
    """What decides a training, down to its bits on one machine.

    Args:
        task: a name of `TASKS`.
        contender: ``plain``; ``rounded``, the same with initial weights rounded to bf16, which
            shows what rounding alone does; or a recipe of float8.
        half: a name of `HALVES`.
        seed: of weights and batches.
        overflow: whether the scaler's scale is set too high twice; with ``fp16`` only.
        steps: of the optimizer; those that the scaler skips do not count.
        learning_rate: its peak.
        layers, width: of the model.
        batch: images or texts in a step.
        held_out: images or texts of the evaluation.
    """

    task: str
    contender: str
    half: str
    seed: int
    overflow: bool = False
    steps: int
    learning_rate: float
    layers: int = 2
    width: int = 64
    batch: int
    held_out: int


def train(run: Run, device: str = "cpu") -> Row:
    """Train and evaluate; a run whose loss or whose scales are not finite has an ``error``."""
    torch.manual_seed(run.seed)
    task = TASKS[run.task](run.layers, run.width, run.batch, run.held_out, run.seed)
    what = _contender(task.model.to(device), run.contender)
    optimizer = optimizer_of(what, run.learning_rate)
    is_fp16 = run.half == "fp16"
    first = OVERFLOWING if run.overflow else FIRST_SCALE
    scaler = torch.amp.GradScaler(
        torch.device(device).type, init_scale=first, growth_interval=GROWTH, enabled=is_fp16
    )
    losses: list[float] = []
    skipped = 0
    start = time.perf_counter()
    for step in range(run.steps):
        if run.overflow and step == run.steps // 2:
            scaler.update(OVERFLOWING)
        set_rate(optimizer, schedule(step, run.steps))
        batch = task.batch(step)
        taken = False
        while not taken:
            loss, taken = _step(what, optimizer, scaler, batch, HALVES[run.half])
            skipped += not taken
            if (error := _error(what.model, loss, step, skipped)) is not None:
                return {"error": error, "skipped": skipped}
        losses.append(loss)
    found = evaluate(what.model, task, HALVES[run.half])
    seconds = round(time.perf_counter() - start, 1)
    tail = statistics.fmean(losses[-max(1, run.steps // 10) :])
    row: Row = {**found, "train_loss": round(tail, 5), "seconds": seconds}
    return row | ({"skipped": skipped, "loss_scale": scaler.get_scale()} if is_fp16 else {})


def _step(
    what: Contender,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batch: Batch,
    dtype: torch.dtype,
) -> tuple[float, bool]:
    """The loss, and whether the step was taken."""
    loss = _loss(*_forward(what.model, batch, dtype))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(what.model.parameters(), CLIP)
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    optimizer.zero_grad()
    what.after_step()
    return float(loss.item()), scaler.get_scale() >= before


def _error(model: nn.Module, loss: float, step: int, skipped: int) -> str | None:
    if not math.isfinite(loss):
        return f"diverged: loss not finite at step {step}"
    if skipped > MOST_SKIPPED:
        return f"the scaler skipped {skipped} steps until step {step}"
    for name, buffer in model.named_buffers():  # scales and histories of delayed casts
        if not buffer.isfinite().all():
            return f"{name} is not finite at step {step}"
    return None


def _forward(model: nn.Module, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The logits of all rows in float32, and their targets."""
    device = next(model.parameters()).device
    inputs, targets = (part.to(device) for part in batch)
    with torch.autocast(device.type, dtype):
        logits = model(inputs)
    return logits.flatten(0, -2).float(), targets.flatten()


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=IGNORED)


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, dtype: torch.dtype) -> Row:
    """The mean loss of held-out targets in nats, and how many per cent are right."""
    loss, right, count = 0.0, 0, 0
    model.eval()
    for batch in task.held_out():
        logits, targets = _forward(model, batch, dtype)
        counted = int((targets != IGNORED).sum())
        loss += counted * float(_loss(logits, targets))
        right += int((logits.argmax(-1) == targets).sum())
        count += counted
    model.train()
    return {"loss": loss / count, "accuracy": 100 * right / count}


def _contender(model: nn.Module, name: str) -> Contender:
    """The model in the arithmetic of a contender; parameters start as they are."""
    if name not in RECIPES:
        if name == ROUNDED:
            round_parameters(model)
        return Contender(model)
    config = replace(Float8LinearConfig.from_recipe_name(name), pad_inner_dim=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, fqn: fqn not in READOUTS
    )
    return Contender(model, after_step=lambda: after_step(model))
