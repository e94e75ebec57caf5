"""Reads the result files that benchmarks write with ``-o``: times that the cost model predicts.

``benchmarks/results/README.md`` lists their fields. Used here are a row's shape, its candidate, its
median time and its ratio to the baseline; rows that could not be timed carry ``error`` instead.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from float8.config import RECIPES
from float8.estimate.devices import BF16, DEVICES, FLOAT8, Device
from float8.estimate.shapes import Shape

MATMUL, LINEAR = "bench_matmul", "bench_linear"
CASTS, GROUPED = "bench_casts", "bench_grouped_mm"
# The fields that rows of the latter two are read by.
_FIELDS = {
    CASTS: ("shape", "cast", "contender", "bytes_per_element", "ms"),
    GROUPED: ("layer", "mode", "T", "K", "N", "E", "ms"),
}


@dataclass(frozen=True)
class TimedLayer:
    """A row of ``bench_linear``: one step of one layer, and its ratios to ``nn.Linear``'s.

    ``mode`` is ``eager`` or ``compiled``; ratios compare within a mode.
    """

    name: str
    mode: str
    shape: Shape
    recipe: str
    seconds: float
    ratio: float
    saved_ratio: float


@dataclass(frozen=True)
class TimedGemm:
    """A row of ``bench_matmul``: one GEMM of one kind (``bf16``, ``tensorwise``, ...)."""

    shape: Shape
    kind: str
    seconds: float


@dataclass(frozen=True)
class ResultFile:
    """A result file: its name, its benchmark, its hardware, and its rows.

    ``mode`` applies to rows without one, as in older files.
    """

    file: str
    benchmark: str
    hardware: str
    on_cpu: bool
    mode: str
    rows: list[dict[str, Any]]

    def layers(self) -> Iterator[TimedLayer]:
        """Every timed row of a recipe of this library."""
        for row in self.rows:
            if "error" not in row and row["layer"] in RECIPES:
                yield TimedLayer(
                    row["shape"], row.get("mode", self.mode), _shape(row), row["layer"],
                    _positive(row, "ms") / 1e3, _positive(row, "ratio"),
                    _number(row, "saved_ratio"),
                )  # fmt: skip

    def layers_on(self, emulates: bool) -> list[TimedLayer]:
        """The rows to compare with predictions.

        Where float8 is emulated, the eager rows: `measure` times the passes of eager mode. On GPUs
        the compiled rows, if there are any: eager mode may wait for the host.
        """
        layers = list(self.layers())
        eager = [layer for layer in layers if layer.mode == "eager"]
        compiled = [layer for layer in layers if layer.mode != "eager"]
        return eager if emulates else compiled or eager

    def gemms(self) -> Iterator[TimedGemm]:
        """Every GEMM that was timed; the baseline of a shape once."""
        seen = set()
        for row in self.rows:
            if "error" in row or row["granularity"] not in FLOAT8:
                continue
            if (shape := _shape(row)) not in seen:
                seen.add(shape)
                yield TimedGemm(shape, BF16, _positive(row, "baseline_ms") / 1e3)
            yield TimedGemm(shape, row["granularity"], _positive(row, "ms") / 1e3)


def read_result(path: str | Path) -> ResultFile:
    """A result file of one of the four benchmarks whose times the cost model predicts.

    Raises:
        ValueError: it is another file; the message says which.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        where = fields["environment"]
        result = ResultFile(
            file=Path(path).name,
            benchmark=fields["benchmark"],
            hardware=_text(where["device"]),
            on_cpu=where["capability"] is None,
            mode="compiled" if "--compile" in fields["command"] else "eager",
            rows=fields["rows"],
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a result file of a benchmark ({type(error).__name__}: {error}); "
            "python benchmarks/bench_linear.py -o FILE writes one"
        ) from error
    if result.benchmark not in (MATMUL, LINEAR, CASTS, GROUPED):
        raise ValueError(f"{path} is by {result.benchmark}; what is needed is {MATMUL} or {LINEAR}")
    try:
        if result.benchmark in _FIELDS:
            timed = [row for row in result.rows if "error" not in row]
            _ = [
                _positive(row, "ms") and [row[f] for f in _FIELDS[result.benchmark]]
                for row in timed
            ]
        else:
            list(result.layers() if result.benchmark == LINEAR else result.gemms())
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} has a row that cannot be read ({type(error).__name__}: {error})"
        ) from error
    return result


def datasheet_of(hardware: str) -> Device | None:
    """The row of `DEVICES` for a name such as ``NVIDIA H100 80GB HBM3``, or None.

    PCIe and NVL boards carry the same chip with other peaks, which the table does not list.
    """
    if re.search(r"\b(PCIe|NVL)\b", hardware):
        return None
    names = [name for name in DEVICES if re.search(rf"\b{name}\b", hardware)]
    return DEVICES[names[0]] if names else None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a device's name is text, got {value!r}")
    return value


def _number(row: dict[str, Any], key: str) -> float:
    """A finite number of a row."""
    value = row[key]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{key} must be a finite number, got {value!r}")
    return float(value)


def _positive(row: dict[str, Any], key: str) -> float:
    if (value := _number(row, key)) <= 0:
        raise ValueError(f"{key} must be above 0, got {value}")
    return value


def _shape(row: dict[str, Any]) -> Shape:
    """The (M,K,N) that a row's shape ends with; a name may stand before it."""
    match = re.search(r"\((\d+),(\d+),(\d+)\)$", row["shape"])
    if match is None:
        raise ValueError(f"a row's shape is 'name (M,K,N)', got {row['shape']!r}")
    return Shape(*(int(size) for size in match.groups()))
