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
    python benchmarks/bench_numerics.py --recipes blockwise -n 10
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import harness, report
from benchmarks.measuring.harness import Row
from benchmarks.models.transformer import GPT, Sizes
from benchmarks.quality.contenders import contender
from float8.config import RECIPES
from float8.numerics import inspect_every

NONE, EVERY, EACH = "none", "every n", "each step"
MOST, RECIPES_HERE = 1.05, ("tensorwise", "delayed", "rowwise")
COLUMNS = report.columns(
    "layer watched ms ratio casts error",
    layer="recipe", ms="step ms", ratio="time / none", casts="casts seen",
)  # fmt: skip


# The demo's.
SIZES = {
    "cpu": Sizes(2, 128, 2, 64, batch=32),
    "cuda": Sizes(12, 1024, 8, 512, batch=32),
}


class Training:
    """One model that trains on the same batch, `steps` a call; ``n`` None inspects nothing."""

    def __init__(self, recipe: str, n: int | None, steps: int, options: argparse.Namespace) -> None:
        sizes, self.steps = SIZES[options.size], steps
        torch.manual_seed(options.seed)
        self.what = contender(recipe, GPT(sizes).to(options.device))
        shape = (options.batch or sizes.batch, sizes.context + 1)
        self.text = torch.randint(0, sizes.vocabulary, shape, device=options.device)
        self.optimizer = torch.optim.AdamW(self.what.model.parameters())
        self.monitor = None if n is None else inspect_every(self.what.model, n)

    def __call__(self) -> None:
        device = self.text.device.type
        for _ in range(self.steps):
            with self.monitor or nullcontext():
                self.optimizer.zero_grad()
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    loss = self.what.model(self.text[:, :-1], self.text[:, 1:])
                loss.backward()
                self.optimizer.step()
                self.what.after_step()


def measure(recipe: str, options: argparse.Namespace) -> list[Row]:
    """One row for each way of watching."""
    n = options.n
    ways = {NONE: (None, n), EVERY.replace("n", str(n)): (n, n), EACH: (1, 1)}
    makers = {name: partial(Training, recipe, *way, options) for name, way in ways.items()}
    rounds = harness.take_turns(makers, options)
    rows: list[Row] = []
    for name, (_, steps) in ways.items():
        samples = [seconds / steps for seconds in rounds.samples[name]]
        plain = [seconds / n for seconds in rounds.samples[NONE]]
        rows.append({"layer": recipe, "watched": name, **harness.timing(samples, plain)})
        training = rounds.runs[name]
        if isinstance(training, Training) and training.monitor is not None:
            rows[-1]["casts"] = len(training.monitor.report or ())
    return rows


def targets(rows: Sequence[Row]) -> list[Row]:
    """Whether a look every n steps costs little enough."""
    return [
        {"layer": row["layer"], "mode": "eager", "against": "not watched, at most",
         "target": MOST, "measured": row["ratio"], "met": row["ratio"] <= MOST}
        for row in rows
        if row["watched"] not in (NONE, EACH)
    ]  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__, repeats=7, warmup=1)
    recipes = [name for name in RECIPES if name != "unit"]
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=RECIPES_HERE)
    parser.add_argument("--size", choices=list(SIZES), help="default: cpu, or cuda")
    parser.add_argument("--batch", type=harness.positive, help="default: 8, or the size's on cuda")
    parser.add_argument("-n", type=harness.positive, default=50, help="steps apart; 50")
    options = parser.parse_args(argv)
    on_cpu = harness.on_cpu(options)
    options.size = options.size or ("cpu" if on_cpu else "cuda")
    options.batch = options.batch or (8 if on_cpu else None)
    measured = partial(measure, options=options)
    return report.run("bench_numerics", argv, options, options.recipes, measured, COLUMNS, targets)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
