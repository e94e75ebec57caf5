"""A trained GPT with an outlier of SwiGLU, converted and trained on: one process of the study.

For each size of the outlier the base (`outlier_base.py`) is converted and

- evaluated as it is: ``converted``, the held-out loss right after the conversion;
- trained on, for those sizes that the run says: ``loss`` at the end, ``train_loss`` of each step,
  and ``casts``, what `float8.inspect` saw of the first block's ``down`` in the steps that it
  watched.

The size 2^k is that of the planted channel's largest value, relative to the largest of the other
channels of ``down``'s input. The learning rate falls linearly to zero, as at the end of a training.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

from benchmarks.measuring.harness import Row
from benchmarks.quality import outliers, run
from benchmarks.quality.contenders import Contender
from benchmarks.quality.outlier_base import Run, base_of, batch_of
from benchmarks.quality.outlier_contenders import in_arithmetic
from float8 import Float8Linear, inspect
from float8.numerics import CastStatistics
from scripts.training import corpus, gpt


def train(what: Run, bases: Path, data: Path | None = None, device: str = "cpu") -> Row:
    """Convert at every size, and train on from some.

    Args:
        what: the run.
        bases: a folder, in which a base that is there is read, and another is written.
        data: a folder of text, None for torch's own sources.
        device: to train on.

    Returns:
        ``sizes``: a row per exponent; ``loss``: held out, at the last of them.
    """
    start = time.perf_counter()
    text = run.text_of(data)
    weights, channel = base_of(what, text, bases, device)
    sizes: list[Row] = []
    for exponent in what.exponents:
        model = gpt.GPT(what.sizes)
        model.load_state_dict(weights)
        outliers.grow(model, channel, exponent)
        outliers.hold(model, channel, column=True)
        contender = in_arithmetic(what.contender, model.to(device))
        converted = run.evaluate(model, what.context, text, what.held_out, device)
        sizes.append({"exponent": exponent, "converted": converted})
        if exponent in what.trained:
            sizes[-1] |= _trained_on(contender, what, text, device)
            if "error" not in sizes[-1]:
                sizes[-1]["loss"] = run.evaluate(model, what.context, text, what.held_out, device)
    last = sizes[-1].get("loss", sizes[-1]["converted"])
    seconds = round(time.perf_counter() - start, 1)
    return {"text": text.digest, "sizes": sizes, "loss": last, "seconds": seconds}


def _trained_on(contender: Contender, what: Run, text: corpus.Corpus, device: str) -> Row:
    """Train from the conversion on; a loss that is not a number ends it."""
    optimizer = run.optimizer_of(contender, what.learning_rate)
    block = contender.model.get_submodule("blocks.0.feed_forward")
    can_watch = isinstance(block.get_submodule("down"), Float8Linear)
    row: Row = {"train_loss": []}
    watched: list[CastStatistics] = []
    for step in range(what.steps):
        run.set_rate(optimizer, run.schedule(step, what.steps))
        batch = batch_of(what, text, what.steps_of_base + step)
        with inspect(block) if can_watch and step % what.every == 0 else nullcontext() as report:
            loss = run.train_step(contender, optimizer, batch, device)
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
