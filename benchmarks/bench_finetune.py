"""What does float8 cost after pretraining: in fine-tuning, below adapters, and by conversion?

All studies start from small GPTs that were pretrained in bf16, one per seed. A call makes those
that its runs lack, in the folder of --pretrained. Differences are paired by seed, in per cent of
bf16's loss, with 95 % intervals (`quality/paired.py`).

    --study finetune   all weights, on another text, in bf16 and in each recipe: the loss on the new
                       text, and what was forgotten of the old one (`quality/finetuning.py`)
    --study lora       adapters on a frozen base in bf16 or in float8, by PEFT; adapters that were
                       trained on float8 are also moved to the bf16 base
    --study convert    conversion without training: scales by several methods, per tensor and per
                       channel, static and dynamic inputs (`quality/post_training.py`); without and
                       with planted outliers

``bf16 rounded`` starts from the checkpoint rounded to bf16: it shows what rounding alone changes.
The file named by -o is written after every run, and a call with the same file makes only the runs
that it lacks. Each study takes a file of its own.

    python benchmarks/bench_finetune.py --study lora --pretrained pretrained -o lora.json
    python benchmarks/bench_finetune.py --study convert --quick
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring.harness import Row
from benchmarks.quality import pretrained, study
from benchmarks.quality.contenders import BASE, NOISE
from benchmarks.quality.finetuning import Tuning, tune
from benchmarks.quality.paired import by_contender, difference, grouped, interval
from benchmarks.quality.post_training import (
    INPUT_METHODS,
    PLAIN,
    WEIGHT_METHODS,
    Conversion,
    convert,
)
from benchmarks.quality.run import Run

RECIPES = (BASE, NOISE, "tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
BASES = (BASE, NOISE, "tensorwise", "rowwise", "blockwise", "mxfp8")  # delayed: as tensorwise
RATE, TUNING_RATE, ADAPTER_RATE = 2e-3, 1e-3, 5e-3
RANK = 8
OUTLIERS = (1, 1024)
WEIGHTS_ALONE = [
    (f"{shared} {method}", PLAIN) for shared in ("tensor", "channel") for method in WEIGHT_METHODS
]
CASTS = [  # of weights and of inputs
    (PLAIN, PLAIN),
    ("tensor amax", "tensor amax"),
    ("channel amax", "token amax"),
    ("channel pow2", "token pow2"),
    ("128x128 pow2", "1x128 pow2"),
    ("1x32 pow2", "1x32 pow2"),
    *(("channel amax", f"static {method}") for method in INPUT_METHODS),
    ("channel mse", "static mse"),
]
QUICK = {"steps": 4, "pretraining_steps": 4, "width": 32, "layers": 1, "batch": 2, "context": 16}
TRAINED = {
    "layer": ("contender", ""),
    "seeds": ("seeds", ".0f"),
    "loss": ("new loss", ".4f"),
    "gap": ("gap", ""),
    "bf16_gap": ("evaluated in bf16", ""),
    "own_cast": ("casts", ""),
    "bf16_cast": ("casts of bf16's weights", ""),
    "moved_gap": ("on the bf16 base", ""),
    "old_loss": ("old loss", ".4f"),
    "old_gap": ("gap", ""),
    "diverged": ("diverged", ".0f"),
}
CONVERTED = {
    "layer": ("weights", ""),
    "inputs": ("inputs", ""),
    "outliers": ("outliers", ".0f"),
    "seeds": ("seeds", ".0f"),
    "weights_sqnr": ("weights dB", ".1f"),
    "inputs_sqnr": ("inputs dB", ".1f"),
    "perplexity": ("perplexity", ".4f"),
    "gap": ("loss", ""),
}


def starts(options: argparse.Namespace) -> dict[int, Run]:
    """Seed -> the run that pretrains."""
    steps = options.pretraining_steps
    return {
        seed: Run(contender=BASE, seed=seed, steps=steps, learning_rate=RATE, **options.sizes)
        for seed in options.seeds
    }


def trainings(options: argparse.Namespace) -> list[Tuning]:
    """Every contender for every seed, a seed after the other; of all weights or of adapters."""
    adapters = options.study == "lora"
    return [
        Tuning(
            contender=name,
            seed=seed,
            steps=options.steps,
            learning_rate=ADAPTER_RATE if adapters else TUNING_RATE,
            rank=RANK if adapters else 0,
            start=start,
            **options.sizes,
        )
        for seed, start in starts(options).items()
        for name in (BASES if adapters else RECIPES)
    ]


def conversions(options: argparse.Namespace) -> list[Conversion]:
    """Every pair of casts for every seed, without and with outliers; weights alone without."""
    return [
        Conversion(weights=weights, inputs=inputs, outliers=outliers, seed=seed, start=start)
        for seed, start in starts(options).items()
        for outliers in OUTLIERS
        for weights, inputs in (CASTS + WEIGHTS_ALONE if outliers == 1 else CASTS)
    ]


def of_trainings(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per contender; the first is the pretrained model's."""
    by_name = by_contender(rows)
    bases = by_name.get(BASE, [])
    before = [
        {**row, "loss": row["start_loss"], "old_loss": row["start_old_loss"]} for row in bases
    ]
    found: list[Row] = []
    for name, own in (("before", before), *by_name.items()):
        ended = [row for row in own if "loss" in row]
        line: Row = {"layer": name, "seeds": len(ended), "diverged": len(own) - len(ended)}
        for key in ("loss", "old_loss") if ended else ():
            line[key] = statistics.fmean(row[key] for row in ended)
        if name not in ("before", BASE):
            gaps = {key: difference(own, bases, key) for key in ("loss", "bf16_loss", "moved_loss")}
            gaps["old_loss"] = difference(own, bases, "old_loss", "old_loss")
            line |= {
                key.replace("loss", "gap"): str(gap) for key, gap in gaps.items() if gap.values
            }
            line |= _casts(name, own, bases)
        found.append(line)
    return found, []


def _casts(name: str, own: Sequence[Row], bases: Sequence[Row]) -> Row:
    """What evaluation in float8 costs: of weights that it has trained, and of those of bf16."""
    trained = difference(own, own, "loss", "bf16_loss")
    flat = [{**row, **row.get("converted", {})} for row in bases]
    converted = difference(flat, bases, name)
    return {
        key: f"{interval(found.mean, found.half_width, 3)} %"
        for key, found in (("own_cast", trained), ("bf16_cast", converted))
        if found.values
    }


def of_conversions(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """A line per pair of casts, without and with outliers."""
    keys = ("outliers", "weights", "inputs")
    by_name = grouped(rows, lambda row: tuple(row["run"][key] for key in keys))
    found: list[Row] = []
    for (outliers, weights, inputs), own in by_name.items():
        bases = by_name.get((outliers, PLAIN, PLAIN), [])
        loss = statistics.fmean(row["loss"] for row in own)
        line: Row = {"layer": weights, "inputs": inputs, "outliers": outliers, "seeds": len(own)}
        line["perplexity"] = math.exp(loss)
        for key in ("weights_sqnr", "inputs_sqnr"):
            if key in own[0]:
                line[key] = statistics.fmean(row[key] for row in own)
        if own is not bases and (gap := difference(own, bases)).values:
            line["gap"] = f"{interval(gap.mean, gap.half_width, 3)} %"
        found.append(line)
    return found, []


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = study.parser(__doc__, seeds=5)
    parser.add_argument("--study", choices=("finetune", "lora", "convert"), required=True)
    parser.add_argument(
        "--pretrained", type=Path, metavar="FOLDER", help="of models; temporary by default"
    )
    study.add_numbers(
        parser,
        steps=(200, "of a fine-tuning"),
        pretraining_steps=(1000, "of a pretraining"),
        layers=(2, "transformer blocks"),
        width=(128, "of the model"),
        heads=(2, "of attention"),
        context=(64, "bytes of a window"),
        batch=(16, "windows in a step"),
        held_out=(2**17, "bytes of the last evaluation"),
    )
    options = study.parse(parser, argv, QUICK)
    names = ("layers", "width", "heads", "context", "batch", "held_out")
    options.sizes = {name: getattr(options, name) for name in names}
    return options


def main(argv: Sequence[str]) -> int:
    """Make the runs that lack, with the models that they start from; print the differences."""
    options = parse(argv)
    converts = options.study == "convert"
    runs: list[Any] = conversions(options) if converts else trainings(options)
    try:
        known = study.known_rows(options.output, "bench_finetune", options, runs)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    todo = study.missing(runs, known)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.pretrained or Path(temporary)
        pretrained.make(
            (run.start for run in todo), folder, options.data, options.device, options.jobs
        )
        train: Callable[..., Row] = convert if converts else tune
        make = partial(train, folder=folder, data=options.data, device=options.device)
        summary, columns = (of_conversions, CONVERTED) if converts else (of_trainings, TRAINED)
        study.make("bench_finetune", argv, options, runs, make, summary, columns)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
