"""The training loop of the studies, its optimizer and its evaluation.

The models are those of `models/transformer.py`. Runs of one seed and sizes start from the same
bits and see the same batches: they differ only in their contender. Parameters are float32, the
arithmetic is autocast to bf16, and AdamW decays matrices (betas 0.9 and 0.95, decay 0.1; u-muP's
AdamW and decay for unit-scaled models). Gradients are clipped to a norm of 1, but for unit-scaled
models.

The learning rate rises linearly over the first twentieth of the steps and falls linearly to zero
("Straight to zero", arXiv 2502.15938): noise of the last steps averages out, so that runs which
differ by rounding alone end close together.

Evaluation is the mean loss in nats of windows spread evenly over the held-out files, as the
contender computes it. At the end it is repeated with the same weights in bf16 (``bf16_loss``), to
tell what training lost from what evaluation in float8 loses.

Models in this library's float8 train under `float8.inspect_every`, which changes no bit: the row
has the ``alarms`` that started, and ``seconds`` includes the looks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import float8.unit_scaling as uu
from benchmarks.measuring.harness import Row
from benchmarks.models import text as texts
from benchmarks.models.text import Pair, Text
from benchmarks.models.transformer import GPT, Sizes
from benchmarks.quality.contenders import UNIT_BASE, Contender, base_of, contender
from float8 import inspect_every, optim
from float8.numerics import Alarm

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0  # Llama's (arXiv:2302.13971)
UNIT_DECAY = 2**-13  # per step, whatever the learning rate (u-muP, arXiv:2407.17465)
RATE, UNIT_RATE = 2e-3, 2**-2  # the best at width 128
WARM_UP = 0.05  # of the steps
AVERAGED = 20  # steps whose training losses the row keeps as one mean
SHORT = 2**17  # bytes of an evaluation before the last step
WATCHED = 50  # steps from look to look
SHOWN = 20  # alarms that a row keeps
EVALUATION_BYTES = 2**12  # in one forward pass

Loss = Callable[[Tensor, Tensor], Tensor]  # tokens (B, T), targets (B, T) -> a scalar


@dataclass(frozen=True, kw_only=True)
class GPTRun:
    """What all runs of the GPT say of themselves; each study adds its own fields.

    Args:
        seed: of weights and batches.
        layers, width, heads, context: of the model.
        batch: windows of text in a step.
    """

    seed: int
    layers: int = 2
    width: int = 128
    heads: int = 2
    context: int = 64
    batch: int = 16

    def new_model(self, device: str = "cpu") -> GPT:
        """The GPT before the first step."""
        torch.manual_seed(self.seed)
        return GPT(Sizes(self.layers, self.width, self.heads, self.context)).to(device)

    def batches(self, text: Text, steps: range, device: str = "cpu") -> Iterator[Pair]:
        """Tokens and targets (B, T) of steps, which are counted from 0."""
        for step in steps:
            pair = text.batch(step, seed=self.seed, batch=self.batch, context=self.context)
            yield pair[0].to(device), pair[1].to(device)


@dataclass(frozen=True, kw_only=True)
class Run(GPTRun):
    """What decides a training, down to its bits on one machine.

    Args:
        contender: a name of `contenders.py`.
        steps: of the optimizer.
        learning_rate: its peak.
        held_out: bytes of the last evaluation.
    """

    contender: str
    steps: int
    learning_rate: float
    held_out: int = 2**20


def usual_rate(contender: str, width: int) -> float:
    """The learning rate of a contender; u-muP's is that of all widths (arXiv 2407.17465)."""
    return UNIT_RATE if base_of(contender) == UNIT_BASE else RATE * 128 / width


def straight_to_zero(steps: int) -> Iterator[float]:
    """What the peak learning rate is multiplied by in each step."""
    warm_up = max(1, round(steps * WARM_UP))
    for step in range(steps):
        yield min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up), 1.0)


def steps_of(
    loss_of: Loss,
    optimizer: torch.optim.Optimizer,
    factors: Iterable[float],
    batches: Iterable[Pair],
    clipped: Sequence[Tensor] = (),
    after_step: Callable[[], object] = lambda: None,
    around: AbstractContextManager[object] | None = None,
) -> Iterator[Tensor]:
    """Train; the loss of each step, on the device: nothing waits for it.

    Args:
        loss_of: the mean loss of a batch.
        optimizer: at the peak learning rates.
        factors: what these are multiplied by in each step.
        batches: of the steps.
        clipped: parameters whose gradients are clipped together.
        after_step: to call after the optimizer's step.
        around: the context of each step.
    """
    peaks = [group["lr"] for group in optimizer.param_groups]
    for factor, batch in zip(factors, batches, strict=False):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        with around or nullcontext():
            loss = loss_of(*batch)
            loss.backward()
            if clipped:
                nn.utils.clip_grad_norm_(clipped, CLIP)
            optimizer.step()
            optimizer.zero_grad()
            after_step()
        yield loss.detach()


def steps_of_contender(
    what: Contender, learning_rate: float, factors: Iterable[float], batches: Iterable[Pair],
    around: AbstractContextManager[object] | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """`steps_of` with a contender's optimizer."""
    optimizer = optimizer_of(what, learning_rate)
    loss_of, clipped = in_autocast(what.model), what.clipped
    return steps_of(loss_of, optimizer, factors, batches, clipped, what.after_step, around)


def train(run: Run, data: Path | None, device: str) -> Row:
    """Train new weights; evaluate after the last step, its half, its quarter, ...

    A run whose loss is not a number stops there, and its row says so.

    Args:
        run: which.
        data: a folder of text, None for torch's Python sources.
        device: to train on.
    """
    text = texts.load(data)
    what = contender(run.contender, run.new_model(device))
    parameters = sum(p.numel() for p in what.model.parameters())
    row: Row = {"parameters": parameters, "text": text.digest, "train_loss": [], "curve": []}
    evaluated = {run.steps >> halvings for halvings in range(5)}
    losses: list[float] = []
    batches = run.batches(text, range(run.steps), device)
    start = time.perf_counter()
    made = steps_of_contender(
        what, run.learning_rate, straight_to_zero(run.steps), batches, _monitor(what, row)
    )
    for step, loss in enumerate(map(float, made), start=1):
        losses.append(loss)
        if step in evaluated:
            held_out = run.held_out if step == run.steps else min(SHORT, run.held_out)
            row["curve"].append([step, evaluate(what.model, run.context, text, held_out, device)])
        if not math.isfinite(loss + sum(row["curve"][-1:], [0, 0.0])[-1]):
            return {**row, "error": f"diverged: loss not finite at step {step}"}
    row["train_loss"] = [
        round(statistics.fmean(losses[i : i + AVERAGED]), 5)
        for i in range(0, len(losses), AVERAGED)
    ]
    if what.in_bf16 is not None:
        with what.in_bf16():
            in_bf16 = evaluate(what.model, run.context, text, run.held_out, device)
        if not math.isfinite(in_bf16):
            return {**row, "error": "diverged: the loss in bf16 is not finite"}
        row["bf16_loss"] = in_bf16
    row["loss"] = row["curve"][-1][1]
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def _monitor(what: Contender, row: Row) -> AbstractContextManager[object]:
    """What each step is to run under: alarms that start are added to the row."""
    if what.in_bf16 is None:
        return nullcontext()  # no layers that inspect knows
    alarms: list[Row] = row.setdefault("alarms", [])

    def keep(alarm: Alarm) -> None:
        if len(alarms) < SHOWN:
            alarms.append(alarm_line(alarm))

    return inspect_every(what.model, WATCHED, on_alarm=keep)


def alarm_line(alarm: Alarm) -> Row:
    """An alarm as a part of a row: when it started, since when it was wrong, and what it says."""
    return {"step": alarm.started, "first": alarm.first, "text": str(alarm)}


def in_autocast(model: nn.Module) -> Loss:
    """The model's loss, with its arithmetic in bf16."""

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss: Tensor = model(tokens, targets)
            return loss

    return loss_of


@torch.no_grad()
def evaluate(
    model: nn.Module, context: int, text: Text, held_out: int, device: str = "cpu"
) -> float:
    """The mean loss of so many bytes of held-out text, in windows of `context`, in nats."""
    batch = max(1, EVALUATION_BYTES // context)
    count = max(1, held_out // (batch * context))
    was_training, loss_of = model.training, in_autocast(model.eval())
    pairs = text.held_out_batches(count, batch=batch, context=context)
    losses = [loss_of(tokens.to(device), targets.to(device)).item() for tokens, targets in pairs]
    model.train(was_training)
    return statistics.fmean(losses)


def optimizer_of(what: Contender, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW that decays matrices."""
    parameters = list(what.model.parameters())
    groups = [
        {
            "params": [p for p in parameters if p.ndim >= 2],
            "weight_decay": UNIT_DECAY if what.unit_scaled else WEIGHT_DECAY,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if what.unit_scaled:
        return uu.optim.AdamW(groups, learning_rate, BETAS, fused=True)
    if what.float8_states:
        return optim.AdamW(groups, learning_rate, betas=BETAS)
    return torch.optim.AdamW(groups, learning_rate, betas=BETAS, fused=True)
