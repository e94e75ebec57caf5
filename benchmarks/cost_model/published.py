"""Compares predictions of the cost model with measurements that others published.

`benchmarks/published.json` holds them, with their sources: none is of this project. A row is

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
the one at which the rows that say ``fits`` have no error on average (`fitted_rates`). The median
error is that of all other rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log1p, prod, sqrt
from pathlib import Path
from statistics import median
from typing import Any

from float8.config import RECIPES
from float8.estimate.cast_passes import READ, WRITE, passes_of_layer
from float8.estimate.devices import ANY_PASS, BF16, DEVICES, Device, Figure, GemmSpeed
from float8.estimate.gemms import gemm_seconds, gemm_sizes
from float8.estimate.roofline import layer_seconds
from float8.estimate.shapes import Shape, Use

FILE = Path(__file__).resolve().parents[1] / "published.json"
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
        from tabulate import tabulate

        cells = [
            [row.source, row.board, row.what, f"{row.predicted:.3g}", f"{row.published:.3g}",
             f"{row.error:+.0%}", row.fits]
            for row in self.rows
        ]  # fmt: skip
        headers = ["source", "board", "what", "predicted", "published", "error", "fits"]
        fitted = len(self.rows) - len(self.tests)
        return "\n".join(
            [
                tabulate(cells, headers, disable_numparse=True),
                "",
                f"Median error: {self.median_error:.1%} of {len(self.tests)} rows; {fitted} others "
                "determined a rate. x is a speed-up over bfloat16.",
            ]
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
    return replace(
        base,
        name=name,
        bandwidth=Figure(board["terabytes"] * 1e12, source),
        bandwidth_best=Figure(board["bandwidth_best"], source),
        products=products,
        passes={},
        compiled_casts=board["compiled_casts"],
    )


def _at_rate(speed: GemmSpeed, rate: float, source: str) -> GemmSpeed:
    ramp_s = speed.half_size.value / (speed.peak.value * speed.best.value)
    return replace(
        speed,
        best=Figure(rate / speed.peak.value, source),
        half_size=Figure(rate * ramp_s, speed.half_size.source),
    )


def fitted_rates(name: str, file: str | Path = FILE) -> dict[str, float]:
    """The rates of a board, in 10^12 operations per second, at which rows that fit them are met."""
    published = json.loads(Path(file).read_text(encoding="utf-8"))
    boards, rows = published["boards"], published["rows"]
    rates = boards[name]["rates"]
    for kind in rates:  # bf16 is the first: speed-ups depend on it
        own = [row for row in rows if row["board"] == name and row.get("fits") == kind]
        low, high = 1.0, 1e4
        for _ in range(40):
            rates[kind] = sqrt(low * high)
            device = board_of(name, boards)
            slow = sum(log1p(_predicted(row, device).error) for row in own) < 0
            low, high = (rates[kind], high) if slow else (low, rates[kind])
    return dict(rates)


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
        g = passes_of_layer(plan, Use(), False, device.compiled_casts)[2]
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
    predicted = flops / gemm_seconds(device, row["kind"], M, N, K)
    return f"GEMM {M},{K},{N} {row['kind']}, TFLOP/s", predicted, flops / (row["us"] / 1e6)


def _separate_gemms(row: Row, device: Device) -> tuple[str, float, float]:
    bf16 = float8 = 0.0
    for layer in row["layers"]:
        for rows, columns, contraction in gemm_sizes(Shape(*layer), Use()).values():
            sizes = (rows, columns, contraction)
            bf16 += gemm_seconds(device, BF16, *sizes)
            float8 += gemm_seconds(device, row["kind"], *sizes)
            of_a, of_b = row["cast_bytes"]
            moved = (of_a * rows + of_b * columns) * contraction
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
