"""One training of a quality study, decided by a `Run`.

The model is the GPT of `scripts/training/gpt.py`, the text torch's own Python sources. Runs of one
seed and sizes start from the same bits and see the same batches: they differ only in their
contender. Parameters are
float32, the arithmetic is autocast to bf16, and AdamW decays matrices (betas 0.9 and 0.95, decay
0.1; u-muP's AdamW and decay for unit-scaled models). Gradients are clipped to a norm of 1, but for
unit-scaled models.

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
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import float8.unit_scaling as uu
from benchmarks.measuring.harness import Row
from benchmarks.quality.contenders import UNIT_BASE, Contender, base_of, contender
from float8 import inspect_every
from float8.numerics import Alarm
from scripts.train_gpt import BETAS, CLIP, UNIT_DECAY, WEIGHT_DECAY
from scripts.training import corpus, gpt, savings

WARM_UP = 0.05  # of the steps
SHORT = 2**17  # bytes of an evaluation before the last step
AVERAGED = 20  # steps whose training losses the row keeps as one mean
WATCHED = 50  # steps from look to look
SHOWN = 20  # alarms that a row keeps
EVALUATION_BYTES = 2**12  # in one forward pass


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

    @property
    def sizes(self) -> gpt.Sizes:
        return gpt.Sizes(self.layers, self.width, self.heads, self.context)

    def new_model(self, device: str = "cpu") -> gpt.GPT:
        """The GPT before the first step."""
        torch.manual_seed(self.seed)
        return gpt.GPT(self.sizes).to(device)

    def batch_of(
        self, text: corpus.Corpus, step: int, device: str = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """Tokens and targets (B, T) of a step, counted from 0."""
        pair = text.batch(step, seed=self.seed, batch=self.batch, context=self.context)
        return pair[0].to(device), pair[1].to(device)


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


RATE, UNIT_RATE = 2e-3, 2**-2  # the best of scripts/training/options.py, at width 128


def usual_rate(contender: str, width: int) -> float:
    """The learning rate of a contender; u-muP's is that of all widths (arXiv 2407.17465)."""
    return UNIT_RATE if base_of(contender) == UNIT_BASE else RATE * 128 / width


def schedule(step: int, steps: int) -> float:
    """What the peak learning rate is multiplied by in a step, counted from 0."""
    warm_up = max(1, round(steps * WARM_UP))
    return min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up), 1.0)


def evaluation_steps(steps: int) -> list[int]:
    """Those steps, counted from 1, after which a run is evaluated: the last, its half, ..."""
    return sorted({steps >> halvings for halvings in range(5)} - {0})


def train(run: Run, data: Path | None = None, device: str = "cpu") -> Row:
    """Train new weights and evaluate; see `fit`."""
    what = contender(run.contender, run.new_model(device))
    return fit(what, run, text_of(data), device)


def text_of(data: Path | None) -> corpus.Corpus:
    """A folder's text, or torch's own Python sources."""
    return corpus.torch_sources() if data is None else corpus.load(data)


def fit(what: Contender, run: Run, text: corpus.Corpus, device: str = "cpu") -> Row:
    """Train those parameters of a model that require gradients, and evaluate.

    A run whose loss is not a number stops there, and its row says so.
    """
    parameters = sum(p.numel() for p in what.model.parameters() if p.requires_grad)
    row: Row = {"parameters": parameters, "text": text.digest, "train_loss": [], "curve": []}
    losses: list[float] = []
    monitor = _monitor(what, row)
    start = time.perf_counter()
    for step, loss in enumerate(losses_of_steps(run, what, text, device, monitor), start=1):
        if not math.isfinite(loss):
            return _diverged(row, step)
        losses.append(loss)
        if len(losses) == AVERAGED or step == run.steps:
            row["train_loss"].append(round(statistics.fmean(losses), 5))
            losses.clear()
        if step in evaluation_steps(run.steps):
            held_out = run.held_out if step == run.steps else min(SHORT, run.held_out)
            held_out_loss = evaluate(what.model, run.context, text, held_out, device)
            if not math.isfinite(held_out_loss):
                return _diverged(row, step)
            row["curve"].append([step, held_out_loss])
    if what.in_bf16 is not None:
        with what.in_bf16():
            in_bf16 = evaluate(what.model, run.context, text, run.held_out, device)
        if not math.isfinite(in_bf16):
            return _diverged(row, run.steps)
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


def _diverged(row: Row, step: int) -> Row:
    return {**row, "train_loss": [], "error": f"diverged: loss not finite at step {step}"}


def losses_of_steps(
    run: Run,
    what: Contender,
    text: corpus.Corpus,
    device: str = "cpu",
    around: AbstractContextManager[object] | None = None,
) -> Iterator[float]:
    """Train step by step, each inside the context `around`; the training loss of each."""
    around = around or nullcontext()
    optimizer = optimizer_of(what, run.learning_rate)
    for step in range(run.steps):
        set_rate(optimizer, schedule(step, run.steps))
        with around:
            loss = train_step(what, optimizer, run.batch_of(text, step, device))
        yield loss


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the peak learning rates of an optimizer of `optimizer_of` by a factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def train_step(
    what: Contender, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> float:
    """One step of the optimizer: the loss before it."""
    loss = backward(what.model, batch)
    update(what, optimizer)
    return loss


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """The loss of a batch; its gradients are added to those of the parameters."""
    with autocast(batch[0].device):
        loss: Tensor = model(*batch)
    loss.backward()
    return float(loss.item())


def update(what: Contender, optimizer: torch.optim.Optimizer) -> None:
    """What follows backward: the optimizer's step, and what the contender calls after it."""
    if not what.unit_scaled:
        nn.utils.clip_grad_norm_(what.model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    what.after_step()


@torch.no_grad()
def evaluate(
    model: nn.Module, context: int, text: corpus.Corpus, held_out: int, device: str = "cpu"
) -> float:
    """The mean loss of so many bytes of held-out text, in windows of `context`, in nats."""
    was_training = model.training
    model.eval()
    with autocast(device):
        losses = [model(*pair).item() for pair in _held_out(context, text, held_out, device)]
    model.train(was_training)
    return statistics.fmean(losses)


def _held_out(
    context: int, text: corpus.Corpus, held_out: int, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    batch = max(1, EVALUATION_BYTES // context)
    count = max(1, held_out // (batch * context))
    for tokens, targets in text.val_batches(count, batch=batch, context=context):
        yield tokens.to(device), targets.to(device)


def autocast(device: str | torch.device) -> AbstractContextManager[None]:
    """To bf16, on a device."""
    context: AbstractContextManager[None] = torch.autocast(
        torch.device(device).type, torch.bfloat16
    )
    return context


def optimizer_of(what: Contender, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW that decays matrices; its groups keep the peak learning rate as ``initial_lr``."""
    parameters = [p for p in what.model.parameters() if p.requires_grad]
    decay = UNIT_DECAY if what.unit_scaled else WEIGHT_DECAY
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if what.unit_scaled:
        optimizer = uu.optim.AdamW(groups, learning_rate, BETAS, fused=True)
    else:
        optimizer = savings.adamw(what.optimizer, groups, learning_rate, BETAS)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer
