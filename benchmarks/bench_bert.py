"""Does a unit-scaled BERT train in float16 and float8 as it does in float32?

The headline of unit scaling (arXiv 2303.11257, section 5): cast to a narrow format, change nothing
else, no loss scaling, no scales, and reach the loss of full precision. Here a small encoder
(`bert.py`) is trained on masked bytes from the same weights and batches in each format:

    loss    of hidden bytes in held-out files, after the last step
    gap     100 (loss / loss of the same model and seed in fp32 - 1), the mean over seeds with its
            95 % interval (`quality/paired.py`)

The target is a gap whose interval ends at 1 % at most, for the unit-scaled model; of one seed there
is no interval, and the gap alone counts. The base model in
the same formats shows the effect of the casts on a model that is not unit-scaled. Both have equal
shapes, see the same text with the same bytes hidden, and train with the learning rate that is best
for them in fp32 (`LEARNING_RATES`); the format changes nothing else.

The file named by -o is written after every run, and a call with the same file makes only the runs
that it lacks (`quality/study.py`).

    python benchmarks/bench_bert.py --jobs 2 -o bert.json
    python benchmarks/bench_bert.py --quick
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring.harness import Row
from benchmarks.models import bert, decoders, training
from benchmarks.quality import study
from benchmarks.quality.paired import Difference, ends_below
from scripts.training import corpus

COLUMNS = {
    "layer": ("model", ""),
    "mode": ("format", ""),
    "lr": ("lr", ".3g"),
    "seeds": ("seeds", ".0f"),
    "loss": ("held-out loss", ".4f"),
    "gap": ("gap to its fp32", ""),
    "base_gap": ("gap to base fp32", ""),
    "diverged": ("diverged", ".0f"),
}
MAX_GAP = 1.0  # per cent
# The best powers of two in fp32 at the default sizes, seed 0, of 2**-11 to 2**-8 and 2**-1 to 2**1.
LEARNING_RATES = {"base": 2.0**-9, "unit": 1.0}
SIZES = training.SIZES | {
    "steps": (250, "of a run"),
    "batch": (16, "windows of text in a step"),
    "width": (128, "of the model"),
}
QUICK = {"width": 32, "steps": 2, "batch": 2, "context": 32, "layers": 1, "val_batches": 1}


@dataclass(frozen=True, kw_only=True)
class Run(training.Run):
    """What decides a training."""

    model: str
    format: str
    lr: float
    width: int


def train(run: Run, data: Path | None, device: str) -> Row:
    """Train one model in one format."""
    text = corpus.load(data)
    torch.manual_seed(run.seed)
    model = bert.build(run.model, run.format, run.width, run.layers, run.context)
    model.to(device)
    with bert.products(run.format, device):
        result = training.train(
            bert.loss_of(run.model, run.format, model),
            bert.optimizer(run.model, model, run.lr),
            bert.masked(training.train_batches(text, run, device), run.seed),
            run.steps,
            bert.masked(training.val_batches(text, run, device), run.seed),
        )
    return {"layer": run.model, "mode": run.format, "lr": run.lr, **result.row()}


def runs(options: argparse.Namespace) -> list[Run]:
    """Every model in every format, a seed after the other."""
    return [
        Run(model=model, format=fmt, seed=seed, lr=options.rates[model], **options.sizes)
        for seed, model, fmt in itertools.product(options.seeds, options.models, options.formats)
    ]


def lines(rows: Sequence[Row]) -> list[Row]:
    """A line per model and format: its mean loss, and the paired gaps to fp32."""
    losses: dict[tuple[str, str], dict[int, float | None]] = {}
    for row in rows:
        seed = row.get("run", {"seed": 0})["seed"]  # files before 0.13 have seed 0 alone
        losses.setdefault((row["layer"], row["mode"]), {})[seed] = training.held_out(row)
    rates = {row["layer"]: row.get("lr") for row in rows}
    found: list[Row] = []
    for (model, fmt), own in losses.items():
        known = [loss for loss in own.values() if loss is not None]
        line: Row = {"layer": model, "mode": fmt, "lr": rates[model], "seeds": len(known)}
        line["diverged"] = len(own) - len(known)
        if known:
            line["loss"] = statistics.fmean(known)
        for key, base in (("gap", model), ("base_gap", "base")):
            gap = gap_of(own, losses.get((base, "fp32"), {}))
            if (model, fmt) != (base, "fp32"):
                line |= gap.columns(key)
        found.append(line)
    return found


def gap_of(own: dict[int, float | None], full: dict[int, float | None]) -> Difference:
    """Of losses by seed, to those of the same seeds in fp32, in per cent."""
    pairs = [(loss, full.get(seed)) for seed, loss in sorted(own.items())]
    values = [100 * (loss / other - 1) for loss, other in pairs if loss and other]
    return Difference(tuple(values), sum(loss is None for loss in own.values()))


def targets(found: Sequence[Row]) -> list[Row]:
    """Which formats of the unit-scaled model end near fp32: ``measured`` ends the interval."""
    return [
        {"layer": "unit", "mode": line["mode"], **target}
        for line in found
        if line["layer"] == "unit" and line["mode"] != "fp32"
        for target in ends_below(line, "gap", MAX_GAP, "fp32")
    ]


def summary(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per model and format, and the targets."""
    found = lines(rows)
    return found, targets(found)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = study.parser(__doc__, seeds=3)
    study.add_numbers(parser, **SIZES)
    parser.add_argument("--models", nargs="+", choices=bert.KINDS, default=list(bert.KINDS))
    parser.add_argument("--formats", nargs="+", choices=bert.FORMATS, default=list(bert.FORMATS))
    for kind, lr in LEARNING_RATES.items():
        parser.add_argument(f"--{kind}-lr", type=float, default=lr, help=f"{lr:g}")
    options = study.parse(parser, argv, QUICK)
    decoders.check_widths(parser, "--width", [options.width])
    if options.batch * options.context % 16:
        parser.error("--batch x --context must be a multiple of 16, which float8 products need")
    options.sizes = {name: getattr(options, name) for name in SIZES}
    options.rates = {kind: getattr(options, f"{kind}_lr") for kind in bert.KINDS}
    return options


def main(argv: Sequence[str]) -> int:
    """Make the runs that lack, compare and report; returns 1 if a unit-scaled run diverged."""
    options = parse(argv)
    training.load(options)  # ends the program where there is no text
    make = partial(train, data=options.data, device=options.device)
    rows = study.make("bench_bert", argv, options, runs(options), make, summary, COLUMNS)
    return int(any("error" in row for row in rows if row["layer"] == "unit"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
