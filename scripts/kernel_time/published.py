"""Holds the model against published times of other libraries' Triton kernels, on an H100.

    python -m scripts.kernel_time.published [-o FILE.json]

The same kernels are compiled here and their times predicted. Nothing is fitted to them. It needs
torchao 0.18 and liger-kernel 0.8.0; a kernel of a library that is not installed is left out. The
published times of Liger's kernels are of versions 0.6.0 to 0.8.1, those of torchao of March 2026,
and the compilers were others. Of an autotuned kernel the fastest prediction counts, as the fastest
configuration does on a GPU.

GEMMs are predicted far too fast: what is predicted for one is a bound of its time.

The form of the model alone, without a compiler, is held against the bandwidth of three CUDA kernels
at many occupancies.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from float8.kernels.gpu.launch import Variant
from scripts.kernel_time.devices import DEVICES
from scripts.kernel_time.launches import compile_for, predict_compiled
from scripts.kernel_time.model import Prediction, rates
from scripts.kernel_time.recording import recorded

Row = dict[str, Any]
DEVICE = "H100"

_TORCHAO = (
    "https://github.com/pytorch/ao/blob/36027d82d1ad9949597ea16002ff4940374b1b94/benchmarks/"
    "prototype/blockwise_fp8_training/README.md"
)
# Kernel and rows of 4096 -> microseconds.
_BLOCKWISE = {
    ("act_quant_transposed_lhs", 32768): 154.46,
    ("act_quant_lhs", 32768): 150.86,
    ("act_quant_rhs", 32768): 148.70,
    ("weight_quant_rhs", 32768): 144.99,
    ("act_quant_lhs", 131072): 586.98,
    ("act_quant_transposed_lhs", 131072): 581.47,
    ("act_quant_rhs", 131072): 562.56,
    ("weight_quant_rhs", 131072): 555.30,
}
_TORCHAO_GEMM = "https://github.com/pytorch/ao/pull/2784"
# M, N, K -> microseconds of 1x128 by 128x128 scales.
_GEMMS = {(16640, 5120, 8192): 3494.42, (16640, 8192, 5120): 3800.48}
_LIGER = (
    "https://github.com/linkedin/Liger-Kernel/blob/ead96b618e5c67bddc6a6e9bcb99bfe6b5ab661c/"
    "benchmark/data/all_benchmark_data.csv"
)
# Kernel -> the result's name, rows, bytes of an element, columns -> microseconds.
_ROWS: dict[str, tuple[str, int, torch.dtype, dict[int, float]]] = {
    "layer_norm": (
        "layer_norm", 4096, torch.float32,
        {2048: 29.152, 4096: 51.040, 8192: 94.751, 16384: 184.768},
    ),
    "relu_squared": (
        "relu_squared", 4096, torch.bfloat16,
        {2048: 17.055, 4096: 27.936, 8192: 50.207, 16384: 94.400},
    ),
    "swiglu": (
        "megatron_swiglu", 8192, torch.bfloat16,
        {2048: 39.583, 4096: 72.512, 8192: 137.088, 16384: 267.008, 32768: 527.503},
    ),
    "rms_norm": (
        "megatron_rms_norm", 4096, torch.bfloat16,
        {2048: 17.567, 4096: 29.184, 8192: 50.912, 16384: 95.008},
    ),
}  # fmt: skip
_STREAM = (
    "https://github.com/RRZE-HPC/gpu-benches/blob/1038c5d0d0f48cfe9912930d34eb2d8a31b72b9b/"
    "gpu-stream/gh200.txt"
)
# Threads of a block and blocks of a multiprocessor -> GB/s of a load, a load and a store, and three
# loads and a store; of 8 bytes each.
_OCCUPANCIES = {
    (16, 1): (31, 61, 108), (32, 1): (62, 120, 216), (64, 1): (122, 237, 418),
    (112, 1): (208, 384, 660), (64, 2): (245, 464, 798), (128, 2): (486, 854, 1408),
    (192, 2): (704, 1122, 1897), (256, 2): (935, 1397, 2367), (384, 2): (1320, 1868, 2991),
    (512, 2): (1715, 2269, 3338), (640, 2): (2009, 2587, 3501), (768, 2): (2314, 2854, 3686),
    (896, 2): (2556, 3052, 3759), (1024, 2): (2775, 3174, 3783),
}  # fmt: skip
_STREAMS = {"read": 8, "scale": 16, "triad": 32}  # bytes of a thread
_STREAM_PEAK = 3942e9  # of the same file: stores alone


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _row(
    source: str,
    kernel: str,
    shape: str,
    measured: float,
    call: Callable[[], object],
    flops: float = 0,
) -> Row:
    with recorded() as launches:
        call()
    *_, forms = launches
    # The configurations differ in stages of loops that most of these kernels do not have.
    options = [v for v in forms if v.options.get("num_stages") in (None, 2)]

    def predict(variant: Variant) -> Prediction:
        products = (flops, variant.programs[0]) if flops else None
        return predict_compiled(
            variant, DEVICE, compile_for(variant, DEVICES[DEVICE].arch), products=products
        )

    best = min((predict(v) for v in options), key=lambda p: p.seconds)
    predicted = best.seconds * 1e6
    return {
        "kernel": kernel, "shape": shape, "measured_us": measured,
        "predicted_us": round(predicted, 1), "error": round(predicted / measured - 1, 3),
        "limit": best.limit, "source": source,
    }  # fmt: skip


def torchao_rows() -> list[Row]:
    """Casts with blockwise scales."""
    kernels = importlib.import_module("torchao.prototype.blockwise_fp8_training.kernels")
    found = []
    for (name, M), measured in _BLOCKWISE.items():
        op = getattr(kernels, f"triton_fp8_blockwise_{name}")
        call = partial(op._init_fn, _meta(M, 4096))  # the function below the registered op
        found.append(_row(_TORCHAO, name, f"({M},4096)", measured, call))
    return found


def gemm_rows() -> list[Row]:
    """torchao's Triton GEMM of blockwise scales."""
    kernels = importlib.import_module("torchao.prototype.blockwise_fp8_training.kernels")
    found = []
    for (M, N, K), measured in _GEMMS.items():
        a, b = (_meta(rows, K, dtype=torch.float8_e4m3fn) for rows in (M, N))
        a_scale, b_scale = (
            _meta(K // 128, M, dtype=torch.float32).t(),
            _meta(N // 128, K // 128, dtype=torch.float32).t(),
        )
        op = kernels.triton_fp8_gemm_1x128_128x128
        call = partial(op._init_fn, a, b.t(), a_scale, b_scale, 128, torch.bfloat16)
        shape, flops = f"({M},{N},{K})", 2.0 * M * N * K
        found.append(_row(_TORCHAO_GEMM, "gemm_1x128_128x128", shape, measured, call, flops))
    return found


def liger_rows() -> list[Row]:
    """A program for each row."""
    ops = {name: importlib.import_module(f"liger_kernel.ops.{name}") for name in _ROWS}
    calls: dict[str, Callable[[Tensor, Tensor], object]] = {
        "layer_norm": lambda x, w: ops["layer_norm"].layer_norm_forward(x, w, w, 1e-6),
        "relu_squared": lambda x, w: ops["relu_squared"].relu_squared_forward(x),
        "swiglu": lambda x, w: ops["swiglu"].swiglu_forward(x, torch.empty_like(x)),
        "rms_norm": lambda x, w: ops["rms_norm"].rms_norm_forward(x, w, 1e-6, 0.0, "llama", None),
    }
    found = []
    for name, (title, rows, dtype, columns) in _ROWS.items():
        for K, measured in columns.items():
            x, w = _meta(rows, K, dtype=dtype), _meta(K, dtype=dtype)
            found.append(_row(_LIGER, title, f"({rows},{K})", measured, partial(calls[name], x, w)))
    return found


def stream_rows() -> list[Row]:
    """The form, for three CUDA kernels."""
    device, found = DEVICES[DEVICE], []
    delay = device.turnover + device.latency
    for (threads, blocks), measured in _OCCUPANCIES.items():
        for (name, size), gbps in zip(_STREAMS.items(), measured, strict=True):
            moved = threads * size * device.multiprocessors
            rate = rates(blocks, delay, [moved / _STREAM_PEAK])[-1]
            predicted = rate * moved / 1e9
            found.append(
                {
                    "kernel": name, "shape": f"{blocks} x {threads} threads",
                    "measured_gbps": gbps, "predicted_gbps": round(predicted),
                    "error": round(gbps / predicted - 1, 3), "source": _STREAM,
                }
            )  # fmt: skip
    return found


def main(argv: Sequence[str]) -> int:
    """Print the errors, and write them as JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    for library in (torchao_rows, liger_rows, stream_rows, gemm_rows):
        try:
            rows += library()
        except ModuleNotFoundError as error:
            print(f"left out: {error}")
    for row in rows:
        print(f"{row['kernel']:30s} {row['shape']:20s} {row['error']:+.1%}")
    errors = [abs(row["error"]) for row in rows]
    print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    if options.output is not None:
        command = " ".join(["python -m scripts.kernel_time.published", *argv])
        report = {"command": command, "device": DEVICE, "rows": rows}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
