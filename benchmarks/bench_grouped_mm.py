"""What does a float8 grouped GEMM cost, or gain, in a training step of a mixture of experts?

One step is forward and backward of one grouped GEMM, casts included:

    ratio = time(float8.grouped_mm) / time(torch.nn.functional.grouped_mm)    below 1: faster

in bfloat16, for the experts of four models (`measuring/experts.py`, also for torchao's grouped
GEMMs, which are measured beside; `--no-peer` leaves them out). All candidates of a shape share
operands and groups, and are timed in turns.

`saved` is what autograd keeps from forward for backward, without parameters; `SQNR` compares
outputs; `launches` counts what a step puts on the CUDA stream. `moved` is what a step reads and
writes on CUDA beside padding: counted, not measured.

    python benchmarks/bench_grouped_mm.py -o grouped.json
    python benchmarks/bench_grouped_mm.py --shapes mixtral qwen3-30b.down 4096,512,1024,8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import contenders, experts, harness, report
from benchmarks.measuring.contenders import PEER
from benchmarks.measuring.experts import BASELINE, GROUPS, MODELS, NAMED, SMALL, TARGET, Shape
from benchmarks.measuring.step import Step, compare, room_to_compile, saved_bytes

COLUMNS = {
    "shape": ("shape (T,K,N,E)", ""),
    "mode": ("mode", ""),
    "layer": ("grouped GEMM", ""),
    "ms": ("fwd+bwd ms", ".2f"),
    "min_ms": ("min", ".2f"),
    "max_ms": ("max", ".2f"),
    "ratio": ("time / bf16", ".2f"),
    "tflops": ("TFLOP/s", ".3g"),
    "launches": ("launches", ".0f"),
    "saved_mib": ("saved MiB", ".2f"),
    "saved_ratio": ("saved / bf16", ".2f"),
    "moved_ratio": ("moved / bf16 (CUDA)", ".2f"),
    "sqnr_db": ("SQNR dB", ".1f"),
    "error": ("not run", ".80"),
}


def shapes_of(text: str) -> tuple[Shape, ...]:
    """``"4096,512,1024,8"``, a name or a group of names; for argparse."""
    if text in GROUPS:
        return GROUPS[text]
    if text in NAMED:
        return (NAMED[text],)
    sizes = [int(size) for size in text.split(",") if size.strip().isdecimal()]
    if len(sizes) != 4 or text.count(",") != 3 or 0 in sizes:
        raise argparse.ArgumentTypeError(
            "a shape is four positive numbers T,K,N,E or one of "
            f"{', '.join((*GROUPS, *NAMED))}, not {text!r}"
        )
    T, K, N, E = sizes
    return (Shape(T, K, N, E),)


def measure(
    shape: Shape, mode: str, options: argparse.Namespace, late: harness.Late = harness.never
) -> list[harness.Row]:
    """One row per contender, all timed in the same rounds."""
    torch.compiler.reset()
    operands = experts.Operands.random(shape, options.device, options.seed)
    listed = experts.names(options.recipes, options.peer)
    makers = {name: partial(experts.step, name, mode, operands) for name in listed}
    rows: list[harness.Row] = []
    with room_to_compile():
        rounds = harness.take_turns([makers], options, late)
        base = rounds.runs[BASELINE]
        for name in listed:
            row: harness.Row = {**shape.row, "layer": name, "mode": mode}
            row |= rounds.row(name, BASELINE)
            mine = rounds.runs.get(name)
            if isinstance(mine, Step) and isinstance(base, Step):
                row["tflops"] = 3 * shape.flops / row["ms"] / 1e9
                row |= compare(mine, base, options.device)
                row["saved_ratio"] = row["saved_mib"] * 2**20 / saved_bytes(base)
            if not name.startswith(PEER):
                moved = experts.moved_bytes(shape, None if name == BASELINE else name)
                row["moved_mib"] = moved / 2**20
                row["moved_ratio"] = moved / experts.moved_bytes(shape, None)
            rows.append(row)
    return rows


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with what depends on the machine filled in."""
    parser = harness.parser(__doc__)
    known = ", ".join((*GROUPS, *NAMED))
    parser.add_argument(
        "--shapes", nargs="+", type=shapes_of, metavar="T,K,N,E", help=f"sizes, or names: {known}"
    )
    contenders.add_options(parser, experts.RECIPES)
    options = parser.parse_args(argv)
    contenders.check(parser, options)
    on_cpu = torch.device(options.device).type == "cpu"
    everything = [shape for shapes in MODELS.values() for shape in shapes]
    given = [shape for shapes in options.shapes or () for shape in shapes]
    options.shapes = tuple(given or ((TARGET, *SMALL) if on_cpu else everything))
    return options


def main(argv: Sequence[str]) -> int:
    """Measure every shape; 1 if one of our grouped GEMMs failed (a refusal is no failure)."""
    options = parse(argv)
    rows: list[harness.Row] = []
    late = harness.countdown(options.stop_after)
    work = [(shape, mode) for shape in options.shapes for mode in options.modes]
    try:
        for shape, mode in harness.in_time(work, options.stop_after):
            rows += measure(shape, mode, options, late)
            report.write("bench_grouped_mm", argv, options, rows, COLUMNS)
    finally:  # an interrupted run keeps what it measured
        report.publish("bench_grouped_mm", argv, options, rows, COLUMNS)
    ours = [row for row in rows if not row["layer"].startswith(PEER)]
    return int(any(not row.get("refused", True) for row in ours))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
