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
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import harness, report
from float8.optim import AdamW

BASELINE = "torch foreach"
SLOWEST = 2.0  # on a CPU, compiled, over the baseline
SHARE_OF_COPY = 0.8  # on CUDA
# Llama-2-7B's attention: with gradient and float32 states 268 MB, more than caches hold. Data in
# caches would favour foreach, which makes many passes over memory. One parameter, because inductor
# unrolls them: compiling several would take longer than measuring.
SHAPES = ((4096, 4096),)
# Small, with a ragged one and what stays in float32.
QUICK = ((512, 256), (65, 100), (64,))
OPTIONS: dict[str, dict[str, Any]] = {
    "float8": {},
    "float8 + float16": {"second_moment": "float16"},
    "float32": {"first_moment": "float32", "second_moment": "float32"},
    "bf16 stochastic": {"stochastic_rounding": True},
}
COLUMNS = {
    "optimizer": ("optimizer", ""),
    "mode": ("mode", ""),
    "ms": ("step ms", ".3f"),
    "ratio": ("time / torch foreach", ".2f"),
    "state_bytes": ("state bytes / parameter", ".3f"),
    "moved_bytes": ("bytes moved / parameter", ".2f"),
    "gb_per_s": ("GB/s", ".0f"),
    "share_of_copy": ("of a copy's", ".2f"),
    "met": ("met", ""),
    "error": ("not run", ".80"),
}


def parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, options: argparse.Namespace
) -> list[Tensor]:
    """Random parameters with gradients, the same for every optimizer."""
    generator = torch.Generator().manual_seed(options.seed)
    made = []
    for shape in shapes:
        values, grad = torch.randn(2, *shape, generator=generator).to(options.device, dtype)
        parameter = values.mul_(0.02).requires_grad_()
        parameter.grad = grad.mul_(1e-3)
        made.append(parameter)
    return made


def new_optimizer(name: str, options: argparse.Namespace, compiled: bool) -> torch.optim.Optimizer:
    """An optimizer of `OPTIONS`, or torch's."""
    dtype = torch.bfloat16 if name == "bf16 stochastic" else torch.float32
    made = parameters(options.shapes, dtype, options)
    if name == BASELINE:
        return torch.optim.AdamW(made, lr=1e-4, foreach=True)
    if name == "torch fused":
        return torch.optim.AdamW(made, lr=1e-4, fused=True)
    # Compiled code takes the learning rate as a tensor: it does not compile again when it changes.
    lr = torch.tensor(1e-4, device=options.device) if compiled else 1e-4
    return AdamW(made, lr=lr, capturable=compiled, **OPTIONS[name])


def bytes_of(x: Any) -> int:
    """The bytes of a state: data, scales and exponents, or the high-precision tensor."""
    parts = getattr(x, "tensors", None)
    return sum(p.numel() * p.element_size() for p in ([x] if parts is None else parts()))


def weights_of(optimizer: torch.optim.Optimizer) -> harness.Row:
    """Bytes per parameter: that the states occupy; that a step must read and write once."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    count = sum(p.numel() for p in held)
    states = sum(
        bytes_of(x) for p in held for name, x in optimizer.state[p].items() if name != "step"
    )
    dense = sum(p.numel() * p.element_size() for p in held)
    return {
        "state_bytes": states / count,
        "moved_bytes": (2 * states + 3 * dense) / count,  # the gradient is read and not written
        "parameters": count,
    }


def makers(options: argparse.Namespace) -> dict[str, Callable[[], Callable[[], object]]]:
    """A step of each optimizer and mode; where a GPU is, a copy to compare bandwidths with."""
    made: dict[str, Callable[[], Callable[[], object]]] = {
        f"{BASELINE}, eager": partial(stepper, BASELINE, False, options),
        "torch fused, eager": partial(stepper, "torch fused", False, options),
    }
    for name in options.options:
        for mode in options.modes:
            made[f"{name}, {mode}"] = partial(stepper, name, mode == "compiled", options)
    if torch.device(options.device).type == "cuda":
        made["copy, eager"] = partial(copier, options)
    return made


class Step:
    """One step of an optimizer, callable, with the bytes of its states."""

    def __init__(self, optimizer: torch.optim.Optimizer, compiled: bool) -> None:
        self.optimizer = optimizer
        optimizer.step()  # makes the states
        self.run = torch.compile(optimizer.step) if compiled else optimizer.step

    def __call__(self) -> object:
        return self.run()


def stepper(name: str, compiled: bool, options: argparse.Namespace) -> Step:
    return Step(new_optimizer(name, options, compiled), compiled)


def copier(options: argparse.Namespace) -> Callable[[], object]:
    """A copy of 256 MB, more than any cache holds."""
    source = torch.empty(1 << 26, device=options.device)
    return partial(torch.empty_like(source).copy_, source)


def rows_of(rounds: harness.Rounds, options: argparse.Namespace) -> list[harness.Row]:
    """A row per optimizer and mode."""
    baseline, rows = f"{BASELINE}, eager", []
    copied = rounds.samples.get("copy, eager")
    for key in (*rounds.samples, *rounds.errors):
        name, _, mode = key.rpartition(", ")
        row: harness.Row = {"optimizer": name, "mode": mode, **rounds.row(key, baseline)}
        step = rounds.runs.get(key)
        if isinstance(step, Step):
            row |= weights_of(step.optimizer)
            if copied is not None:
                row |= bandwidth(row, rounds.samples[key], copied)
            elif name in OPTIONS and mode == "compiled":
                row["met"] = "yes" if row["ratio"] <= SLOWEST else "no"
        rows.append(row)
    return rows


def bandwidth(row: harness.Row, samples: Sequence[float], copied: Sequence[float]) -> harness.Row:
    """Bytes per second, and their share of a copy's in the same rounds."""
    moved = row["moved_bytes"] * row["parameters"]
    of_copy = 2 * 4 * (1 << 26)
    share = moved / of_copy / harness.paired_ratio(samples, copied)
    verdict = {"met": "yes" if share >= SHARE_OF_COPY else "no"}
    found = {"gb_per_s": moved / (row["ms"] * 1e-3) / 1e9, "share_of_copy": share}
    return found | (verdict if row["optimizer"] in OPTIONS else {})


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="small parameters, few rounds")
    parser.add_argument("--options", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    modes = ("eager", "compiled")
    parser.add_argument("--modes", nargs="+", choices=modes, default=list(modes))
    options = parser.parse_args(argv)
    options.shapes = QUICK if options.quick else SHAPES
    if options.quick:
        options.repeats, options.warmup = min(options.repeats, 3), 1
    rounds = harness.take_turns([makers(options)], options)
    report.publish("bench_optim", argv, options, rows_of(rounds, options), COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
