"""What does a float8 linear layer cost, or gain, in a training step, by recipe?

One step is a training step of one layer (`step.py`), casts included:

    ratio = time(layer) / time(nn.Linear)          below 1 where float8 is faster

All layers of a shape share one weight and one input, and are timed in turns. With `--modes eager
compiled` each layer runs in both modes, eager first; ratios compare within a mode. The file gets
the rows of each mode as soon as they are measured. After `--stop-after` no further layer is
compiled; those that exist are timed. If torchao is importable, its layer of the same recipe is
measured too (`--no-peer` leaves it out); an error of its layer is a row and fails nothing.

`saved` is what autograd keeps from forward for backward: unique storages, parameters excluded.
`SQNR` compares a layer's output with nn.Linear's. `launches` counts kernels, copies and fills of a
step on the CUDA stream. `of limit` compares a layer with the lower bound of its time (`limit.py`,
on CUDA); rows called `floor` are the lower bound of emulation (`floor.py`, on a CPU). `targets.py`
has the speed-ups to reach.

    python benchmarks/bench_linear.py --modes eager compiled -o linear.json
    python benchmarks/bench_linear.py --shapes 8b squares 2048,1024,4096 --recipes rowwise
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import contenders, harness, limit, report, shapes, targets
from benchmarks.measuring.contenders import BASELINE, PEER, Operands
from benchmarks.measuring.floor import FLOOR, floor
from benchmarks.measuring.shapes import LLAMA3_8B, LLAMA3_70B, SQUARES, Shape
from benchmarks.measuring.step import Step, compare, room_to_compile, saved_bytes
from float8.kernels.casts import COMPILED, compiler_may_cast
from float8.kernels.scaled_mm import family_of

FLOORS = ("tensorwise", "rowwise", "blockwise", "mxfp8")  # the others cast as one of these does
CPU_SHAPES = (Shape(2048, 1024, 4096),)
COLUMNS = {
    "shape": ("shape (M,K,N)", ""),
    "mode": ("mode", ""),
    "layer": ("layer", ""),
    "ms": ("fwd+bwd ms", ".2f"),
    "min_ms": ("min", ".2f"),
    "max_ms": ("max", ".2f"),
    "ratio": ("time / nn.Linear", ".2f"),
    "of_limit": ("of limit", ".0%"),
    "tflops": ("TFLOP/s", ".3g"),
    "launches": ("launches", ".0f"),
    "saved_mib": ("saved MiB", ".2f"),
    "saved_ratio": ("saved / nn.Linear", ".2f"),
    "sqnr_db": ("SQNR dB", ".1f"),
    "error": ("not run", ".80"),
}
Maker = Callable[[], Callable[[], object]]


def key(mode: str, name: str) -> str:
    return f"{mode} {name}"


def names(options: argparse.Namespace) -> list[str]:
    """The rows of one shape and mode: the contenders, and the floors of emulation."""
    floors = [r for r in options.recipes if r in FLOORS] if options.floor else []
    return [*contenders.names(options), *(FLOOR + recipe for recipe in floors)]


def candidate(name: str, mode: str, operands: Operands) -> Callable[[], object]:
    """The function that is timed for one row."""
    if name.startswith(FLOOR):
        plan = contenders.config_of(name.removeprefix(FLOOR), operands).plan
        return floor(plan, contenders.step(BASELINE, mode, operands), mode)
    return contenders.step(name, mode, operands)


def makers(mode: str, operands: Operands, options: argparse.Namespace) -> dict[str, Maker]:
    """The layers timed in one mode, nn.Linear first."""
    return {key(mode, n): partial(candidate, n, mode, operands) for n in names(options)}


def measure(
    shape: Shape, mode: str, options: argparse.Namespace, late: harness.Late = harness.never
) -> list[harness.Row]:
    """One row per layer, all timed in the same rounds."""
    torch.compiler.reset()  # so that no layer pays for the guards of layers compiled before
    operands = Operands.random(shape, options.device, options.seed)
    groups = [makers(mode, operands, options)]
    if options.limit:  # before what may take long to compile
        configs = [contenders.config_of(recipe, operands) for recipe in options.recipes]
        groups.insert(0, limit.makers(configs, operands))
    rows: list[harness.Row] = []
    with room_to_compile():
        rounds = harness.take_turns(groups, options, late)
        for name in names(options):
            row: harness.Row = {**shape.row, "layer": name, "mode": mode}
            row |= rounds.row(key(mode, name), key(mode, BASELINE))
            mine, base = rounds.runs.get(key(mode, name)), rounds.runs[key(mode, BASELINE)]
            if isinstance(mine, Step) and isinstance(base, Step):
                row["tflops"] = 3 * shape.flops / row["ms"] / 1e9  # three products a step
                row |= compare(mine, base, options.device)
                row["saved_ratio"] = row["saved_mib"] * 2**20 / saved_bytes(base)
                row |= nearness(name, mode, shape, operands, rounds)
            rows.append(row)
    return rows


def nearness(
    name: str, mode: str, shape: Shape, operands: Operands, rounds: harness.Rounds
) -> harness.Row:
    """How near a float8 layer is to the limit of its recipe, where that was measured."""
    copy = rounds.runs.get(limit.COPY)
    if name == BASELINE or not isinstance(copy, limit.Copy):
        return {}
    plan = contenders.config_of(contenders.recipe_of(name), operands).plan
    least = limit.seconds(shape, plan, rounds.samples, copy.bytes_moved)
    if least is None:
        return {}
    of_limit = harness.paired_ratio(least, rounds.samples[key(mode, name)])
    return {"limit_ms": median(least) * 1e3, "of_limit": of_limit}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with what depends on the machine filled in."""
    parser = harness.parser(__doc__)
    shapes.add_option(parser)
    contenders.add_options(parser, contenders.ALL_RECIPES)
    on_or_off = argparse.BooleanOptionalAction
    parser.add_argument("--limit", action=on_or_off, help="measure the limit (default: on CUDA)")
    parser.add_argument("--floor", action=on_or_off, help="measure the floor (default: on a CPU)")
    parser.add_argument(
        "--compiled-casts",
        choices=("kernel", "aten"),
        help="what torch.compile does with casts on CUDA, instead of float8.kernels.casts.COMPILED",
    )
    options = parser.parse_args(argv)
    contenders.check(parser, options)
    on_cpu = torch.device(options.device).type == "cpu"
    default = CPU_SHAPES if on_cpu else (*LLAMA3_70B, *LLAMA3_8B, *SQUARES)
    options.shapes = shapes.chosen(options.shapes, default)
    options.limit = not on_cpu if options.limit is None else options.limit
    options.floor = on_cpu if options.floor is None else options.floor
    return options


def main(argv: Sequence[str]) -> int:
    """Measure every shape; 1 if one of our layers failed (a refusal is no failure)."""
    options = parse(argv)
    if options.compiled_casts == "aten" and not compiler_may_cast(
        family_of(torch.device(options.device))
    ):
        print(
            "bench_linear: nothing is measured: the layers leave no cast to the compiler where "
            "Triton's ptxas is older than 13.1 (TRITON_PTXAS_PATH names another)"
        )
        return 0
    for file in COMPILED if options.compiled_casts else ():
        COMPILED[file] = (options.compiled_casts, "asked for")
    rows: list[harness.Row] = []
    on_cuda = torch.device(options.device).type == "cuda"
    late = harness.countdown(options.stop_after)
    work = [(shape, mode) for shape in options.shapes for mode in options.modes]
    try:
        for shape, mode in harness.in_time(work, options.stop_after):
            rows += measure(shape, mode, options, late)
            report.write("bench_linear", argv, options, rows, COLUMNS)
    finally:  # an interrupted run keeps what it measured
        judged = targets.summary(rows) if on_cuda else ()
        report.publish("bench_linear", argv, options, rows, COLUMNS, judged)
    ours = [row for row in rows if not row["layer"].startswith(PEER)]
    return int(any(not row.get("refused", True) for row in ours))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
