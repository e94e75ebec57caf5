"""How much time does the library's own code take, where GEMMs are too small to hide it?

Forward and backward of one layer on tiny matrices, eager: nearly all of the time is Python and the
dispatch of small operations. Layers of each recipe take turns:

    nn.Linear      three products and nothing else
    by hand        the recipe's casts and products in plain PyTorch (`by_hand.py`); on a CPU only
    float8         the library

    overhead = time(float8) / time(by hand), at most 1.5

Before timing, the outputs and gradients of the library's layer and the one by hand are
compared bitwise. On CUDA the host is timed until the device is done: the time that the host needs
to launch a step, which bounds small layers (`launches` counts the kernels). The layer by hand is
measured on the CPU only, because it multiplies in bfloat16. Compiled code has none of this cost. A
delayed step is measured without its `sync`, which a model calls once for all of its layers.

With --stub-gpu the host's part of a CUDA step is measured on a CPU: kernels are not launched, and
GEMMs return empty results (`stubbed_gpu.py`).

    python benchmarks/bench_overhead.py -o overhead.json
    python benchmarks/bench_overhead.py --device cuda --shapes 16,16,16 --recipes tensorwise
    python benchmarks/bench_overhead.py --stub-gpu -o host.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import contenders, harness, report, shapes
from benchmarks.measuring.by_hand import FUNCTIONS, ByHand
from benchmarks.measuring.contenders import BASELINE, Operands
from benchmarks.measuring.shapes import Shape
from benchmarks.measuring.step import launches
from benchmarks.measuring.stubbed_gpu import stubbed_gpu
from float8 import Float8Linear, sync_float8_amax_and_scale_history
from float8.linear.delayed import DelayedCast

BY_HAND = "by hand "
RECIPES = [*FUNCTIONS, "blockwise"]
MOST = 1.5
SHAPES = (Shape(16, 16, 16), Shape(32, 64, 64))
COLUMNS = {
    "shape": ("shape (M,K,N)", ""),
    "layer": ("layer", ""),
    "us": ("fwd+bwd us", ".0f"),
    "launches": ("launches", ".0f"),
    "ratio": ("time / nn.Linear", ".2f"),
    "overhead": ("time / by hand", ".2f"),
    "target": ("at most", ".1f"),
    "met": ("met", ""),
    "error": ("not run", ".80"),
}


def gradients(layer: nn.Module, operands: Operands) -> tuple[Tensor, ...]:
    """One forward and backward: grad_input and grad_weight, returned and not accumulated."""
    output = layer(operands.x)
    return torch.autograd.grad(output, (operands.x, operands.linear.weight), operands.grad_output)


def pair(recipe: str, operands: Operands) -> tuple[nn.Module, nn.Module | None]:
    """The library's layer and the one written by hand, if there is one, in the same state."""
    ours = contenders.float8_layer(operands, recipe)
    if recipe not in FUNCTIONS:
        return ours, None
    if recipe != "delayed":
        return ours, ByHand(operands.linear, FUNCTIONS[recipe])
    assert isinstance(ours, Float8Linear)
    gradients(ours, operands)  # the first step has dynamic scales
    casts = [cast for cast in ours.casts if isinstance(cast, DelayedCast)]
    for cast in casts:  # which a stubbed GPU does not write
        cast.current_amax.clamp_(min=1.0)
    sync_float8_amax_and_scale_history(ours)
    scales = torch.stack([cast.scale.reshape(()) for cast in casts])
    state = (scales.clone(), torch.zeros_like(scales))
    return ours, ByHand(operands.linear, FUNCTIONS[recipe], state)


def check_same(recipe: str, ours: nn.Module, by_hand: nn.Module, operands: Operands) -> None:
    """Refuse to compare layers that do not compute the same."""
    results = [(layer(operands.x), *gradients(layer, operands)) for layer in (ours, by_hand)]
    for name, one, other in zip(("output", "grad_input", "grad_weight"), *results, strict=True):
        if not torch.equal(one, other):
            decibels = harness.sqnr_db(one, other)
            raise AssertionError(
                f"{recipe}: the layer written by hand differs in its {name} ({decibels:.1f} dB): "
                "mend benchmarks/measuring/by_hand.py, or the layer"
            )


def makers(
    recipes: Sequence[str], operands: Operands, with_by_hand: bool
) -> dict[str, Callable[[], Callable[[], object]]]:
    layers: dict[str, nn.Module] = {BASELINE: operands.linear}
    for recipe in recipes:
        ours, by_hand = pair(recipe, operands)
        if with_by_hand and by_hand is not None:
            check_same(recipe, ours, by_hand, operands)
            layers[BY_HAND + recipe] = by_hand
        layers[recipe] = ours
    return {name: partial(partial, gradients, layer, operands) for name, layer in layers.items()}


def until_it_is_done(fn: Callable[[], object], calls: int) -> float:
    """Seconds of the host's time for so many calls, until the device has done them."""
    torch.cuda.synchronize()

    def run() -> None:
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()

    return harness.host_timer()(run, 1)


def measure(shape: Shape, options: argparse.Namespace) -> list[harness.Row]:
    """One row per layer, all timed in the same rounds."""
    operands = Operands.random(shape, options.device, options.seed)
    on_cpu = operands.x.device.type == "cpu"
    with_by_hand = on_cpu and not options.stub_gpu
    able, errors = harness.runnable(makers(options.recipes, operands, with_by_hand))
    timer = harness.host_timer() if on_cpu else until_it_is_done
    samples = harness.interleave(able, timer, repeats=options.repeats, warmup=options.warmup)
    rounds = harness.Rounds(able, errors, samples)
    rows: list[harness.Row] = []
    for name in (*rounds.samples, *rounds.errors):
        row: harness.Row = {**shape.row, "layer": name, **rounds.row(name, BASELINE)}
        rows.append(row)
        if name in rounds.errors:
            continue
        row["us"] = row["ms"] * 1e3
        if (launched := launches(rounds.runs[name], options.device)) is not None:
            row["launches"] = launched
        if BY_HAND + name in rounds.samples:
            by_hand = rounds.samples[BY_HAND + name]
            overhead = harness.paired_ratio(rounds.samples[name], by_hand)
            row |= {
                "overhead": overhead,
                "target": MOST,
                "met": "yes" if overhead <= MOST else "no",
            }
    return rows


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__doc__)
    shapes.add_option(parser)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--stub-gpu", action="store_true", help="the host's part of a CUDA step")
    parser.set_defaults(device="cpu")
    options = parser.parse_args(argv)
    options.shapes = shapes.chosen(options.shapes, SHAPES)
    if options.stub_gpu and options.device != "cpu":
        parser.error("--stub-gpu is for machines without a GPU: leave --device out")
    with stubbed_gpu() if options.stub_gpu else nullcontext():
        return run(argv, options)


def run(argv: Sequence[str], options: argparse.Namespace) -> int:
    """Measure all shapes, and report them."""
    if options.stub_gpu:
        torch.set_num_threads(1)  # nothing computes but the products of nn.Linear
    rows: list[harness.Row] = []
    try:
        for shape in harness.in_time(options.shapes, options.stop_after):
            rows += measure(shape, options)
            report.write("bench_overhead", argv, options, rows, COLUMNS)
    finally:  # an interrupted run keeps what it measured
        report.publish("bench_overhead", argv, options, rows, COLUMNS)
    return int(any(not row.get("refused", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
