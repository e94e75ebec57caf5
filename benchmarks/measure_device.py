"""Measure this machine's GPU for `float8.estimate`, in less than a minute.

Timed are a copy of memory, a launch, and the three GEMMs of a linear layer, in bfloat16 and under
each scale granularity, at four sizes. The seconds of a GEMM of F operations follow

    seconds - launch - writing the result = F / rate + ramp_s

(`float8/estimate/devices.py`), and least squares of the relative errors give the rate and ramp_s of
each kind. Candidates take turns and the fastest round of each counts: other load on
the machine only adds time. Casts are assumed to run at the bandwidth of a copy, as fused kernels
do.

python benchmarks/measure_device.py --save here.json
python -m float8.estimate 8192,4096,14336 --device here.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import harness
from float8.config import RECIPES
from float8.estimate.devices import BF16, DEVICES, FLOAT8_GEMMS, Device, GemmSpeed
from float8.estimate.roofline import RESULT_BYTES, Shape, busy, gemm_bytes
from float8.kernels.products import MX_PRODUCT, architecture, gemm_for, scaled_mm
from float8.linear.casts import cast_alone

Size = tuple[int, int, int]
SIZES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192))
COPY_BYTES = 2**30
ROUNDS = 7


def measure(where: torch.device, sizes: Sequence[Size] = SIZES, copied: int = COPY_BYTES) -> Device:
    """The figures of a device.

    Args:
        where: the device.
        sizes: (M, K, N) of the layers whose GEMMs are timed.
        copied: bytes of the buffer that is copied.
    """
    memory, one = torch.zeros(copied, dtype=torch.uint8, device=where), torch.zeros(1, device=where)
    target = torch.empty_like(memory)
    copy_s, launch_s = best(where, [lambda: target.copy_(memory), lambda: one.add_(1)])
    name, arch, count = "this CPU", "cpu", 1
    if where.type == "cuda":
        name, arch = torch.cuda.get_device_name(where), architecture(where.index)
        count = torch.cuda.get_device_properties(where).multi_processor_count
    sheet = next((own for key, own in DEVICES.items() if key in name.split()), None)
    known = dict(sheet.products) if sheet else {BF16: GemmSpeed(1.0, 0.0)}
    grouped = sheet.grouped if sheet else {}  # which are not timed
    device = Device(name, arch, 2 * copied / copy_s, launch_s, count, known, grouped)
    for kind, points in timed_gemms(device, where, sizes).items():
        if points:
            known[kind] = GemmSpeed(*fitted(points))
    sources = [f"measured: here, torch {torch.__version__}: bandwidth, launch, dense GEMMs"]
    sources += [f"published: {sheet.name}: GEMMs that were not timed"] if sheet else []
    return replace(device, sources=tuple(sources))


def best(where: torch.device, candidates: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds per call of candidates that take turns: the fastest round of each."""
    named = {str(i): candidate for i, candidate in enumerate(candidates)}
    timer = harness.timer_for(str(where))
    samples = harness.interleave(named, timer, repeats=ROUNDS, warmup=2)
    return [min(own) for own in samples.values()]


def timed_gemms(
    device: Device, where: torch.device, sizes: Sequence[Size]
) -> dict[str, list[tuple[float, float]]]:
    """Kind of GEMM -> operations and seconds, without those that memory bounds."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in (BF16, *FLOAT8_GEMMS)}
    for M, K, N in sizes:
        x, w, g = (
            torch.randn(rows, columns, device=where, dtype=torch.bfloat16)
            for rows, columns in ((M, K), (N, K), (M, N))
        )
        three = {"output": (x, w), "grad_input": (g, w.t()), "grad_weight": (g.t(), x.t())}
        for gemm, (a, b) in three.items():
            calls = {kind: _call(kind, gemm, device.arch, a, b) for kind in found}
            able = {kind: call for kind, call in calls.items() if call is not None}
            sides = a.shape[0], b.shape[0]
            flops = 2 * a.shape[1] * sides[0] * sides[1] / busy(*sides, device.processors)
            written = RESULT_BYTES * sides[0] * sides[1]
            for kind, seconds in zip(able, best(where, list(able.values())), strict=True):
                own = seconds - device.launch
                moving = gemm_bytes(kind, Shape(M, K, N), gemm) / device.bandwidth
                own_s = own - written / device.bandwidth
                if moving < 0.9 * own and own_s > 0:
                    found[kind].append((flops, own_s))
    return found


def _call(kind: str, gemm: str, arch: str, a: Tensor, b: Tensor) -> Callable[[], object] | None:
    """``a @ b.T`` with operands cast as by the recipe of the kind; None if the device refuses."""
    if kind == BF16:
        return lambda: a @ b.t()
    plan = getattr(RECIPES["mxfp8" if kind == MX_PRODUCT else kind].gemms, gemm)
    if gemm_for(arch, plan.a.block, plan.b.block, torch.bfloat16)[1]:
        return None
    a8, b8 = (cast_alone(x.contiguous(), cast) for x, cast in ((a, plan.a), (b, plan.b)))
    return lambda: scaled_mm(a8, b8, out_dtype=torch.bfloat16, use_fast_accum=plan.use_fast_accum)


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Operations per second, and ramp_s, of the least relative errors; both at least 0."""
    flops, seconds = torch.tensor(points, dtype=torch.float64).unbind(1)
    matrix = torch.stack((flops / seconds, 1 / seconds), 1)
    ones = torch.ones(len(points), 1, dtype=torch.float64)
    for columns in (matrix, matrix[:, :1]):  # with ramp_s, and without
        if len(points) < columns.shape[1]:
            continue
        costs = torch.linalg.lstsq(columns, ones, driver="gelsd").solution.flatten().tolist()
        if min(costs) > 0:
            break
    return 1 / costs[0], costs[1] if len(costs) > 1 else 0.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", type=Path, required=True, metavar="FILE", help="write JSON there")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device to measure; DEVICES of float8.estimate lists datasheets")
    device = measure(torch.device("cuda", 0))
    device.save(options.save)
    print("\n".join([f"{device.name}: wrote {options.save}", *device.sources]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
