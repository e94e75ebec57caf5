"""Does a unit-scaled BERT train in float16 and float8 as it does in float32?

The headline of unit scaling (arXiv 2303.11257, section 5): cast to a narrow format, change
nothing else, no loss scaling, no scales, and reach the loss of full precision. Here a small
encoder is trained on masked bytes (arXiv 1810.04805, section 3.1: 15 % of them are chosen; 80 %
of these are replaced by [MASK], 10 % by a random byte, 10 % stay) from the same weights and
batches in each format:

    fp32    all
    fp16    `torch.autocast` to float16, without loss scaling
    fp8     recipe `unit`, that is `.to(float8)` without any scale: E4M3, gradients in E5M2; norms,
            the loss and the readout's product stay float32

    loss    of hidden bytes in held-out files, after the last step
    gap     100 (loss / loss of the same model and seed in fp32 - 1), the mean over seeds with its
            95 % interval (`quality/intervals.py`)

The target is a gap whose interval ends at 1 % at most, for the unit-scaled model; of one seed
there is no interval, and the gap alone counts. The base model in the same formats shows the
effect of the casts on a model that is not unit-scaled. Both have equal shapes, see the same text
with the same bytes hidden, and train with the learning rate that is best for them in fp32; the
format changes nothing else.

    python benchmarks/bench_bert.py --jobs 2 -o bert.json
    python benchmarks/bench_bert.py --quick
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import report
from benchmarks.measuring.harness import Row
from benchmarks.models.text import Pair
from benchmarks.models.transformer import GPT, UnitGPT
from benchmarks.quality.contenders import convert
from benchmarks.quality.intervals import difference, grouped
from benchmarks.quality.study import Study
from benchmarks.quality.training import SMALL, SmallRun, plain_adamw
from float8.config import RECIPES

COLUMNS = report.columns(
    "layer mode lr seeds loss gap base_gap diverged",
    layer="model", mode="format", gap="gap to its fp32", base_gap="gap to base fp32",
)  # fmt: skip
MAX_GAP = 1.0  # per cent
# The best powers of two in fp32 at the default sizes, seed 0, of 2**-11 to 2**-8 and 2**-1 to 2**1.
LEARNING_RATES = {"base": 2.0**-9, "unit": 1.0}
MODELS = {"base": GPT, "unit": UnitGPT}
FORMATS = ("fp32", "fp16", "fp8")
BYTES = MASK = 256  # MASK is the token that stands for a hidden byte
VOCABULARY = BYTES + 16  # with it, rounded up to what tensor cores take
CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1
IGNORED = -100  # a target that does not count: torch's default


@dataclass(frozen=True, kw_only=True)
class Run(SmallRun):
    """What decides a training."""

    model: str
    lr: float


class _HalfProducts(TorchDispatchMode):
    """GEMMs of float16 in float32, rounded once: the same sums, on CPUs that are slow in
    float16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            return func(*(x.float() for x in args)).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def train(run: Run, data: Path | None, device: str) -> Row:
    """Train one model in one format."""
    torch.manual_seed(run.seed)
    model: Any = MODELS[run.model](run.sizes(vocabulary=VOCABULARY, is_causal=False)).to(device)
    if run.format == "fp8":
        convert(model, RECIPES["unit"])
    half = run.format == "fp16"

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.float16, enabled=half):
            loss: Tensor = model(tokens, targets)
            return loss

    slow = half and torch.device(device).type == "cpu"
    with _HalfProducts() if slow else nullcontext():
        hidden = partial(masked, seed=run.seed)
        row = run.train(loss_of, plain_adamw(model, run.lr), data, device, hidden)
    return {"layer": run.model, "mode": run.format, "lr": run.lr, **row}


def masked(batches: Iterable[Pair], seed: int) -> Iterator[Pair]:
    """Batches of bytes with some hidden, and the hidden bytes; the same ones for every run."""
    generator = torch.Generator().manual_seed(seed)
    for bytes_BT, _ in batches:
        chosen_BT = torch.rand(bytes_BT.shape, generator=generator) < CHOSEN
        lot_BT = torch.rand(bytes_BT.shape, generator=generator)
        other_BT = torch.randint(BYTES, bytes_BT.shape, generator=generator)
        shown_BT = torch.where(lot_BT < MASKED + RANDOM, other_BT, bytes_BT)
        shown_BT = shown_BT.masked_fill(lot_BT < MASKED, MASK)
        tokens_BT = torch.where(chosen_BT, shown_BT, bytes_BT)
        yield tokens_BT, bytes_BT.masked_fill(~chosen_BT, IGNORED)


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line per model and format: its mean loss, and the paired gaps to fp32."""
    groups = grouped(rows, lambda row: (row["layer"], row["mode"]))
    found: list[Row] = []
    for (model, fmt), own in groups.items():
        losses = [row["loss"] for row in own if "loss" in row]
        line: Row = {"layer": model, "mode": fmt, "lr": own[0]["lr"], "seeds": len(losses)}
        line["diverged"] = len(own) - len(losses)
        if losses:
            line["loss"] = statistics.fmean(losses)
        for key, base in (("gap", model), ("base_gap", "base")):
            if (model, fmt) != (base, "fp32"):
                line |= difference(own, groups.get((base, "fp32"), [])).columns(key)
        found.append(line)
    return found


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per model and format, and which formats of the unit-scaled model end near fp32."""
    groups = grouped(rows, lambda row: (row["layer"], row["mode"]))
    targets = [
        {"layer": "unit", "mode": fmt, **target}
        for (model, fmt), own in groups.items()
        if model == "unit" and fmt != "fp32"
        for target in difference(own, groups.get((model, "fp32"), [])).ends_below(MAX_GAP, "fp32")
    ]
    return lines(rows), targets


def runs_of(options: argparse.Namespace) -> list[Run]:
    """Every model in every format, a seed after the other."""
    return [
        Run(model=model, format=fmt, seed=seed, lr=LEARNING_RATES[model], **STUDY.sizes(options))
        for seed, model, fmt in itertools.product(options.seeds, options.models, options.formats)
    ]


NUMBERS = SMALL | {
    "steps": (250, "of a run"),
    "batch": (16, "windows of text in a step"),
    "width": (128, "of the model"),
}
QUICK = {"width": 32, "steps": 2, "batch": 2, "context": 32, "layers": 1, "val_batches": 1}
STUDY = Study(
    "bench_bert", __doc__, COLUMNS, runs_of, train, summary, NUMBERS, QUICK, 3,
    {"models": MODELS, "formats": FORMATS},
)  # fmt: skip
main = STUDY.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
