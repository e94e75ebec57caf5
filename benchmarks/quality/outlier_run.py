"""A trained GPT with an outlier of SwiGLU, converted and trained on: one process of the study.

The base, from which all contenders of a seed start, is a GPT trained in bf16. A channel is planted
(`outliers.py`), and training goes on until ``down`` uses it. A base takes longer than what a
contender does with it: it is kept in a folder, and a process that finds none there makes it.
Processes that make one at the same time write the same.

For each size of the outlier the base is converted and

- evaluated as it is: ``converted``, the held-out loss right after the conversion;
- trained on, for those sizes that the run says: ``loss`` at the end, ``train_loss`` of each step,
  and ``casts``, what `float8.inspect` saw of the first block's ``down`` in the steps that it
  watched.

The size 2^k is that of the planted channel's largest value, relative to the largest of the other
channels of ``down``'s input. After the conversion the learning rate rises over the first twentieth
of the steps and falls linearly to zero, as at the end of a training.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measuring.harness import Row
from benchmarks.quality import outliers
from benchmarks.quality.contenders import Contender, contender
from benchmarks.quality.run import (
    GPTRun,
    evaluate,
    optimizer_of,
    schedule,
    set_rate,
    text_of,
    train_step,
)
from benchmarks.quality.study import save
from float8 import Float8Linear, inspect
from float8.numerics import CastStatistics
from scripts.training import corpus, gpt

RISE = 20  # steps in which the learning rate of a base rises


@dataclass(frozen=True, kw_only=True)
class OutlierRun(GPTRun):
    """What decides the row of one contender, seed and kind of outlier.

    Args:
        contender: a name of `contenders.py`.
        byte: that the outlier answers to.
        exponents: of the sizes of the outlier to convert at.
        trained: those of them to train on from.
        steps: of the training after the conversion.
        base_steps: of the training before the channel is planted.
        settling_steps: of the training between planting and conversion.
        every: how many steps lie between two inspections.
        learning_rate: the peak, of the base's training and of that after the conversion.
        held_out: bytes of an evaluation.
    """

    contender: str
    byte: int
    exponents: tuple[int, ...]
    trained: tuple[int, ...]
    steps: int
    base_steps: int
    settling_steps: int
    every: int
    learning_rate: float = 1e-3
    held_out: int = 2**15

    @property
    def steps_of_base(self) -> int:
        return self.base_steps + self.settling_steps


def train(run: OutlierRun, bases: Path, data: Path | None = None, device: str = "cpu") -> Row:
    """Convert at every size, and train on from some.

    Args:
        run: which.
        bases: a folder, in which a base that is there is read, and another is written.
        data: a folder of text, None for torch's own sources.
        device: to train on.

    Returns:
        ``sizes``: a row per exponent; ``loss``: held out, at the last of them.
    """
    start = time.perf_counter()
    text = text_of(data)
    weights, channel = base_of(run, text, bases, device)
    sizes: list[Row] = []
    for exponent in run.exponents:
        model = gpt.GPT(run.sizes)
        model.load_state_dict(weights)
        outliers.grow(model, channel, exponent)
        outliers.hold(model, channel, column=True)
        what = contender(run.contender, model.to(device))
        converted = evaluate(model, run.context, text, run.held_out, device)
        sizes.append({"exponent": exponent, "converted": converted})
        if exponent in run.trained:
            sizes[-1] |= _trained_on(what, run, text, device)
            if "error" not in sizes[-1]:
                sizes[-1]["loss"] = evaluate(model, run.context, text, run.held_out, device)
    last = sizes[-1].get("loss", sizes[-1]["converted"])
    seconds = round(time.perf_counter() - start, 1)
    return {"text": text.digest, "sizes": sizes, "loss": last, "seconds": seconds}


def base_of(
    run: OutlierRun, text: corpus.Corpus, bases: Path, device: str
) -> tuple[dict[str, Tensor], int]:
    """The weights of the trained model with a planted channel, and the channel.

    Args:
        run: which; its contender and exponents do not count.
        text: to train on.
        bases: a folder, in which a base that is there is read, and another is written.
        device: to train on.
    """
    path = bases / f"{run.seed}_{run.byte}.pt"
    if not path.exists():
        model = run.new_model(device)
        base = Contender(model)
        _train(base, run, text, device, range(run.base_steps))
        tokens = outliers.windows(text, run.byte, seed=run.seed, context=run.context)
        channel = outliers.plant(model.cpu(), tokens, run.byte)
        outliers.hold(model.to(device), channel, column=False)
        _train(base, run, text, device, range(run.base_steps, run.steps_of_base))
        save((model.cpu().state_dict(), channel), path)
    weights, channel = torch.load(path, weights_only=True)
    return weights, channel


def _train(
    base: Contender, run: OutlierRun, text: corpus.Corpus, device: str, steps: range
) -> None:
    """Train at one learning rate, after a rise at the beginning."""
    optimizer = optimizer_of(base, run.learning_rate)
    for count, step in enumerate(steps, start=1):
        set_rate(optimizer, min(1.0, count / RISE))
        train_step(base, optimizer, run.batch_of(text, step, device))


def _trained_on(what: Contender, run: OutlierRun, text: corpus.Corpus, device: str) -> Row:
    """Train from the conversion on; a loss that is not a number ends it."""
    optimizer = optimizer_of(what, run.learning_rate)
    block = what.model.get_submodule("blocks.0.feed_forward")
    can_watch = isinstance(block.get_submodule("down"), Float8Linear)
    row: Row = {"train_loss": []}
    watched: list[CastStatistics] = []
    for step in range(run.steps):
        set_rate(optimizer, schedule(step, run.steps))
        batch = run.batch_of(text, run.steps_of_base + step, device)
        with inspect(block) if can_watch and step % run.every == 0 else nullcontext() as report:
            loss = train_step(what, optimizer, batch)
        if report is not None:
            watched += (cast for cast in report.casts if cast.layer == "down")
        if not math.isfinite(loss):
            return {**row, "error": f"diverged: loss not finite at step {step}"}
        row["train_loss"].append(round(loss, 5))
    return {**row, "casts": _summaries(watched)}


def _summaries(watched: Iterable[CastStatistics]) -> list[Row]:
    """What the inspections found about each cast: means, and the worst of the saturation."""
    casts: dict[tuple[str, str], list[CastStatistics]] = {}
    for cast in watched:
        casts.setdefault((cast.operand, cast.gemm), []).append(cast)
    return [
        {
            "operand": operand,
            "gemm": gemm,
            "inspected": len(found),
            "sqnr": statistics.fmean(cast.sqnr or 0.0 for cast in found),
            "flushed": statistics.fmean(cast.flushed or 0.0 for cast in found),
            "saturated": max(cast.saturated or 0.0 for cast in found),
            "saturates": sum(bool(cast.saturated) for cast in found),
            "staleness": max(cast.staleness or 0.0 for cast in found),
        }
        for (operand, gemm), found in casts.items()
    ]
