"""What does float8 gain in a whole model: tokens per second and peak memory, by recipe?

The model is a stack of LLaMA-3-8B blocks (`models/transformer.py`), bfloat16 throughout, on one
device. Norms, rotation, attention and SwiGLU stay in bfloat16 in every recipe: their time makes a
model's speed-up less than a layer's. A step is forward, backward with a random gradient, and the
`sync` that delayed scaling owes; no optimizer, which costs the same in every recipe. So

    ratio    = time(recipe) / time(bf16), both eager or both compiled
    tokens/s = tokens of a step / median time

All models share their parameters and take turns on the clock. Compiled is block by block, as it is
done for long stacks: equal blocks share one graph. `SQNR` compares the models' outputs, in which
the errors of all blocks add up.

Peak memory is measured afterwards, each model alone in a process of its own: what is allocated
during one step, which is parameters, their gradients, what is kept for backward, and temporary
buffers. On a CPU it is the size of the process, the program included.

    python benchmarks/bench_model.py --modes eager compiled -o model.json
    python benchmarks/bench_model.py --size tiny --recipes tensorwise

With ``--unit`` the model is unit-scaled, and recipe `unit`, which measures no scale, is compared:

    time / unit = time(recipe) / time(unit): what measuring scales costs

    python benchmarks/bench_model.py --unit --recipes tensorwise delayed unit
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import contenders, harness, report
from benchmarks.measuring.alone import alone, peak_bytes
from benchmarks.measuring.harness import Row
from benchmarks.measuring.step import Step, in_turns
from benchmarks.models.transformer import LLAMA, Stack, unit_stack

UNIT = "unit"
COLUMNS = report.columns(
    "mode layer ms min_ms max_ms tokens_s ratio ratio_to_unit launches saved_mib peak_gib sqnr_db "
    "error",
    layer="linear layers", ms="fwd+bwd ms", ratio_to_unit="time / unit",
)  # fmt: skip


class Operands(NamedTuple):
    """What all contenders share: a plain model, x_BTC, g_BTC."""

    plain: nn.Module
    x: Tensor
    grad_output: Tensor

    @classmethod
    def random(cls, options: argparse.Namespace) -> Operands:
        sizes = replace(LLAMA[options.size], layers=options.blocks)
        torch.manual_seed(options.seed)
        plain = (unit_stack if options.unit else Stack)(sizes).to(options.device, torch.bfloat16)
        batch = (sizes.batch, sizes.context, sizes.width)
        random = partial(torch.randn, device=options.device, dtype=torch.bfloat16)
        return cls(plain, random(batch, requires_grad=True), random(batch))


def step(name: str, mode: str, operands: Operands) -> Step:
    """A training step of a contender, eager or compiled."""
    model = contenders.model_of(name, operands.plain)
    for block in model.children() if mode == "compiled" else ():
        block.compile(fullgraph=True, dynamic=False)
    return Step(model, model, operands.x, operands.grad_output)


def peak(name: str, mode: str, options: argparse.Namespace) -> Row:
    """The peak memory of a contender, if this process has no other."""
    run = step(name, mode, Operands.random(options))
    return {"peak_gib": peak_bytes(run, options.device) / 2**30}


def measure(mode: str, options: argparse.Namespace) -> list[Row]:
    """One row per contender: all timed in the same rounds, then the memory of each alone."""
    rows = timed(mode, options)
    for row in rows:
        if harness.is_late(options):
            row.setdefault("error", "peak not measured, for lack of time")
        elif "ms" in row:
            row.update(alone(peak, row["layer"], mode, options))
    return rows


def timed(mode: str, options: argparse.Namespace) -> list[Row]:
    operands = Operands.random(options)
    makers = {name: partial(step, name, mode, operands) for name in contenders.names(options)}
    rows = in_turns(makers, options, mode=mode)
    samples = {row["layer"]: row["samples_s"] for row in rows if "samples_s" in row}
    for row in rows:
        if "ms" in row:
            row["tokens_s"] = operands.x.shape[:-1].numel() / row["ms"] * 1e3
            if UNIT in samples:
                row["ratio_to_unit"] = harness.paired_ratio(row["samples_s"], samples[UNIT])
    return rows


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with what depends on the machine filled in."""
    parser = harness.parser(__doc__, repeats=10)
    contenders.add_options(parser, contenders.SCALED, UNIT)
    parser.add_argument("--unit", action="store_true", help="a unit-scaled model")
    default = "default: 8b on CUDA, else tiny"
    parser.add_argument("--size", choices=("8b", "tiny"), help=default)
    parser.add_argument("--blocks", type=harness.positive, help="default: what the size says")
    options = parser.parse_args(argv)
    contenders.check(parser, options)
    options.peer = options.peer and not options.unit
    options.size = options.size or ("tiny" if harness.on_cpu(options) else "8b")
    options.blocks = options.blocks or LLAMA[options.size].layers
    return options


def main(argv: Sequence[str]) -> int:
    """Measure the model; 1 if one of our recipes failed (a refusal is no failure)."""
    options = parse(argv)
    measured = partial(measure, options=options)
    return report.run("bench_model", argv, options, options.modes, measured, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
