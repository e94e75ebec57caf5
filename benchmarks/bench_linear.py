"""What does a float8 linear layer cost, or gain, in a training step, by recipe?

One step is a training step of one layer (`step.py`), casts included:

    ratio = time(layer) / time(nn.Linear)          below 1 where float8 is faster

All layers of a shape share one weight and one input, and are timed in turns. With `--modes eager
compiled graphed` each layer runs in each mode, eager first (`graphed`: compiled, by CUDA graphs);
ratios compare within a mode. The file gets the rows of each mode as soon as they are measured.
After `--stop-after` no further layer is compiled; those that exist are timed. If torchao is
importable, its layer of the same recipe is measured too (`--no-peer` leaves it out); an error of
its layer is a row and fails nothing.

`saved` is what autograd keeps from forward for backward: unique storages, parameters excluded.
`SQNR` compares a layer's output with nn.Linear's. `launches` counts kernels, copies and fills of
a step on the CUDA stream.

With `--stub-gpu FAMILY` the host's part of an eager step on that GPU is measured on a CPU: kernels
are not launched, and GEMMs return empty results (`stubbed_gpu.py`). Beside it stands from which N
on a layer (N, N) with `TOKENS` tokens is faster than nn.Linear, by the time that `float8.estimate`
predicts for its GPU: `eager from`, where a step takes the longer of the two times, and `graphed
from`, where the host takes none. `delayed` pays for a `sync` of its own, which layers share.

    python benchmarks/bench_linear.py --modes eager compiled -o linear.json
    python benchmarks/bench_linear.py --shapes 8b squares 2048,1024,4096 --recipes rowwise
    python benchmarks/bench_linear.py --stub-gpu sm_90 --repeats 100
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import contenders, harness, report, shapes
from benchmarks.measuring.contenders import BASELINE, SCALED, STATIC
from benchmarks.measuring.harness import Row
from benchmarks.measuring.report import PEER
from benchmarks.measuring.shapes import LLAMA3_8B, LLAMA3_70B, SQUARES, Shape
from benchmarks.measuring.step import STUBBED, Step, compiled, in_turns
from benchmarks.measuring.stubbed_gpu import stubbed_gpu
from float8 import CastConfig, Float8Linear, Float8LinearConfig, ScalingType
from float8.estimate.devices import DEVICES
from float8.estimate.roofline import Shape as Size
from float8.estimate.roofline import Use, layer_seconds
from float8.kernels.casts import KERNELS
from float8.linear.plan import LinearPlan, plan_for

CPU_SHAPES = (Shape(2048, 1024, 4096),)
STUBBED_SHAPES = (Shape(32, 32, 32),)  # nothing computes but the products of nn.Linear
GPUS = {"sm_90": "H100", "sm_100": "B200"}  # what a stubbed family stands for
TOKENS, WIDTHS = 4096, range(256, 16385, 256)
COLUMNS = report.columns(
    "shape mode layer ms min_ms max_ms ratio tflops launches saved_mib saved_ratio sqnr_db "
    "eager_from graphed_from error",
    shape="shape (M,K,N)", ms="fwd+bwd ms", ratio="time / nn.Linear",
    saved_ratio="saved / nn.Linear",
)  # fmt: skip


class Operands(NamedTuple):
    """What all contenders of a shape share: x_MK, w_NK in a plain layer, g_MN."""

    x: Tensor
    linear: nn.Linear
    grad_output: Tensor

    @classmethod
    def random(cls, shape: Shape, device: str, seed: int) -> Operands:
        torch.manual_seed(seed)
        random = partial(torch.randn, device=device, dtype=torch.bfloat16)
        x, grad_output = random(shape.M, shape.K, requires_grad=True), random(shape.M, shape.N)
        return cls(x, nn.Linear(shape.K, shape.N, False, device, torch.bfloat16), grad_output)


def config_of(recipe: str, operands: Operands) -> Float8LinearConfig:
    """A recipe's; of `static` the smallest constant scales for these operands."""
    if recipe != STATIC:
        return contenders.config_of(recipe)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2

    def cast(x: Tensor, dtype: torch.dtype) -> CastConfig:
        scale = x.detach().abs().max().item() / torch.finfo(dtype).max
        return CastConfig(ScalingType.STATIC, target_dtype=dtype, static_scale=scale)

    x, w, g = operands.x, operands.linear.weight, operands.grad_output
    return Float8LinearConfig(cast(x, e4m3), cast(w, e4m3), cast(g, e5m2))


def step(name: str, mode: str, operands: Operands) -> Step:
    """A training step of a contender, eager or compiled."""
    layer: nn.Module = operands.linear
    if name.startswith(PEER):
        recipe = name.removeprefix(PEER)
        layer = contenders.torchao_model(nn.Sequential(layer), recipe).get_submodule("0")
    elif name != BASELINE:
        layer = Float8Linear.from_float(operands.linear, config=config_of(name, operands))
    return Step(layer, compiled(layer, mode), operands.x, operands.grad_output)


def measure(work: tuple[Shape, str], options: argparse.Namespace) -> list[Row]:
    """One row per layer, all timed in the same rounds."""
    shape, mode = work
    torch.compiler.reset()  # so that no layer pays for the guards of layers compiled before
    operands = Operands.random(shape, options.device, options.seed)
    makers = {name: partial(step, name, mode, operands) for name in contenders.names(options)}
    rows = in_turns(makers, options, **shape.row, mode=mode)
    for row in rows:
        if "ms" in row:
            row["tflops"] = 3 * shape.flops / row["ms"] / 1e9  # three products a step
    if options.stub_gpu in GPUS:
        widths(rows, options.stub_gpu)
    return rows


def widths(rows: list[Row], family: str) -> None:
    """Add to each row from which width on its layer gains, by the fastest sample of the host."""

    def gains_from(hosts_ms: tuple[float, float], plan: LinearPlan) -> int:
        device, gains = DEVICES[GPUS[family]], WIDTHS.stop
        for n in reversed(WIDTHS):
            base, ours = [
                max(layer_seconds(device, Size(TOKENS, n, n), each, Use()).total, host / 1e3)
                for each, host in zip((None, plan), hosts_ms, strict=True)
            ]
            if ours >= base:
                break
            gains = n
        return gains

    for row in rows[1:]:
        if "ms" in row and row["layer"] != STATIC:
            plan = plan_for(contenders.config_of(row["layer"]), family, torch.bfloat16)
            row["eager_from"] = gains_from((rows[0]["min_ms"], row["min_ms"]), plan)
            row["graphed_from"] = gains_from((0.0, 0.0), plan)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with what depends on the machine filled in."""
    parser = harness.parser(__doc__)
    shapes.add_option(parser, shapes.LINEAR)
    contenders.add_options(parser, (*SCALED, STATIC))
    parser.add_argument("--stub-gpu", choices=KERNELS, help="the host's part of a CUDA step")
    options = parser.parse_args(argv)
    contenders.check(parser, options)
    on_cpu = harness.on_cpu(options)
    default = CPU_SHAPES if on_cpu else (*LLAMA3_70B, *LLAMA3_8B, *SQUARES)
    if options.stub_gpu:
        harness.TARGET_S = 1e-3  # other processes disturb few of the short samples
        options.device, options.modes, options.peer = "cpu", [STUBBED], False
        default = STUBBED_SHAPES
    options.shapes = shapes.chosen(options.shapes, default)
    return options


def main(argv: Sequence[str]) -> int:
    """Measure every shape; 1 if one of our layers failed (a refusal is no failure)."""
    options = parse(argv)
    work = [(shape, mode) for shape in options.shapes for mode in options.modes]
    measured = partial(measure, options=options)
    with stubbed_gpu(options.stub_gpu) if options.stub_gpu else nullcontext():
        return report.run("bench_linear", argv, options, work, measured, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
