"""What does a float8 linear layer cost, or gain, in a training step, by recipe?

One step is what training does to one layer: gradients set to None (they are written, not
accumulated), forward, backward with a random `grad_output`, and for delayed scaling the `sync`
that a step owes it. Casts are inside the clock, so this is the whole price:

    ratio = time(layer) / time(nn.Linear)          below 1 where float8 is faster

All layers of a shape share one weight and one input, and take turns on the clock. With `--compile`
every layer is compiled, `nn.Linear` too: compiled is compared with compiled. Where torchao is
importable its layer of the same recipe takes its turn as well (`--no-peer` leaves it out); a peer
that cannot run shows its error and fails nothing.

`saved` is what autograd keeps from forward for backward: unique storages, parameters excluded.
`SQNR` compares a layer's output with nn.Linear's.

    python benchmarks/bench_linear.py --compile -o linear.json
    python benchmarks/bench_linear.py --shapes 2048,1024,4096 --recipes tensorwise delayed
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks import harness, report
from benchmarks.shapes import LLAMA2_70B, Shape, parse_shape
from float8 import (
    Float8Linear,
    Float8LinearConfig,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES

BASELINE = "nn.Linear"
PEER = "torchao "
PEER_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
COMPILERS = (os.environ.get("CXX", "g++"), "clang++")
CPU_SHAPES = (Shape(2048, 1024, 4096),)
COLUMNS = {
    "shape": ("shape (M,K,N)", ""),
    "layer": ("layer", ""),
    "ms": ("fwd+bwd ms", ".2f"),
    "min_ms": ("min", ".2f"),
    "max_ms": ("max", ".2f"),
    "ratio": ("time / nn.Linear", ".2f"),
    "tflops": ("TFLOP/s", ".3g"),
    "saved_mib": ("saved MiB", ".2f"),
    "saved_ratio": ("saved / nn.Linear", ".2f"),
    "sqnr_db": ("SQNR dB", ".1f"),
    "error": ("not run", ".80"),
}


@dataclass(frozen=True)
class Step:
    """One training step of one layer; `run` is the layer, compiled where asked."""

    layer: nn.Module
    run: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor
    grad_output: torch.Tensor

    def __call__(self) -> None:
        self.x.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None
        self.run(self.x).backward(self.grad_output)
        if isinstance(self.layer, Float8Linear) and self.layer.config.uses_delayed_scaling:
            sync_float8_amax_and_scale_history(self.layer)


def float8_layer(linear: nn.Linear, recipe: str) -> nn.Module:
    config = Float8LinearConfig.from_recipe_name(recipe)
    return Float8Linear.from_float(linear, config=config)


def torchao_layer(linear: nn.Linear, recipe: str) -> nn.Module:
    """The peer's layer of the same recipe; on a CPU it must be told to emulate."""
    peer = importlib.import_module("torchao.float8")
    config = peer.Float8LinearConfig.from_recipe_name(recipe)
    if linear.weight.device.type == "cpu":
        config = replace(config, emulate=True)
    converted: nn.Module = peer.convert_to_float8_training(nn.Sequential(linear), config=config)
    return converted.get_submodule("0")


def layers(options: argparse.Namespace) -> dict[str, Callable[[nn.Linear], nn.Module]]:
    """How each candidate is made from one nn.Linear; what ratios compare with comes first."""
    makers: dict[str, Callable[[nn.Linear], nn.Module]] = {BASELINE: lambda linear: linear}
    for recipe in options.recipes:
        makers[recipe] = partial(float8_layer, recipe=recipe)
        if options.peer and recipe in PEER_RECIPES:
            makers[PEER + recipe] = partial(torchao_layer, recipe=recipe)
    return makers


def step_makers(shape: Shape, options: argparse.Namespace) -> dict[str, Callable[[], Step]]:
    """A step per candidate, all on one weight, one random input and one random `grad_output`."""
    torch.manual_seed(options.seed)
    random = partial(torch.randn, device=options.device, dtype=torch.bfloat16)
    x, grad_output = random(shape.M, shape.K, requires_grad=True), random(shape.M, shape.N)
    linear = nn.Linear(shape.K, shape.N, False, options.device, torch.bfloat16)

    def make(build: Callable[[nn.Linear], nn.Module]) -> Step:
        layer = build(linear)
        run = torch.compile(layer, fullgraph=True, dynamic=False) if options.compile else layer
        return Step(layer, run, x, grad_output)

    return {name: partial(make, build) for name, build in layers(options).items()}


def saved_bytes(step: Step) -> int:
    """Bytes that autograd keeps from forward for backward: unique storages, not parameters."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = step.run(step.x)  # held, so that no storage is freed and its address used again
    for parameter in step.layer.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del output
    return sum(kept.values())


def measure(shape: Shape, options: argparse.Namespace) -> list[harness.Row]:
    """One row per layer, timed in turns."""
    torch.compiler.reset()  # so that no shape pays for the guards of the one before it
    # All candidates share nn.Module's call code, which may be compiled 8 times unless one asks.
    with torch._dynamo.config.patch(recompile_limit=64):
        steps, errors = harness.runnable(step_makers(shape, options))
        samples = harness.time_in_turns(steps, options)
    baseline = steps[BASELINE]
    rows: list[harness.Row] = []
    for name in layers(options):
        row: harness.Row = {"shape": str(shape), "layer": name}
        if name in steps:
            row |= harness.timing(samples[name], samples[BASELINE]) | weigh(steps[name], baseline)
            row["tflops"] = 3 * shape.flops / median(samples[name]) / 1e12  # three products a step
        else:
            row |= errors[name]
        rows.append(row)
    return rows


def weigh(step: Step, baseline: Step) -> harness.Row:
    """What a step keeps, and how near its output is, beside nn.Linear's."""
    saved = saved_bytes(step)
    row: harness.Row = {
        "saved_mib": saved / 2**20,
        "saved_ratio": saved / saved_bytes(baseline),
    }
    if step is not baseline:
        outputs = (each.run(step.x).detach() for each in (baseline, step))
        row["sqnr_db"] = harness.sqnr_db(*outputs)
    return row


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with what depends on the machine filled in."""
    parser = harness.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, metavar="M,K,N")
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--compile", action="store_true", help="compile every layer")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave torchao out")
    options = parser.parse_args(argv)
    on_cpu = torch.device(options.device).type == "cpu"
    if options.compile and on_cpu and not any(map(shutil.which, COMPILERS)):
        parser.error(
            f"--compile on a CPU needs a C++ compiler, none of {', '.join(COMPILERS)} found"
        )
    options.shapes = options.shapes or (CPU_SHAPES if on_cpu else LLAMA2_70B)
    options.peer = options.peer and importlib.util.find_spec("torchao") is not None
    return options


def main(argv: Sequence[str]) -> int:
    """Measure every shape; 1 if one of our layers failed (a refusal is no failure)."""
    options = parse(argv)
    rows: list[harness.Row] = []
    try:
        for shape in options.shapes:
            rows += measure(shape, options)
    finally:  # an interrupted run keeps what it measured
        report.publish("bench_linear", argv, options, rows, COLUMNS)
    ours = [row for row in rows if not row["layer"].startswith(PEER)]
    return int(any(not row.get("refused", True) for row in ours))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
