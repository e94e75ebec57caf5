"""One training with a sudden change, watched around it.

Every watched step is computed twice with the same weights and batch: as the contender does, while
`float8.inspect` looks at its casts, and in bf16 (`float8.high_precision`). Both have a loss, and a
gradient of the blocks' matrices:

    loss error      = 100 (loss / loss in bf16 - 1)                             in per cent
    gradient error  = 100 |g - g in bf16| / |g in bf16|                         in per cent

Both are of one step. The noise of training, by which two runs end apart, enters them by the weights
alone. The training goes on with the contender's gradient.
"""

from __future__ import annotations

import math
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.harness import Row
from benchmarks.quality import shifts
from benchmarks.quality.contenders import Contender, contender
from benchmarks.quality.gpt_run import GPTRun
from benchmarks.quality.run import backward, evaluate, optimizer_of, set_rate, text_of, update
from float8 import inspect
from float8.numerics.problems import problems_of
from float8.numerics.statistics import OPERANDS
from scripts.training import corpus

WATCHED_BEFORE = 4  # steps


@dataclass(frozen=True, kw_only=True)
class ShiftedRun(GPTRun):
    """What decides a training.

    Args:
        contender: a name of `contenders.py`.
        shift: a change of `shifts.py`.
        before: steps until the change; 0 for ``start``.
        after: steps from the change on; all are watched, but for ``none``, which is evaluated.
        learning_rate: its peak.
        held_out: bytes of the evaluation of ``none``.
    """

    contender: str
    shift: str
    before: int
    after: int
    learning_rate: float = 2e-3
    held_out: int = 2**16

    def watches(self, step: int) -> bool:
        return self.shift != shifts.NONE and step >= self.before - WATCHED_BEFORE


def train(run: ShiftedRun, data: Path | None = None, device: str = "cpu") -> Row:
    """Train; the row has the steps around the change, counted from it, or a held-out loss.

    A run whose loss is not a number stops there, and its row says so.
    """
    text = text_of(data)
    what = contender(run.contender, run.new_model(device))
    factor = shifts.factor_in(run.shift, what.model)
    optimizer = optimizer_of(what, run.learning_rate)
    row: Row = {"text": text.digest, "steps": []}
    start, steps = time.perf_counter(), run.before + run.after
    for step in range(steps):
        changed = step >= run.before
        if factor is not None and changed:
            factor.value = shifts.GROWTH
        set_rate(optimizer, shifts.rate(run.shift, step, run.before, steps))
        batch = shifts.text_of(run.shift, changed, run.batch_of(text, step, device))
        found = _step(what, optimizer, batch, run.watches(step))
        if not all(math.isfinite(v) for v in found.values() if isinstance(v, float)):
            return {**row, "error": f"diverged: not finite at step {step - run.before}"}
        if run.watches(step):
            row["steps"].append({"step": step - run.before, **found})
    seconds = round(time.perf_counter() - start, 1)
    return {**row, **_ending(run, what, text, row, device), "seconds": seconds}


def _ending(run: ShiftedRun, what: Contender, text: corpus.Corpus, row: Row, device: str) -> Row:
    """The loss of a run: held-out without a change, else the mean of the steps from it on."""
    if run.shift != shifts.NONE:
        return {"loss": statistics.fmean(s["loss"] for s in row["steps"] if s["step"] >= 0)}
    losses = {"loss": evaluate(what.model, run.context, text, run.held_out, device)}
    if what.in_bf16 is not None:
        with what.in_bf16():
            in_bf16 = evaluate(what.model, run.context, text, run.held_out, device)
        losses["bf16_loss"] = in_bf16
    return losses


def _step(
    what: Contender,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    watched: bool,
) -> Row:
    found: Row = {}
    watched = watched and what.in_bf16 is not None
    with inspect(what.model) if watched else nullcontext() as report:
        found["loss"] = backward(what.model, batch)
    if report is not None:
        found |= _casts(report.casts) | _errors(what, batch, found["loss"])
    update(what, optimizer)
    return found


def _casts(casts: Any) -> Row:
    """The worst cast of each operand, and the problems that `inspect` names."""
    saturated = {
        operand: max((c.saturated or 0.0 for c in casts if c.operand == operand), default=0.0)
        for operand in OPERANDS
    }
    staleness = [c.staleness for c in casts if c.staleness is not None]
    problems = {problem.kind.one: len(problem.casts) for problem in problems_of(casts)}
    found: Row = {"saturated": saturated, "problems": problems}
    return found | ({"stale": [min(staleness), max(staleness)]} if staleness else {})


def _errors(what: Contender, batch: tuple[Tensor, Tensor], loss: float) -> Row:
    """Against bf16 with the same weights; the model keeps its gradients."""
    assert what.in_bf16 is not None
    named = list(what.model.named_parameters())
    own = [parameter.grad for _, parameter in named]
    for _, parameter in named:
        parameter.grad = None
    with what.in_bf16():
        in_bf16 = backward(what.model, batch)
    difference = power = 0.0
    for (name, parameter), mine in zip(named, own, strict=True):
        of_bf16, parameter.grad = parameter.grad, mine
        if name.startswith("blocks") and parameter.ndim >= 2:
            assert of_bf16 is not None
            assert mine is not None
            difference += (mine - of_bf16).square().sum().item()
            power += of_bf16.square().sum().item()
    error = math.sqrt(difference / power) if power else 0.0
    return {"loss_error": 100 * (loss / in_bf16 - 1), "gradient_error": 100 * error}
