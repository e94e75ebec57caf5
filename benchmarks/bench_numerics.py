"""How much does inspecting the numbers slow down a training?

The demo's GPT trains with AdamW, eager. Three trainings of each recipe take turns:

    none       steps and nothing else
    every n    the same steps under `inspect_every(model, n)`: one of n is inspected
    each step  every step is inspected

    every n:    time / none, at most 1.05 at n = 50
    each step:  the cost of one inspected step, in steps

A sample is one interval, of n steps or of one. An inspected step makes each cast once more and
reads it some ten times in float64; nothing waits for the device before it ends. On a CPU the batch
is 8 windows and the median is of 7 rounds, so that all takes about three minutes of two idle
cores; each cast has a fixed cost, so that larger batches have lower ratios.

    python benchmarks/bench_numerics.py -o numerics.json
    python benchmarks/bench_numerics.py --size cpu --recipes blockwise -n 10
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import harness, report
from benchmarks.measuring.harness import Row
from float8 import sync_float8_amax_and_scale_history
from float8.config import RECIPES
from float8.numerics import inspect_every
from scripts.training import gpt
from scripts.training.options import SIZES

NONE, EVERY, EACH = "none", "every n", "each step"
MOST = 1.05
COLUMNS = {
    "layer": ("recipe", ""),
    "watched": ("watched", ""),
    "ms": ("step ms", ".1f"),
    "ratio": ("time / none", ".3f"),
    "casts": ("casts seen", ""),
    "error": ("not run", ".80"),
}


class Training:
    """One model that trains on the same batch; ``n`` None inspects nothing."""

    def __init__(self, recipe: str, n: int | None, options: argparse.Namespace) -> None:
        size = {name: int(value) for name, value in SIZES[options.size].items()}
        size["batch"] = options.batch or size["batch"]
        torch.manual_seed(options.seed)
        sizes = gpt.Sizes(size["layers"], size["width"], size["heads"], size["context"])
        self.model = gpt.in_recipe(gpt.GPT(sizes), recipe).to(options.device)
        shape = (size["batch"], size["context"] + 1)
        self.text = torch.randint(0, gpt.VOCABULARY, shape, device=options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.monitor = None if n is None else inspect_every(self.model, n)
        self.is_delayed = RECIPES[recipe].uses_delayed_scaling
        self.is_bf16 = torch.device(options.device).type == "cuda"

    def run(self, steps: int) -> None:
        for _ in range(steps):
            with self.monitor or nullcontext():
                self._step()

    def _step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.text.device.type, torch.bfloat16, enabled=self.is_bf16):
            loss = self.model(self.text[:, :-1], self.text[:, 1:])
        loss.backward()
        self.optimizer.step()
        if self.is_delayed:
            sync_float8_amax_and_scale_history(self.model)


def makers(
    recipe: str, options: argparse.Namespace
) -> dict[str, Callable[[], Callable[[], object]]]:
    def interval(n: int | None, steps: int) -> Callable[[], object]:
        return partial(Training(recipe, n, options).run, steps)

    n = options.n
    return {
        NONE: partial(interval, None, n),
        EVERY: partial(interval, n, n),
        EACH: partial(interval, 1, 1),
    }


def measure(recipe: str, options: argparse.Namespace) -> tuple[list[Row], Row]:
    """One row for each way of watching, and whether that of every n steps costs little enough."""
    rounds = harness.take_turns([makers(recipe, options)], options)
    steps = {NONE: options.n, EVERY: options.n, EACH: 1}
    seconds = {name: [s / steps[name] for s in samples] for name, samples in rounds.samples.items()}
    rows: list[Row] = []
    for name, samples in seconds.items():
        watched = EVERY.replace("n", str(options.n)) if name == EVERY else name
        row: Row = {"layer": recipe, "watched": watched, **harness.timing(samples, seconds[NONE])}
        training = rounds.runs[name].func.__self__  # type: ignore[attr-defined]
        if training.monitor is not None:
            row["casts"] = len(training.monitor.report)
        rows.append(row)
    found = rows[1]["ratio"]
    target: Row = {
        "layer": recipe,
        "mode": "eager",
        "against": "not watched, at most",
        "target": MOST,
        "measured": found,
        "met": found <= MOST,
    }
    return rows, target


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__)
    recipes = [name for name in RECIPES if name != "unit"]
    default = ["tensorwise", "delayed", "rowwise"]
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=default)
    parser.add_argument("--size", choices=list(SIZES), help="default: slow cpu, or cuda")
    parser.add_argument("--batch", type=harness.positive, help="default: 8, or the size's on cuda")
    parser.add_argument("-n", type=harness.positive, default=50, help="steps apart; 50")
    parser.set_defaults(repeats=7, warmup=1)
    options = parser.parse_args(argv)
    is_cuda = torch.device(options.device).type == "cuda"
    options.size = options.size or ("cuda" if is_cuda else "slow cpu")
    options.batch = options.batch or (None if is_cuda else 8)
    rows: list[Row] = []
    targets: list[Row] = []
    try:
        for recipe in harness.in_time(options.recipes, options.stop_after):
            found, target = measure(recipe, options)
            rows += found
            targets.append(target)
    finally:  # an interrupted run keeps what it measured
        report.publish("bench_numerics", argv, options, rows, COLUMNS, targets)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
