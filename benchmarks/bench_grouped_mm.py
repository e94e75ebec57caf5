"""What does a float8 grouped GEMM cost, or gain, in a training step of a mixture of experts?

One step is forward and backward of one grouped GEMM, casts included:

    ratio = time(float8.grouped_mm) / time(torch.nn.functional.grouped_mm)    below 1: faster

in bfloat16, for the experts of four models (`measuring/shapes.py`). All candidates of a shape
share operands and groups, and are timed in turns. Weights of ``rowwise+cached`` and the like are
cast before the step (`float8.cached_weights`). The router is simulated: the size of a group is
uniform between 0 and twice the mean, and a multiple of 32, because torchao's grouped GEMMs need
that. These (torchao.prototype.moe_training) are measured where they are importable (`--no-peer`
leaves them out). On a CPU its MXFP8 is emulated, and its rowwise casts are refused: they are
Triton kernels.

`saved` is what autograd keeps from forward for backward, without parameters; `SQNR` compares
outputs; `launches` counts what a step puts on the CUDA stream. `moved` is what a step reads and
writes on CUDA beside padding: counted, not measured.

    python benchmarks/bench_grouped_mm.py -o grouped.json
    python benchmarks/bench_grouped_mm.py --shapes mixtral qwen3-30b.down 4096,512,1024,8
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import contenders, harness, report, shapes
from benchmarks.measuring.contenders import SCALED
from benchmarks.measuring.harness import Row
from benchmarks.measuring.report import PEER
from benchmarks.measuring.shapes import EXPERTS, Shape
from benchmarks.measuring.step import Step, compiled, in_turns, moved_by_casts
from float8 import (
    cached_weights,
    convert_to_float8_training,
    filters,
    grouped_mm,
    register_experts,
)
from float8.estimate import roofline
from float8.estimate.roofline import Shape as LayerShape
from float8.estimate.roofline import Use
from float8.linear.plan import plan_for

BASELINE, CACHED = "F.grouped_mm", "cached"
MULTIPLE = 32  # of the size of a group
ON_CPU = Shape(4096, 512, 1024, 8)
PEERS = {"rowwise": "_to_fp8_rowwise_then_scaled_grouped_mm",
         "mxfp8": "_to_mxfp8_then_scaled_grouped_mm"}  # fmt: skip
Product = Callable[[Tensor, Tensor, Tensor], Tensor]
COLUMNS = report.columns(
    "shape mode layer ms min_ms max_ms ratio tflops launches saved_mib saved_ratio moved_ratio "
    "sqnr_db error",
    shape="shape (T,K,N,E)", layer="grouped GEMM", ms="fwd+bwd ms", saved_ratio="saved / bf16",
    moved_ratio="moved / bf16 (CUDA)",
)  # fmt: skip


class Grouped(nn.Module):
    """``multiply(x, weight.mT, offs)``, an (E, N, K) weight being the module's parameter."""

    offs: Tensor

    def __init__(self, weight: nn.Parameter, offs: Tensor, multiply: Product) -> None:
        super().__init__()
        self.weight, self.multiply = weight, multiply
        self.register_buffer("offs", offs)

    def forward(self, x_TK: Tensor) -> Tensor:
        return self.multiply(x_TK, self.weight.mT, self.offs)


register_experts(Grouped)


def ends(shape: Shape, seed: int) -> Tensor:
    """(E,) int32: where a simulated router's groups end; the last one ends at T, or just before."""
    share = torch.rand(shape.E, generator=torch.Generator().manual_seed(seed)).cumsum(0)
    steps = shape.M // MULTIPLE
    return ((share / share[-1] * steps).round().int() * MULTIPLE).clamp(max=shape.M)


def function(name: str, on_cpu: bool) -> Product:
    """The grouped GEMM of a contender."""
    if name == BASELINE:
        return lambda x, w, offs: F.grouped_mm(x, w, offs=offs)
    if not name.startswith(PEER):
        return partial(grouped_mm, config=contenders.config_of(name))
    recipe = name.removeprefix(PEER)
    peer: Any = getattr(importlib.import_module("torchao.prototype.moe_training"), PEERS[recipe])
    options = {"pad_token_groups_for_grouped_mm": False}  # groups are multiples of 32
    if on_cpu and recipe == "mxfp8":
        common: Any = importlib.import_module("torchao.quantization.quantize_.common")
        options["kernel_preference"] = common.KernelPreference.EMULATED
    return partial(peer, **options)


def cached(layer: nn.Module, name: str) -> nn.Module:
    """The layer in float8, its weight cast now."""
    everything = filters.all_of()  # by default conversion leaves experts that lose
    converted: Any = convert_to_float8_training(
        layer, config=contenders.config_of(name), module_filter_fn=everything
    )
    converted.scope = cached_weights(converted)  # open as long as the layer lives
    converted.scope.__enter__()
    return converted


def moved_bytes(shape: Shape, recipe: str | None) -> float:
    """The bytes that one step reads and writes on CUDA, counted; None is bfloat16.

    Three grouped GEMMs and the casts of their operands, each operand read once, without padding.
    """
    sizes = LayerShape(shape.M, shape.K, shape.N, shape.E)
    plan = None
    if recipe is not None:
        plan = plan_for(contenders.config_of(recipe), "sm_90", torch.bfloat16, grouped=True)
    cast = recipe is None or CACHED not in recipe.split("+")
    kinds = roofline.kinds_of_plan(plan, Use())
    moved = sum(roofline.gemm_bytes(kind, sizes, name) for name, kind in kinds.items())
    elements = (shape.M * shape.K, cast * shape.E * shape.K * shape.N, shape.M * shape.N)
    return moved if plan is None else moved + moved_by_casts(plan, elements)[0]


def measure(work: tuple[Shape, str], options: argparse.Namespace) -> list[Row]:
    """One row per contender, all timed in the same rounds."""
    shape, mode = work
    torch.compiler.reset()
    torch.manual_seed(options.seed)
    random = partial(torch.randn, device=options.device, dtype=torch.bfloat16)
    weight = nn.Parameter(random(shape.E, shape.N, shape.K) * shape.K**-0.5)
    x, offs = random(shape.M, shape.K, requires_grad=True), ends(shape, options.seed)
    grad_output = random(shape.M, shape.N)

    def step(name: str) -> Step:
        is_cached = CACHED in name.split("+")
        multiply = function(BASELINE if is_cached else name, harness.on_cpu(options))
        layer: nn.Module = Grouped(weight, offs.to(options.device), multiply)
        if is_cached:
            layer = cached(layer, name)
        return Step(layer, compiled(layer, mode), x, grad_output)

    names = contenders.names(options, BASELINE, PEERS)
    rows = in_turns({n: partial(step, n) for n in names}, options, **shape.row, mode=mode)
    for row in rows:
        name = row["layer"]
        if "ms" in row:
            row["tflops"] = 3 * shape.flops / row["ms"] / 1e9
        if not name.startswith(PEER):
            moved = moved_bytes(shape, None if name == BASELINE else name)
            row["moved_mib"] = moved / 2**20
            row["moved_ratio"] = moved / moved_bytes(shape, None)
    return rows


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with what depends on the machine filled in."""
    parser = harness.parser(__doc__)
    shapes.add_option(parser, EXPERTS, "T,K,N,E")
    # Histories of amaxes belong to a layer's cast, which a function does not have.
    contenders.add_options(parser, tuple(recipe for recipe in SCALED if recipe != "delayed"))
    options = parser.parse_args(argv)
    contenders.check(parser, options)
    everything = [shape for group in EXPERTS.values() for shape in group]
    default = [ON_CPU] if harness.on_cpu(options) else everything
    options.shapes = shapes.chosen(options.shapes, default)
    return options


def main(argv: Sequence[str]) -> int:
    """Measure every shape; 1 if one of our grouped GEMMs failed (a refusal is no failure)."""
    options = parse(argv)
    work = [(shape, mode) for shape in options.shapes for mode in options.modes]
    measured = partial(measure, options=options)
    return report.run("bench_grouped_mm", argv, options, work, measured, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
