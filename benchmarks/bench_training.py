"""Does a training in float8 end at the loss of bf16, and how much sooner?

Two GPTs (`models/transformer.py`), `wide`, whose layers are large enough for float8 to gain, and
`small`, are trained from the same weights on the same batches, bf16 first:

    steps        as many as bf16 takes in ``--seconds``, after its first ones, or as the text has
                 batches; the same for all
    loss         of held-out text at the end, in nats per byte; `curve` has (step, seconds, loss)
    gap %        how much greater it is than bf16's of the same seed. bf16 again, from another seed,
                 shows how large noise is
    sooner       bf16's seconds over those until this run's held-out loss is bf16's final one; empty
                 if it never is

Seconds are those of the steps, without compilation and evaluation. Blocks are compiled. Weights are
float32 under bf16 autocast; AdamW, decay, clipping and rates are those of `quality/training.py`.
Each run is a process of its own, so that its `peak_gib` is its own, and a row of the file: a call
with the same file makes the runs that it lacks. No window of the text is read twice: the text is
all Python sources of the machine, and a row has their `bytes`.

    python benchmarks/bench_training.py -o training.json
    python benchmarks/bench_training.py --models toy --seconds 5 --eager --device cpu
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import harness, report
from benchmarks.measuring.alone import alone
from benchmarks.measuring.harness import Row
from benchmarks.measuring.report import PEER
from benchmarks.models import text as texts
from benchmarks.models.transformer import GPT, Sizes
from benchmarks.quality.contenders import BASE, contender
from benchmarks.quality.study import known_rows
from benchmarks.quality.training import (
    evaluate,
    in_autocast,
    optimizer_of,
    steps_of,
    straight_to_zero,
    usual_rate,
)

MODELS = {
    "wide": Sizes(4, 4096, 32, 2048, kv_heads=8, feed_forward=14336, batch=8),
    "small": Sizes(12, 1024, 16, 2048, batch=8),
    "toy": Sizes(1, 64, 2, 64, batch=4),
}
CONTENDERS = (BASE, "tensorwise", PEER + "tensorwise", "rowwise")
FIRST = 8  # steps that are not timed: they compile, and find out how long a step takes
LOOKS = 10  # evaluations of a run
COLUMNS = report.columns(
    "mode layer seed steps loss gap_percent seconds tokens_s sooner peak_gib error",
    mode="model", layer="linear layers", gap_percent="gap %", seconds="seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Training:
    """All that decides a run; ``steps`` of 0 are as many as take ``seconds``."""

    model: str
    contender: str
    seed: int
    seconds: int
    steps: int = 0


def train(run: Training, options: argparse.Namespace) -> Row:
    """A row, without what it is compared with."""
    sizes, device = MODELS[run.model], options.device
    torch.manual_seed(run.seed)
    what = contender(run.contender, GPT(sizes).to(device))
    for block in () if options.eager else what.model.get_submodule("blocks").children():
        block.compile(dynamic=False)
    text = texts.installed()
    held_out = min(options.held_out, len(text.held_out) // 2)
    timer = harness.timer_for(device)
    optimizer = optimizer_of(what, usual_rate(run.contender, sizes.width))
    states = [p.detach().clone() for p in what.model.parameters()]

    def losses(count: int, seed: int, factors: Iterable[float]) -> Iterator[torch.Tensor]:
        batches = text.windows_in_turn(count, seed=seed, batch=sizes.batch, context=sizes.context)
        moved = ((tokens.to(device), targets.to(device)) for tokens, targets in batches)
        loss_of = in_autocast(what.model)
        return steps_of(loss_of, optimizer, factors, moved, what.clipped, what.after_step)

    trial = losses(FIRST, run.seed + 1, itertools.repeat(1.0))
    durations = [timer(lambda: next(trial), 1) for _ in range(FIRST)]
    most = (len(text.train) - 1) // sizes.context // sizes.batch
    steps = run.steps or min(most, max(LOOKS, int(run.seconds / statistics.median(durations))))
    with torch.no_grad():  # back to the start: the trial's steps are not part of the run
        for parameter, state in zip(what.model.parameters(), states, strict=True):
            parameter.copy_(state)
    optimizer.state.clear()
    del states
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    curve: list[tuple[int, float, float]] = []
    seconds, look = 0.0, -(-steps // LOOKS)
    row: Row = {"steps": steps, "curve": curve, "text": text.digest, "bytes": len(text.train)}
    row["parameters"] = sum(p.numel() for p in what.model.parameters())
    training = losses(steps, run.seed, straight_to_zero(steps))
    for first in range(0, steps, look):
        seconds += timer(lambda: list(itertools.islice(training, look)), 1)
        loss = evaluate(what.model, sizes.context, text, held_out, device)
        if not math.isfinite(loss):
            return row | {"error": f"diverged: loss not finite at step {first + look}"}
        curve.append((min(first + look, steps), seconds, loss))
    tokens = sizes.batch * sizes.context
    row |= {"loss": loss, "seconds": seconds, "tokens_s": steps * tokens / seconds}
    if on_cuda:
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def runs(options: argparse.Namespace) -> Iterator[Training]:
    """All runs; of each model bf16 first, and last bf16 from another seed."""
    for model in options.models:
        for name in options.contenders:
            yield Training(model, name, 0, options.seconds)
        yield Training(model, BASE, 1, options.seconds)


def compare(rows: Sequence[Row]) -> list[Row]:
    """Add to each row its gap to bf16, and how much sooner it reaches bf16's; no targets."""
    bases = {row["mode"]: row for row in rows if (row["layer"], row["seed"]) == (BASE, 0)}
    for row in rows:
        base = bases.get(row["mode"], {})
        if "loss" not in row or "loss" not in base or row is base:
            continue
        row["gap_percent"] = 100 * (row["loss"] / base["loss"] - 1)
        reached = reaches(row["curve"], base["loss"])
        if row["seed"] == base["seed"] and reached is not None:
            row["sooner"] = base["seconds"] / reached
    return []


def reaches(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """The seconds until a curve falls to a loss, between two evaluations on a straight line."""
    for (_, before, high), (_, after, low) in itertools.pairwise(curve):
        if low <= loss:
            return after - (after - before) * (loss - low) / max(high - low, 1e-12)
    return None


def main(argv: Sequence[str]) -> int:
    """Make the runs that the file lacks; 1 if one of ours failed."""
    parser = harness.plain_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["wide", "small"])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), help="bf16 first")
    parser.add_argument("--seconds", type=harness.positive, default=60, help="of bf16's steps")
    parser.add_argument("--held-out", type=harness.positive, default=2**18, metavar="BYTES")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--stop-after", type=harness.positive, metavar="SECONDS")
    options = parser.parse_args(argv)
    rows = known_rows(options.output, "bench_training")
    done = [row["run"] for row in rows]
    steps = {row["mode"]: row["steps"] for row in rows if row["layer"] == BASE and "steps" in row}

    def measure(run: Training) -> list[Row]:
        own = replace(run, steps=steps.get(run.model, 0))
        found = alone(train, own, options)
        if run.contender == BASE and "steps" in found:
            steps[run.model] = found["steps"]
        what = {"mode": run.model, "layer": run.contender, "seed": run.seed}
        return [{"run": asdict(run), **report.commit(), **what, **found}]

    missing = [run for run in runs(options) if asdict(run) not in done]
    return report.run(
        "bench_training", argv, options, missing, measure, COLUMNS, compare, earlier=rows
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
