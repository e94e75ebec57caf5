"""How much faster is a scaled float8 product than a bf16 one, by scaling granularity?

    out_MN = (a_MK * a_scale) @ (b_NK * b_scale).T        float8 operands, bf16 result

Both operands are cast before timing starts: this is the GEMM alone, the most that float8 can gain.
`bench_linear.py` includes the casts. `b` is row-major (N, K), so that `b.T`
is column-major: the one layout that Hopper's FP8 tensor cores take. On a CPU the product is
emulated (dequantise, then multiply), and is expected to be slower than bf16.

`ratio` is time(float8) / time(bf16), below 1 where float8 is faster. `SQNR` compares the float8
product with the bf16 one of the same random operands: about 28 dB where all is well, since each
E4M3 operand carries 3 mantissa bits.

`rowwise` is also measured with fast accumulation, which means something on a GPU alone.

    python benchmarks/bench_matmul.py -o matmul.json
    python benchmarks/bench_matmul.py --shapes 2048,1024,4096
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

from benchmarks.measuring import harness, report, shapes
from benchmarks.measuring.shapes import LLAMA3_8B, LLAMA3_70B, Shape
from float8 import Blockwise, Float8Tensor, Rowwise, ScaleFormat, Tensorwise
from float8.kernels import Float8Matrix, scaled_mm

BASELINE = "bf16"
# How `a` and `b` are scaled. Blockwise is DeepSeek-V3's: activations in rows of 128, weights in
# squares of 128 (arXiv:2412.19437, section 3.3.2). MX formats have a scale of one byte per 32.
GRANULARITIES = {
    "tensorwise": (Tensorwise(), Tensorwise()),
    "rowwise": (Rowwise(), Rowwise()),
    "blockwise": (Blockwise(1, 128), Blockwise(128, 128)),
    "mx": (Blockwise(1, 32), Blockwise(1, 32)),
}
FAST = "rowwise_fast"
CPU_SHAPES = (Shape(512, 1024, 1024), Shape(512, 1024, 4096))
COLUMNS = report.columns(
    "shape granularity baseline_ms ms min_ms max_ms baseline_tflops tflops ratio sqnr_db error",
    shape="shape (M,K,N)", baseline_ms="bf16 ms", ms="float8 ms", baseline_tflops="bf16 TFLOP/s",
    tflops="float8 TFLOP/s", ratio="ratio",
)  # fmt: skip


def products(
    shape: Shape, names: Sequence[str], device: str
) -> dict[str, Callable[[], Callable[[], torch.Tensor]]]:
    """Makers of the bf16 product and of one float8 product per name, same operands."""
    a_MK = torch.randn(shape.M, shape.K, device=device, dtype=torch.bfloat16)
    b_NK = torch.randn(shape.N, shape.K, device=device, dtype=torch.bfloat16)

    def product(name: str) -> Callable[[], torch.Tensor]:
        scales = ScaleFormat.E8M0 if name == "mx" else ScaleFormat.FLOAT32
        granularities = GRANULARITIES["rowwise" if name == FAST else name]
        a, b = (
            Float8Tensor.from_high_precision(x, torch.float8_e4m3fn, granularity, None, scales)
            for x, granularity in zip((a_MK, b_NK), granularities, strict=True)
        )
        if name == FAST:
            a8, b8 = [Float8Matrix(x.float8_data, x.scale, x.block) for x in (a, b)]
            return lambda: scaled_mm(a8, b8, out_dtype=torch.bfloat16, use_fast_accum=True)
        return lambda: a @ b.t()

    return {BASELINE: lambda: lambda: a_MK @ b_NK.t()} | {n: partial(product, n) for n in names}


def measure(shape: Shape, options: argparse.Namespace) -> list[harness.Row]:
    """One row per granularity, timed in turns with bf16."""
    torch.manual_seed(options.seed)
    names = [*GRANULARITIES, *([] if harness.on_cpu(options) else [FAST])]
    makers = products(shape, names, options.device)
    rounds = harness.take_turns(makers, options)
    rows: list[harness.Row] = []
    for name in names:
        row: harness.Row = {**shape.row, "granularity": name}
        row |= rounds.row(name, BASELINE)
        if name in rounds.samples:
            base = rounds.samples[BASELINE]
            row |= {
                "tflops": shape.flops / row["ms"] / 1e9,
                "baseline_tflops": shape.flops / median(base) / 1e12,
                "baseline_ms": median(base) * 1e3,
                "baseline_samples_s": base,
                "sqnr_db": harness.sqnr_db(makers[BASELINE]()(), makers[name]()()),
            }
        rows.append(row)
    return rows


def main(argv: Sequence[str]) -> int:
    """Measure every shape; 1 if a product failed (a refusal is no failure)."""
    parser = harness.parser(__doc__)
    shapes.add_option(parser, shapes.LINEAR)
    options = parser.parse_args(argv)
    on_cpu = harness.on_cpu(options)
    default = CPU_SHAPES if on_cpu else (*LLAMA3_70B, *LLAMA3_8B)
    options.shapes = shapes.chosen(options.shapes, default)
    measured = partial(measure, options=options)
    return report.run("bench_matmul", argv, options, options.shapes, measured, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
