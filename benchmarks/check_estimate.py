"""Compare predictions of `float8.estimate` with measurements: others' (`published.json`), or ours.

Without a file, the measurements that others published. A row is

    layer            forward and backward of a linear layer, with the ops that are timed beside it
    gemm             one GEMM
    separate GEMMs   the GEMMs of a transformer layer, each with casts of its own operands
    training step    tokens per second of a model, of which linear layers are a part
    cast             the rate of one cast

and is predicted as what it is: the ops beside a layer are priced by their bytes, casts are those of
the compiler where torchao's were timed, and of a training step only linear layers become faster ::

    step = 1 / (1 - share + share / speedup)      share = linear layers' time in bf16 / step's

A **board** is a row of `DEVICES` with the memory that the published hardware has, and with the
rates that its GEMMs reach at its own power limit. These rates are the only fitted numbers: each is
the one at which the rows that say ``fits`` have no error on average. The median
error is that of all other rows.

With result files of bench_linear or bench_matmul: predicted times
beside measured ones. The device is the row of `DEVICES` that a file names, if none is given: a
prediction made before anything was measured.

python benchmarks/check_estimate.py                                        # published
python benchmarks/check_estimate.py OUT/bench_{linear,matmul}.json
python benchmarks/check_estimate.py bench_linear.json --device here.json   # by measure_device.py
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measure_device import measure
from benchmarks.measuring.report import columns, table
from float8.config import RECIPES
from float8.estimate.devices import (
    ANY_PASS,
    BF16,
    DEVICES,
    Device,
    Figure,
    GemmSpeed,
    MemoryPass,
    find_device,
)
from float8.estimate.roofline import (
    FILL,
    READ,
    WRITE,
    Shape,
    Use,
    gemm_seconds,
    gemm_sizes,
    kinds_of_plan,
    layer_seconds,
    passes_of_layer,
)

COLUMNS = columns("source board what predicted published off fits", off="error")
BESIDE = columns("predicted measured off what", off="error")
FILE = Path(__file__).resolve().parent / "published.json"
Row = dict[str, Any]


@dataclass(frozen=True)
class PublishedRow:
    """One measurement: what it is, and its value predicted and published, larger being faster."""

    source: str
    board: str
    what: str
    predicted: float
    published: float
    fits: str

    @property
    def error(self) -> float:
        """0.1 is predicted 10 % faster than published."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class PublishedCheck:
    """All rows; ``str`` is the table."""

    rows: Sequence[PublishedRow]

    @property
    def tests(self) -> list[PublishedRow]:
        """The rows that determined no rate."""
        return [row for row in self.rows if not row.fits]

    @property
    def median_error(self) -> float:
        """The median magnitude of the relative errors of the tests."""
        return median(abs(row.error) for row in self.tests)

    def __str__(self) -> str:
        rows = [vars(row) | {"off": f"{row.error:+.0%}"} for row in self.rows]
        fitted = len(self.rows) - len(self.tests)
        return (
            f"{table(rows, COLUMNS)}\n\nMedian error: {self.median_error:.1%} of {len(self.tests)} "
            f"rows; {fitted} others determined a rate. x is a speed-up over bfloat16."
        )


def predicted_against_published(file: str | Path = FILE) -> PublishedCheck:
    """Every published row with its prediction."""
    published = json.loads(Path(file).read_text(encoding="utf-8"))
    boards = {name: board_of(name, published["boards"]) for name in _boards(published["rows"])}
    return PublishedCheck([_predicted(row, boards[row["board"]]) for row in published["rows"]])


def _boards(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["board"] for row in rows))


def board_of(name: str, boards: dict[str, Row] | None = None) -> Device:
    """The device of a board: a row of `DEVICES`, with what the file says of the board."""
    if boards is None:
        boards = json.loads(FILE.read_text(encoding="utf-8"))["boards"]
    if name not in boards:
        return DEVICES[name]
    board = boards[name]
    base = DEVICES[board["base"]]
    products = dict(base.products)
    for kind, rate in board["rates"].items():
        products[kind] = _at_rate(products[kind], rate * 1e12, f"fitted: {name}, rows with fits")
    source = board["source"]
    changed = replace(
        base,
        name=name,
        bandwidth=Figure(board["terabytes"] * 1e12, source),
        bandwidth_best=Figure(board["bandwidth_best"], source),
        products=products,
        passes={},
    )
    return CompiledCasts(**vars(changed)) if board["compiled_casts"] else changed


class CompiledCasts(Device):
    """A device whose casts are kernels that the compiler makes, as torchao's are.

    An amax of a tensor is two launches. A rowwise cast of columns first writes the operand
    transposed in bfloat16. torchao's own cost model counts the same (its roofline_utils.py).
    """

    def seconds_of(self, passes: Iterable[MemoryPass], elements: int) -> float:
        own: list[MemoryPass] = []
        for each in passes:
            if each.name.startswith("amax rowwise"):
                own.append(each._replace(bytes_per_element=2 * READ))
            elif each is not FILL:
                own += [each, FILL] if each.name == "amax tensorwise" else [each]
        return super().seconds_of(own, elements)


def _at_rate(speed: GemmSpeed, rate: float, source: str) -> GemmSpeed:
    ramp_s = speed.half_size.value / (speed.peak.value * speed.best.value)
    return replace(
        speed,
        best=Figure(rate / speed.peak.value, source),
        half_size=Figure(rate * ramp_s, speed.half_size.source),
    )


def _predicted(row: Row, device: Device) -> PublishedRow:
    predict = PREDICTIONS[row["what"]]
    what, predicted, published = predict(row, device)
    return PublishedRow(
        row["source"], row["board"], what, predicted, published, row.get("fits", "")
    )


# --- what each kind of row is predicted as: its name, predicted, published


def _layer(row: Row, device: Device) -> tuple[str, float, float]:
    shape, plan = Shape(*row["shape"]), RECIPES[row["recipe"]].plan
    beside = _beside(row, shape)
    bf16 = layer_seconds(device, shape, None, Use()).total + beside / device.bytes_per_second
    float8 = layer_seconds(device, shape, plan, Use()).total
    if row.get("constant_gradient"):
        # Nothing reads a gradient that is a constant: only its float8 copies are written, instead
        # of the bfloat16 one.
        g = passes_of_layer(plan, Use())[2]
        read = sum(each.bytes_per_element for each in g) - 2 * WRITE
        beside -= (read + READ) * shape.M * shape.N
    float8 += beside / device.bytes_per_second
    return f"layer {shape} {row['recipe']}, x", bf16 / float8, row["speedup"]


def _beside(row: Row, shape: Shape) -> float:
    """The bytes that the ops beside a layer move."""
    elements = {"x": shape.M * shape.K, "w": shape.N * shape.K, "g": shape.M * shape.N}
    return float(sum(each * elements[name] for name, each in row["beside"].items()))


def _gemm(row: Row, device: Device) -> tuple[str, float, float]:
    M, K, N = row["shape"]
    flops = 2 * M * K * N / 1e12
    predicted = flops / gemm_seconds(device, row["kind"], Shape(M, K, N))
    return f"GEMM {M},{K},{N} {row['kind']}, TFLOP/s", predicted, flops / (row["us"] / 1e6)


def _separate_gemms(row: Row, device: Device) -> tuple[str, float, float]:
    bf16 = float8 = 0.0
    for layer in row["layers"]:
        for rows, cols, contraction in gemm_sizes(Shape(*layer)).values():
            sizes = Shape(rows, contraction, cols)
            bf16 += gemm_seconds(device, BF16, sizes)
            float8 += gemm_seconds(device, row["kind"], sizes)
            of_a, of_b = row["cast_bytes"]
            moved = (of_a * rows + of_b * cols) * contraction
            float8 += device.pass_seconds(ANY_PASS, moved) if moved else 0.0
    if row["kind"] == BF16:
        flops = sum(6 * prod(layer) for layer in row["layers"]) / 1e12
        return "12 GEMMs bf16, TFLOP/s", flops / bf16, flops / (row["bf16_ms"] / 1e3)
    return f"12 GEMMs {row['recipe']}, x", bf16 / float8, row["bf16_ms"] / row["float8_ms"]


def _training_step(row: Row, device: Device) -> tuple[str, float, float]:
    plan, tokens = RECIPES[row["recipe"]].plan, row["tokens"]
    bf16 = float8 = 0.0
    for K, N, count in row["linears"]:
        shape = Shape(tokens, K, N)
        for use, times in ((Use(), 1.0), (Use(training=False), row["recomputed"])):
            bf16 += count * times * layer_seconds(device, shape, None, use).total
            float8 += count * times * layer_seconds(device, shape, plan, use).total
    share = bf16 / (tokens / row["bf16_tokens_per_s"])
    predicted = 1 / (1 - share + share * float8 / bf16)
    published = row["float8_tokens_per_s"] / row["bf16_tokens_per_s"]
    return f"{row['model']} {row['recipe']}, x", predicted, published


def _cast(row: Row, device: Device) -> tuple[str, float, float]:
    M, K = row["shape"]
    moved = 3 * M * K
    predicted = moved / device.pass_seconds(ANY_PASS, moved) / 1e9
    return f"{row['kernel']} {M},{K}, GB/s", predicted, row["gb_per_s"]


PREDICTIONS = {
    "layer": _layer,
    "gemm": _gemm,
    "separate GEMMs": _separate_gemms,
    "training step": _training_step,
    "cast": _cast,
}


# --- result files of this project


@dataclass(frozen=True)
class Beside:
    """One row of a file: what was timed, predicted and measured."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """0.1 is predicted 10 % slower than measured."""
        return self.predicted / self.measured - 1


def _sizes(row: Row) -> tuple[int, ...]:
    """The numbers in brackets at the end of a row's shape."""
    (numbers,) = re.findall(r"\(([\d,]+)\)$", row["shape"])
    return tuple(map(int, numbers.split(",")))


def _able(device: Device, recipe: str | None) -> bool:
    plan = None if recipe is None else RECIPES[recipe].plan
    return set(kinds_of_plan(plan, Use()).values()) <= set(device.products)


def _of_linear(rows: Sequence[Row], device: Device) -> Iterator[Beside]:
    """Steps as fractions of nn.Linear's; compiled ones where there are any."""
    modes = {row.get("mode", "eager") for row in rows}
    for row in rows:
        name, mode = row["layer"], row.get("mode", "eager")
        if name in RECIPES and _able(device, name) and (mode == "compiled" or len(modes) == 1):
            shape = Shape(*_sizes(row))
            plain = layer_seconds(device, shape, None, Use()).total
            own = layer_seconds(device, shape, RECIPES[name].plan, Use()).total
            yield Beside(f"{row['shape']} {mode} {name}", own / plain, row["ratio"])


def _of_matmul(rows: Sequence[Row], device: Device) -> Iterator[Beside]:
    for row in rows:
        M, K, N = _sizes(row)
        for kind, ms in ((BF16, "baseline_ms"), (row["granularity"], "ms")):
            if kind in device.products:
                seconds = gemm_seconds(device, kind, Shape(M, K, N))
                yield Beside(f"{M},{K},{N} {kind}, ms", seconds * 1e3, row[ms])


READERS = {"bench_linear": _of_linear, "bench_matmul": _of_matmul}


def beside(file: Path, device: str | Device | None = None) -> tuple[Device, list[Beside]]:
    """The device, and every timed row of a result file that it runs.

    Raises:
        ValueError: a file of another benchmark, or of a device that has no datasheet.
    """
    result = json.loads(file.read_text(encoding="utf-8"))
    name, hardware = result.get("benchmark"), result.get("environment", {}).get("device", "")
    if name not in READERS:
        raise ValueError(f"{file} is by {name}; what can be compared: {', '.join(READERS)}")
    # PCIe and NVL boards carry the same chips with other peaks, which the table does not list.
    words = set() if {"PCIe", "NVL"} & set(hardware.split()) else set(hardware.split())
    sheet = next((own for key, own in DEVICES.items() if key in words), None)
    if device is None and sheet is None:
        raise ValueError(f"{file}: there is no datasheet for {hardware!r}, give --device")
    found = sheet if device is None else find_device(device)
    assert found is not None
    timed = [row for row in result["rows"] if "error" not in row]
    return found, list(READERS[name](timed, found))


def tables(files: Sequence[Path], device: str | Device | None = None) -> str:
    """The table of each file, and its median error."""
    lines: list[str] = []
    for file in files:
        found, rows = beside(file, device)
        lines.append(f"{file.name}, predicted for {found.name}")
        if rows:
            lines.append(table([vars(row) | {"off": f"{row.error:+.0%}"} for row in rows], BESIDE))
            error = median(abs(row.error) for row in rows)
            lines.append(f"Median error: {error:.0%} of {len(rows)} rows")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="*", metavar="FILE", help="else published.json")
    known = f"{', '.join(DEVICES)}, measured (this machine), or a file of measure_device.py"
    parser.add_argument("--device", help=f"{known}; default: the datasheet of the file's device")
    options = parser.parse_args(argv)
    if not options.results:
        print(predicted_against_published())
        return 0
    try:
        is_here = options.device == "measured"
        device = measure(torch.device("cuda", 0)) if is_here else options.device
        print(tables(options.results, device))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
