"""Does a unit-scaled BERT train in float16 and float8 as it does in float32?

The headline of unit scaling (arXiv 2303.11257, section 5): cast to a narrow format, change nothing
else, no loss scaling, no scales, and reach the loss of full precision. Here a small encoder
(`bert.py`) is trained on masked bytes from the same weights and batches in each format:

    loss    of hidden bytes in held-out files, after the last step
    gap     loss / loss of the same model in fp32 - 1

The target is a gap of at most 1 % for the unit-scaled model. The base model in the same formats
shows the effect of the casts on a model that is not unit-scaled. Both have equal shapes, see the
same text with the same bytes hidden, and train with the learning rate that is best for them in
fp32 (`LEARNING_RATES`); the format changes nothing else.

    python benchmarks/bench_bert.py -o bert.json
    python benchmarks/bench_bert.py --quick
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import harness, report
from benchmarks.models import bert, decoders, training
from scripts.training import corpus

COLUMNS = {
    "layer": ("model", ""),
    "mode": ("format", ""),
    "lr": ("lr", ".3g"),
    "val_loss": ("held-out loss", ".4f"),
    "gap_percent": ("gap to its fp32 %", "+.2f"),
    "base_gap_percent": ("gap to base fp32 %", "+.2f"),
    "seconds": ("s", ".0f"),
    "error": ("not run", ".80"),
}
MAX_GAP = 1.0  # per cent
# The best powers of two in fp32 at the default sizes, seed 0, of 2**-11 to 2**-8 and 2**-1 to 2**1.
LEARNING_RATES = {"base": 2.0**-9, "unit": 1.0}
QUICK = {"width": 32, "steps": 2, "batch": 2, "context": 32, "layers": 1, "val_batches": 1}


def run(kind: str, fmt: str, text: corpus.Corpus, options: argparse.Namespace) -> harness.Row:
    """Train one model in one format."""
    lr = options.base_lr if kind == "base" else options.unit_lr
    torch.manual_seed(options.seed)
    model = bert.build(kind, fmt, options.width, options.layers, options.context)
    model.to(options.device)
    with bert.products(fmt, options.device):
        result = training.train(
            bert.loss_of(kind, fmt, model),
            bert.optimizer(kind, model, lr),
            bert.masked(training.train_batches(text, options), options.seed),
            options.steps,
            bert.masked(training.val_batches(text, options), options.seed),
        )
    return {"layer": kind, "mode": fmt, "lr": lr, **result.row()}


def compare(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """Write every run's gaps into its row, and say which unit-scaled formats met the target."""
    losses = {(row["layer"], row["mode"]): row["val_loss"] for row in rows if "val_loss" in row}
    targets: list[harness.Row] = []
    for row in rows:
        for key, of in (("gap_percent", row["layer"]), ("base_gap_percent", "base")):
            full = losses.get((of, "fp32"))
            if (
                full is not None
                and "val_loss" in row
                and (row["layer"], row["mode"]) != (of, "fp32")
            ):
                row[key] = 100 * (row["val_loss"] / full - 1)
        if row["layer"] == "unit" and row["mode"] != "fp32" and ("unit", "fp32") in losses:
            gap = row.get("gap_percent")
            target = {"against": "gap to fp32, %", "target": MAX_GAP}
            measured = {"measured": gap} if gap is not None else {}
            met = gap is not None and gap <= MAX_GAP
            targets.append({"layer": "unit", "mode": row["mode"], **target, **measured, "met": met})
    return targets


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = training.parser(__doc__)
    parser.set_defaults(steps=250, batch=16, context=64)
    parser.add_argument("--width", type=harness.positive, default=128)
    parser.add_argument("--models", nargs="+", choices=bert.KINDS, default=list(bert.KINDS))
    parser.add_argument("--formats", nargs="+", choices=bert.FORMATS, default=list(bert.FORMATS))
    for kind, lr in LEARNING_RATES.items():
        parser.add_argument(f"--{kind}-lr", type=float, default=lr, help=f"{lr:g}")
    parser.add_argument("--quick", action="store_true", help="two steps: does it run?")
    options = parser.parse_args(argv)
    decoders.check_widths(parser, "--width", [options.width])
    if options.batch * options.context % 16:
        parser.error("--batch x --context must be a multiple of 16, which float8 products need")
    for key, value in QUICK.items() if options.quick else ():
        setattr(options, key, value)
    return options


def main(argv: Sequence[str]) -> int:
    """Train all, compare and report; returns 1 if a unit-scaled run diverged."""
    options = parse(argv)
    text = training.load(options)
    rows: list[harness.Row] = []
    targets: list[harness.Row] = []
    jobs = list(itertools.product(options.models, options.formats))
    try:
        for kind, fmt in harness.in_time(jobs, options.stop_after):
            rows.append(run(kind, fmt, text, options))
    finally:  # an interrupted run keeps what it measured
        targets = compare(rows)
        report.publish("bench_bert", argv, options, rows, COLUMNS, targets)
    return int(any("error" in row for row in rows if row["layer"] == "unit"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
