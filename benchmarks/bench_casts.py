"""Are the cast kernels as fast as memory? Compares them with a copy.

A cast only moves bytes, so its limit is the bandwidth that a copy of a large buffer
reaches on this device, measured in the same rounds:

    of copy = (bytes per element that the kernel must move * elements / time) / copy bandwidth

A kernel should reach 90 % of it. `bytes/element` is the count in the kernel's docstring for a
bfloat16 source (read, written once per orientation; SwiGLU reads two). On a CPU there are no
kernels; there the same op runs in plain PyTorch.

    python benchmarks/bench_casts.py -o casts.json
    python benchmarks/bench_casts.py --shapes 8192,8192 --casts "static both"
"""

from __future__ import annotations

import argparse
import importlib
import itertools
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

E4M3 = torch.float8_e4m3fn
TARGET = 0.9  # of copy bandwidth
CPU_SHAPES, CUDA_SHAPES = ((2048, 4096),), ((8192, 8192), (16384, 28672))
COLUMNS = report.columns(
    "shape cast bytes_per_element ms min_ms max_ms gbps of_copy met error",
    shape="shape (M,K)", bytes_per_element="bytes/element", gbps="GB/s", met="at least 0.9",
)  # fmt: skip


@dataclass(frozen=True)
class Cast:
    """One op of `float8/kernels/gpu/`, in the file of its name; its arguments after x; bytes."""

    op: str
    arguments: tuple[Any, ...]
    bytes_per_element: float

    def on(self, x: Tensor) -> Callable[[], object]:
        """The op, with its arguments on the device of x."""
        importlib.import_module(f"float8.kernels.gpu.{self.op}")
        op = getattr(torch.ops.float8, self.op).default
        made: dict[Any, Callable[[Tensor], Tensor]]
        made = {ANOTHER: torch.randn_like, OFFSETS: _offsets}
        values = [made[a](x) if a in made else a for a in self.arguments]
        return partial(op, x, *[a.to(x.device) if isinstance(a, Tensor) else a for a in values])


def _offsets(x: Tensor) -> Tensor:
    """The ends of groups of rows: about 128 on average, few in the first groups."""
    parts = torch.linspace(0, 1, x.shape[0] // 128 + 2)[1:]
    return (parts.square() * x.shape[0]).to(x.device, torch.int32)


ANOTHER = "another matrix like x"
OFFSETS = "the ends of groups of rows"
SCALE = torch.full((1, 1), 0.01)
WHOLE, ROW = (-1, -1), (1, -1)
ONLY_ROWS, BOTH = (True, False), (True, True)  # orientations
TOKENS = "cast_tokens"


def _matrix(
    block: tuple[int, int], scale_format: str, wanted: tuple[bool, bool],
    scale: Tensor | None = None, finds_amax: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `cast` after x."""
    return scale, block, E4M3, scale_format, True, *wanted, finds_amax


def _tokens(
    block: tuple[int, int], scale_format: str, scale: Tensor | None = None, multiple: int = 16
) -> tuple[Any, ...]:
    """The arguments of `cast_tokens` after x."""
    return OFFSETS, block, E4M3, scale_format, scale, multiple, *BOTH


def _norm(is_layer_norm: bool, scale: Tensor | None) -> tuple[Any, ...]:
    """The arguments of `norm_cast` after x: a result in bfloat16, cast both ways."""
    return None, None, 1e-5, is_layer_norm, scale, torch.bfloat16, E4M3, False, True


CASTS = {
    "static rows": Cast("cast", _matrix(WHOLE, "float32", ONLY_ROWS, SCALE), 3),
    "static both": Cast("cast", _matrix(WHOLE, "float32", BOTH, SCALE), 4),
    "delayed both": Cast("cast", _matrix(WHOLE, "float32", BOTH, SCALE, finds_amax=True), 4),
    "dynamic rows": Cast("cast", _matrix(WHOLE, "float32", ONLY_ROWS), 5),
    "dynamic both": Cast("cast", _matrix(WHOLE, "float32", BOTH), 6),
    "rowwise rows": Cast("cast", _matrix(ROW, "power_of_two", ONLY_ROWS), 3),
    "rowwise both": Cast("cast", _matrix(ROW, "power_of_two", BOTH), 6),
    "1x128 both": Cast("cast", _matrix((1, 128), "power_of_two", BOTH), 4),
    "128x128 both": Cast("cast", _matrix((128, 128), "power_of_two", BOTH), 4),
    "1x32 both": Cast("cast", _matrix((1, 32), "e8m0", BOTH), 4),
    "1x32 tokens": Cast(TOKENS, _tokens((1, 32), "e8m0", multiple=128), 4),
    "static rms norm": Cast("norm_cast", _norm(False, SCALE), 4),
    "dynamic rms norm": Cast("norm_cast", _norm(False, None), 6),
    "static layer norm": Cast("norm_cast", _norm(True, SCALE), 4),
    "dynamic layer norm": Cast("norm_cast", _norm(True, None), 6),
    "static swiglu": Cast("swiglu_cast", (ANOTHER, SCALE, E4M3, False), 5),
    "dynamic swiglu": Cast("swiglu_cast", (ANOTHER, None, E4M3, False), 9),
    "static tokens": Cast(TOKENS, _tokens(WHOLE, "float32", SCALE), 4),
    "dynamic tokens": Cast(TOKENS, _tokens(WHOLE, "float32"), 6),
    "rowwise tokens": Cast(TOKENS, _tokens(ROW, "power_of_two"), 6),
    "1x128 tokens": Cast(TOKENS, _tokens((1, 128), "power_of_two"), 4),
}


def measure(work: tuple[tuple[int, int], str], options: argparse.Namespace) -> list[Row]:
    """One cast, timed in turns with a copy."""
    shape, name = work
    torch.manual_seed(options.seed)
    cast = CASTS[name]
    x = torch.randn(shape, device=options.device, dtype=torch.bfloat16)
    row: Row = {"shape": str(shape), "cast": name, "bytes_per_element": cast.bytes_per_element}
    makers = {harness.COPY: partial(harness.copier, options.device), name: partial(cast.on, x)}
    rounds = harness.take_turns(makers, options)
    row |= rounds.row(name, harness.COPY)
    row.pop("ratio", None)  # of a cast's time to another work's
    if name in rounds.samples:
        bandwidth = harness.COPIED / median(rounds.samples[harness.COPY])
        rate = cast.bytes_per_element * x.numel() / median(rounds.samples[name])
        row |= {"gbps": rate / 1e9, "of_copy": rate / bandwidth, "copy_gbps": bandwidth / 1e9}
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
    options = parser.parse_args(argv)
    shapes = options.shapes or (CPU_SHAPES if harness.on_cpu(options) else CUDA_SHAPES)
    work = list(itertools.product(shapes, options.casts))
    measured = partial(measure, options=options)
    return report.run("bench_casts", argv, options, work, measured, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
