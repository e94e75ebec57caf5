"""Predicted times beside measured ones, for the results of four benchmarks.

    bench_linear      the step of a layer as a fraction of nn.Linear's (`check.py`)
    bench_matmul      one GEMM, in bfloat16 and of each granularity
    bench_casts       one cast by its kernels, as the passes of a layer
    bench_grouped_mm  forward and backward of a grouped GEMM, casts included

The summary is the median error of each file, and of all rows. Where no device is given, it is the
row of `DEVICES` for the machine that a file names: a prediction made before anything was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cost_model.check import predicted_against_measured
from benchmarks.cost_model.fit import base_of
from benchmarks.cost_model.results import CASTS, GROUPED, LINEAR, MATMUL, ResultFile, read_result
from float8.config import RECIPES
from float8.estimate.devices import ANY_PASS, Device, find_device
from float8.estimate.gemms import gemm_seconds, kinds_of_plan
from float8.estimate.roofline import layer_seconds
from float8.estimate.shapes import Shape, Use

PLAIN = "F.grouped_mm"
_AMAX = (("amax tensorwise", 2),)
_COLUMN_AMAX = (("fill", 0), ("amax rowwise", 2))
# A row of bench_casts -> its passes, with the bytes that each moves per element; the rows of norms
# and of experts' tokens are one pass at the rate of any.
PASSES: dict[str, tuple[tuple[str, float], ...]] = {
    "static rows": (("cast given", 3),),
    "static both": (("cast given", 4),),
    "delayed both": (("cast given", 4),),
    "dynamic rows": (*_AMAX, ("cast tensorwise", 3)),
    "dynamic both": (*_AMAX, ("cast tensorwise", 4)),
    "rowwise rows": (("cast rowwise", 3),),
    "rowwise both": (*_COLUMN_AMAX, ("cast rowwise", 4)),
    "1x128 both": (("cast 1x128", 4),),
    "128x128 both": (("cast 128x128", 4),),
    "1x32 both": (("cast 1x32", 4),),
}


@dataclass(frozen=True)
class Beside:
    """One row of a file: what was timed, predicted and measured in milliseconds."""

    what: str
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """0.1 is predicted 10 % slower than measured."""
        return self.predicted_ms / self.measured_ms - 1


def tables(files: Sequence[str | Path], device: str | Device | None = None) -> str:
    """The table of each file, and the median errors.

    Raises:
        ValueError: no file has a row to compare. A file that cannot be read is named instead.
    """
    lines: list[str] = []
    errors: dict[str, list[float]] = {}
    for file in files:
        try:
            text, errors[Path(file).name] = _table(file, device)
        except ValueError as error:
            text = f"{Path(file).name}: left out: {error}"
        lines += [text, ""]
    everything = [error for each in errors.values() for error in each]
    if not everything:
        raise ValueError("\n".join([*lines, "no file has a row to compare"]))
    each = ", ".join(f"{name} {median(own):.0%} of {len(own)}" for name, own in errors.items())
    return "\n".join([*lines, f"Median error: {median(everything):.0%} ({each} rows)"])


def _table(file: str | Path, device: str | Device | None) -> tuple[str, list[float]]:
    """The table of one file, and the magnitudes of its errors."""
    result = read_result(file)
    if result.benchmark == LINEAR:
        check = predicted_against_measured(file, device)
        return str(check), [abs(row.error) for row in check.rows]
    found = base_of(result) if device is None else find_device(device)
    rows = list(READERS[result.benchmark](result, found))
    if not rows:
        raise ValueError(f"{file} has no row that {found.name} runs")
    return _printed(result, found, rows), [abs(row.error) for row in rows]


def _printed(result: ResultFile, device: Device, rows: Sequence[Beside]) -> str:
    from tabulate import tabulate

    cells = [
        [row.what, f"{row.predicted_ms:.3f}", f"{row.measured_ms:.3f}", f"{row.error:+.0%}"]
        for row in rows
    ]
    table = tabulate(cells, ["", "predicted ms", "measured ms", "error"], disable_numparse=True)
    return f"{result.file}, {result.hardware}; predicted for {device.name}\n{table}"


def _gemms(result: ResultFile, device: Device) -> Iterator[Beside]:
    for timed in result.gemms():
        if timed.kind in device.products:
            shape = timed.shape
            predicted = gemm_seconds(device, timed.kind, shape.M, shape.N, shape.K)
            yield Beside(f"{shape} {timed.kind}", predicted * 1e3, timed.seconds * 1e3)


def _casts(result: ResultFile, device: Device) -> Iterator[Beside]:
    for row in _timed(result):
        if row["contender"] == "kernel":
            M, K = (int(size) for size in row["shape"].strip("()").split(","))
            passes = PASSES.get(row["cast"], ((ANY_PASS, row["bytes_per_element"]),))
            predicted = sum(device.pass_seconds(name, each * M * K) for name, each in passes)
            yield Beside(f"{M},{K} {row['cast']}", predicted * 1e3, row["ms"])


def _grouped(result: ResultFile, device: Device) -> Iterator[Beside]:
    for row in _timed(result):
        name = row["layer"]
        if name != PLAIN and name not in RECIPES:
            continue
        plan = None if name == PLAIN else RECIPES[name].plan
        if set(kinds_of_plan(plan, Use()).values()) <= set(device.products):
            shape = Shape(row["T"], row["K"], row["N"], row["E"])
            predicted = layer_seconds(device, shape, plan, Use()).total
            yield Beside(f"{shape} {name} {row['mode']}", predicted * 1e3, row["ms"])


def _timed(result: ResultFile) -> list[dict[str, Any]]:
    return [row for row in result.rows if "error" not in row]


READERS: dict[str, Callable[[ResultFile, Device], Iterator[Beside]]] = {
    MATMUL: _gemms,
    CASTS: _casts,
    GROUPED: _grouped,
}
