"""How long does an optimizer step with 8-bit states take, and how large are the states?

AdamW of torch and of float8 step the same parameters with the same gradients, in turns:

    torch foreach       torch.optim.AdamW(foreach=True): float32 states, the baseline
    torch fused         torch.optim.AdamW(fused=True)
    float8              first moment E4M3, second moment expanded E4M3
    float8 + float16    first moment E4M3, second moment scaled float16
    float32             float8's AdamW with both in float32: the cost of its code
    bf16 stochastic     as float8, bfloat16 parameters rounded stochastically

Eager and under torch.compile, except torch's own fused one. On a CPU

    slowdown = time(compiled) / time(torch foreach, eager), at most 2

On CUDA memory bounds a step: the bytes that it must read and write once (gradient, parameter,
states) per second, over those of a copy, are at least 0.8.

    python benchmarks/bench_optim.py -o optim.json
    python benchmarks/bench_optim.py --quick --options float8
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import harness, memory, report
from benchmarks.measuring.harness import Row
from float8.optim import AdamW

BASELINE = "torch foreach"
TORCH: dict[str, dict[str, Any]] = {BASELINE: {"foreach": True}, "torch fused": {"fused": True}}
COPY = (harness.COPY, "eager")
SLOWEST = 2.0  # on a CPU, compiled, over the baseline
SHARE_OF_COPY = 0.8  # on CUDA
# Llama-2-7B's attention: with gradient and float32 states 268 MB, more than caches hold. Data in
# caches would favour foreach, which makes many passes over memory. One parameter, because inductor
# unrolls them: compiling several would take longer than measuring.
SHAPES = ((4096, 4096),)
# Of a layer of Llama-3-8B, which has 32 of them.
LLAMA3_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
# Small, with a ragged one and what stays in float32.
QUICK = ((512, 256), (65, 100), (64,))
OPTIONS: dict[str, dict[str, Any]] = {
    "float8": {},
    "float8 + float16": {"second_moment": "float16"},
    "float32": {"first_moment": "float32", "second_moment": "float32"},
    "bf16 stochastic": {"stochastic_rounding": True},
}
COLUMNS = report.columns(
    "optimizer mode ms ratio state_bytes moved_bytes gb_per_s share_of_copy met error",
    ms="step ms", ratio="time / torch foreach", state_bytes="state bytes / parameter",
    moved_bytes="bytes moved / parameter", gb_per_s="GB/s", share_of_copy="of a copy's",
)  # fmt: skip


def new_optimizer(name: str, options: argparse.Namespace, compiled: bool) -> torch.optim.Optimizer:
    """An optimizer of `OPTIONS`, or torch's, of random parameters that are the same for all."""
    random = partial(torch.randn, device=options.device)
    random = partial(random, generator=torch.Generator(options.device).manual_seed(options.seed))
    dtype = torch.bfloat16 if name == "bf16 stochastic" else torch.float32
    made = []
    for shape in options.shapes:
        values, grad = random(2, *shape).to(dtype)
        made.append(values.mul_(0.02).requires_grad_())
        made[-1].grad = grad.mul_(1e-3)
    if name in TORCH:
        return torch.optim.AdamW(made, lr=1e-4, **TORCH[name])
    # Compiled code takes the learning rate as a tensor: it does not compile again when it changes.
    lr = torch.tensor(1e-4, device=options.device) if compiled else 1e-4
    return AdamW(made, lr=lr, capturable=compiled, **OPTIONS[name])


def weights_of(optimizer: torch.optim.Optimizer) -> Row:
    """Bytes per parameter: that the states occupy; that a step must read and write once."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    count, dense = sum(p.numel() for p in held), sum(p.nbytes for p in held)
    states = memory.bytes_of(memory.state_tensors(optimizer))
    states -= sum(optimizer.state[p]["step"].nbytes for p in held)
    # The gradient is read and not written.
    moved = 2 * states + 3 * dense
    return {"state_bytes": states / count, "moved_bytes": moved / count, "parameters": count}


class Step:
    """One step of an optimizer, callable."""

    def __init__(self, name: str, options: argparse.Namespace, compiled: bool = False) -> None:
        self.optimizer = new_optimizer(name, options, compiled)
        self.optimizer.step()  # makes the states
        self.run = torch.compile(self.optimizer.step) if compiled else self.optimizer.step

    def __call__(self) -> object:
        return self.run()


def measure(modes: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """A row per optimizer and mode; where a GPU is, a copy to compare bandwidths with."""
    on_cpu = harness.on_cpu(options)
    makers: dict[tuple[str, str], Callable[[], Callable[[], object]]] = {
        (name, "eager"): partial(Step, name, options) for name in TORCH
    }
    for name, mode in itertools.product(options.options, modes):
        makers[name, mode] = partial(Step, name, options, mode == "compiled")
    if not on_cpu:
        makers[COPY] = partial(harness.copier, options.device)
    rounds = harness.take_turns({", ".join(key): make for key, make in makers.items()}, options)
    rows: list[Row] = []
    for name, mode in makers:
        key = f"{name}, {mode}"
        row: Row = {"optimizer": name, "mode": mode, **rounds.row(key, f"{BASELINE}, eager")}
        rows.append(row)
        step = rounds.runs.get(key)
        if not isinstance(step, Step):
            continue
        row |= weights_of(step.optimizer)
        met = mode == "compiled" and row["ratio"] <= SLOWEST
        if not on_cpu:
            moved = row["moved_bytes"] * row["parameters"]
            copied = rounds.samples[", ".join(COPY)]
            share = moved / harness.COPIED / harness.paired_ratio(rounds.samples[key], copied)
            row |= {"gb_per_s": moved / (row["ms"] * 1e-3) / 1e9, "share_of_copy": share}
            met = share >= SHARE_OF_COPY
        if name in OPTIONS and (mode == "compiled" or not on_cpu):
            row["met"] = "yes" if met else "no"
    return rows


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="small parameters, few rounds")
    parser.add_argument("--layers", type=harness.positive, help="so many layers of Llama-3-8B")
    parser.add_argument("--options", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    modes = ("eager", "compiled")
    parser.add_argument("--modes", nargs="+", choices=modes, default=list(modes))
    options = parser.parse_args(argv)
    options.shapes = LLAMA3_8B * options.layers if options.layers else SHAPES
    options.shapes = QUICK if options.quick else options.shapes
    if options.quick:
        options.repeats, options.warmup = min(options.repeats, 3), 1
    measured = partial(measure, options=options)
    return report.run("bench_optim", argv, options, [options.modes], measured, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
