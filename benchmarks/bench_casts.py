"""Are the cast kernels as fast as memory? Compares them with a copy, torch eager and torch.compile.

A cast only moves bytes, so its limit is the bandwidth that a copy of a large buffer
reaches on this device, measured in the same rounds:

    of copy = (bytes per element that the kernel must move * elements / time) / copy bandwidth

A kernel should reach 90 % of it. `bytes/element` is the count in the kernel's docstring for a
bfloat16 source (read, written once per orientation; SwiGLU reads two). Three contenders do the same
work: `kernel` is what the library runs on CUDA, `eager` the same op in plain PyTorch, `compiled`
that under torch.compile. Kernels are measured first, on the first shape and then on the others, so
that a short run on a GPU has them. On a CPU there are no kernels; there the library runs `eager`.

    python benchmarks/bench_casts.py -o casts.json
    python benchmarks/bench_casts.py --shapes 8192,8192 --casts "static both" --contenders kernel
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import harness, report
from benchmarks.measuring.harness import Row

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KERNEL, EAGER, COMPILED = "kernel", "eager", "compiled"
CONTENDERS = (KERNEL, EAGER, COMPILED)  # in the order in which they are measured
TARGET = 0.9  # of copy bandwidth
CPU_SHAPES, CUDA_SHAPES = ((2048, 4096),), ((8192, 8192), (16384, 28672))
COLUMNS = report.columns(
    "shape cast contender bytes_per_element ms min_ms max_ms gbps of_copy met error",
    shape="shape (M,K)", bytes_per_element="bytes/element", gbps="GB/s", met="at least 0.9",
)  # fmt: skip


@dataclass(frozen=True)
class Cast:
    """One op of `float8/kernels/gpu/`: its file, name, arguments after x, and bytes moved."""

    file: str
    op: str
    arguments: tuple[Any, ...]
    bytes_per_element: float
    compiles: bool = True  # whether the definition in plain PyTorch does

    def on(self, x: Tensor) -> Callable[[], object]:
        """The registered op: the kernel on CUDA."""
        importlib.import_module(f"float8.kernels.gpu.{self.file}")
        op = getattr(torch.ops.float8, self.op).default
        return partial(op, x, *self.arguments_for(x))

    def in_torch(self, x: Tensor, compiled: bool = False) -> Callable[[], object]:
        """The op's definition in plain PyTorch."""
        function = importlib.import_module(f"float8.kernels.gpu.{self.file}")._definition
        if compiled:
            function = torch.compile(function, fullgraph=True, dynamic=False)
        return partial(function, x, *self.arguments_for(x))

    def arguments_for(self, x: Tensor) -> list[Any]:
        """Those of the op after x, on its device."""
        made: dict[str, Callable[[Tensor], Tensor]]
        made = {ANOTHER: torch.randn_like, OFFSETS: _offsets}
        values = [made[a](x) if isinstance(a, str) and a in made else a for a in self.arguments]
        return [a.to(x.device) if isinstance(a, Tensor) else a for a in values]


def _offsets(x: Tensor) -> Tensor:
    """The ends of groups of rows: about 128 on average, few in the first groups."""
    parts = torch.linspace(0, 1, x.shape[0] // 128 + 2)[1:]
    return (parts.square() * x.shape[0]).to(x.device, torch.int32)


ANOTHER = "another matrix like x"
OFFSETS = "the ends of groups of rows"
SCALE = torch.full((1, 1), 0.01)
NORMED = (torch.bfloat16, E4M3, False, True)  # a norm's result in bfloat16, cast both ways


NORM, TOKENS = "norm_cast", "cast_tokens"
BOTH = (True, True)  # orientations: the last two flags of an op's arguments


def _tokens(rows: int, cols: int, bytes_per_element: float, scale: Tensor | None = None) -> Cast:
    """`cast_tokens` in both orientations."""
    scale_format = "float32" if rows == -1 else "power_of_two"
    arguments = (OFFSETS, (rows, cols), E4M3, scale_format, scale, 16, *BOTH)
    return Cast(TOKENS, TOKENS, arguments, bytes_per_element, compiles=False)


def _matrix(
    block: tuple[int, int], scale_format: str, wanted: tuple[bool, bool],
    scale: Tensor | None = None, finds_amax: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `cast` after x."""
    return scale, block, E4M3, scale_format, True, *wanted, finds_amax


WHOLE, ONLY_ROWS = (-1, -1), (True, False)
MX_TOKENS = (OFFSETS, (1, 32), E4M3, "e8m0", None, 128, *BOTH)
# name -> file, op, arguments, bytes per element; and the ops of experts' tokens
ROWS: dict[str, tuple[Any, ...]] = {
    "static rows": ("cast", "cast", _matrix(WHOLE, "float32", ONLY_ROWS, scale=SCALE), 3),
    "static both": ("cast", "cast", _matrix(WHOLE, "float32", BOTH, scale=SCALE), 4),
    "delayed both": (
        "cast",
        "cast",
        _matrix(WHOLE, "float32", BOTH, SCALE, finds_amax=True),
        4,
    ),
    "dynamic rows": ("cast", "cast", _matrix(WHOLE, "float32", ONLY_ROWS), 5),
    "dynamic both": ("cast", "cast", _matrix(WHOLE, "float32", BOTH), 6),
    "rowwise rows": ("cast", "cast", _matrix((1, -1), "power_of_two", ONLY_ROWS), 3),
    "rowwise both": ("cast", "cast", _matrix((1, -1), "power_of_two", BOTH), 6),
    "1x128 both": ("cast", "cast", _matrix((1, 128), "power_of_two", BOTH), 4),
    "128x128 both": ("cast", "cast", _matrix((128, 128), "power_of_two", BOTH), 4),
    "1x32 both": ("cast", "cast", _matrix((1, 32), "e8m0", BOTH), 4),
    "1x32 tokens": (TOKENS, TOKENS, MX_TOKENS, 4, False),
    "static rms norm": (NORM, NORM, (None, None, 1e-5, False, SCALE, *NORMED), 4),
    "dynamic rms norm": (NORM, NORM, (None, None, 1e-5, False, None, *NORMED), 6),
    "static layer norm": (NORM, NORM, (None, None, 1e-5, True, SCALE, *NORMED), 4),
    "dynamic layer norm": (NORM, NORM, (None, None, 1e-5, True, None, *NORMED), 6),
    "static swiglu": ("swiglu_cast", "swiglu_cast", (ANOTHER, SCALE, E4M3, False), 5),
    "dynamic swiglu": ("swiglu_cast", "swiglu_cast", (ANOTHER, None, E4M3, False), 9),
}
CASTS = {name: Cast(*row) for name, row in ROWS.items()} | {
    "static tokens": _tokens(-1, -1, 4, SCALE),
    "dynamic tokens": _tokens(-1, -1, 6),
    "rowwise tokens": _tokens(1, -1, 6),
    "1x128 tokens": _tokens(1, 128, 4),
}


def measure(work: tuple[str, tuple[int, int], str], options: argparse.Namespace) -> list[Row]:
    """One contender, timed in turns with a copy."""
    contender, shape, name = work
    torch.manual_seed(options.seed)
    cast = CASTS[name]
    x = torch.randn(shape, device=options.device, dtype=torch.bfloat16)
    make = (
        cast.on if contender == KERNEL else partial(cast.in_torch, compiled=contender == COMPILED)
    )
    row: Row = {"shape": str(shape), "cast": name, "contender": contender}
    row["bytes_per_element"] = cast.bytes_per_element
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        makers = {
            harness.COPY: partial(harness.copier, options.device),
            contender: partial(make, x),
        }
        rounds = harness.take_turns(makers, options)
    row |= rounds.row(contender, harness.COPY)
    row.pop("ratio", None)  # of a cast's time to another work's
    if contender in rounds.samples:
        bandwidth = harness.COPIED / median(rounds.samples[harness.COPY])
        rate = cast.bytes_per_element * x.numel() / median(rounds.samples[contender])
        row |= {"gbps": rate / 1e9, "of_copy": rate / bandwidth, "copy_gbps": bandwidth / 1e9}
        if contender == KERNEL:
            row["met"] = "yes" if row["of_copy"] >= TARGET else "no"
    return [row]


def matrix(text: str) -> tuple[int, int]:
    """`M,K`, for argparse."""
    numbers = text.split(",")
    if len(numbers) != 2 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise argparse.ArgumentTypeError(f"a shape is M,K, not {text!r}")
    return int(numbers[0]), int(numbers[1])


def main(argv: Sequence[str]) -> int:
    """Measure every cast of every shape; 1 if one failed."""
    parser = harness.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", type=matrix, metavar="M,K")
    parser.add_argument("--casts", nargs="+", choices=list(CASTS), default=list(CASTS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    options = parser.parse_args(argv)
    on_cpu = harness.on_cpu(options)
    work = [
        (contender, shape, name)
        for contender in CONTENDERS
        if contender in options.contenders and not (contender == KERNEL and on_cpu)
        for shape in options.shapes or (CPU_SHAPES if on_cpu else CUDA_SHAPES)
        for name in options.casts
        if contender != COMPILED or CASTS[name].compiles
    ]
    measured = partial(measure, options=options)
    return report.run("bench_casts", argv, options, work, measured, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
