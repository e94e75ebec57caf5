"""Compares predictions of the cost model with measured times.

The ratio of a layer's step to ``nn.Linear``'s, predicted, beside the ratio that ``bench_linear``
measured, per shape and recipe::

    error = predicted / measured - 1        median over rows of |error|

A device that was fitted to the same file describes that file and predicts nothing; the table says
so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.cost_model.fit import base_of
from benchmarks.cost_model.results import LINEAR, ResultFile, TimedLayer, read_result
from float8.config import RECIPES
from float8.estimate.devices import Device, find_device
from float8.estimate.predict import Layer, plain_seconds, predict
from float8.estimate.roofline import saved_bytes
from float8.estimate.shapes import Use


@dataclass(frozen=True)
class Compared:
    """One shape and recipe: time and saved memory, both as fractions of ``nn.Linear``'s."""

    shape: str
    mode: str
    recipe: str
    predicted: float
    measured: float
    predicted_saved: float
    measured_saved: float

    @property
    def error(self) -> float:
        """The relative error of the time: 0.1 is predicted 10 % slower than measured."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Check:
    """All rows of a file; ``str`` is the table."""

    file: str
    hardware: str
    device: Device
    rows: Sequence[Compared]

    @property
    def median_error(self) -> float:
        """The median of the relative errors' magnitudes."""
        return median(abs(row.error) for row in self.rows)

    @property
    def right_direction(self) -> int:
        """How many rows are predicted faster, or slower, than ``nn.Linear`` as was measured."""
        return sum((row.predicted < 1) == (row.measured < 1) for row in self.rows)

    def __str__(self) -> str:
        from tabulate import tabulate

        cells = [
            [row.shape, row.mode, row.recipe, f"{row.predicted:.2f}", f"{row.measured:.2f}",
             f"{row.error:+.0%}", f"{row.predicted_saved:.2f}", f"{row.measured_saved:.2f}"]
            for row in self.rows
        ]  # fmt: skip
        headers = ["shape (M,K,N)", "mode", "recipe", "time: predicted", "measured", "error",
                   "saved: predicted", "measured"]  # fmt: skip
        align = ["left"] * 3 + ["right"] * 5
        table = tabulate(cells, headers, disable_numparse=True, colalign=align)
        return f"{table}\n\n{self._summary()}"

    def _summary(self) -> str:
        lines = [
            f"{self.file}, measured on {self.hardware}; predicted for {self.device.name}.",
            f"As fractions of nn.Linear. Median error of time: {self.median_error:.0%}; faster or "
            f"slower predicted correctly in {self.right_direction} of {len(self.rows)} rows.",
        ]
        if any(self.file in figure.source for figure in self.device.figures().values()):
            lines.append("The device was fitted to this file: a description, no prediction.")
        return "\n".join(lines + [f"  {line}" for line in self.device.provenance()])


def predicted_against_measured(results: str | Path, device: str | Device | None = None) -> Check:
    """Compare predictions with what ``benchmarks/bench_linear.py`` measured.

    Args:
        results: a JSON file that the benchmark wrote with ``-o``.
        device: as `float8.estimate`; by default the datasheet row of the device in the file.

    Raises:
        ValueError: no such file, no row of a recipe in it, or an unknown device. Files measured on
            a CPU need a device: one measured on that machine, or fitted to its files.
    """
    result = read_result(results)
    if result.benchmark != LINEAR:
        raise ValueError(f"{results} is by {result.benchmark}; what is compared is {LINEAR}")
    found = _device_for(result) if device is None else find_device(device)
    rows = [
        row
        for timed in result.layers_on(found.emulates)
        if (row := _compare(timed, found)) is not None
    ]
    if not rows:
        what = "eager " if found.emulates else ""
        raise ValueError(f"{results} has no {what}row of a recipe that {found.name} runs")
    return Check(result.file, result.hardware, found, rows)


def _device_for(result: ResultFile) -> Device:
    if result.on_cpu:
        raise ValueError(
            f"{result.file} was measured on a CPU, which has no datasheet row: give "
            "--device measured on that machine, or a device fitted to its files"
        )
    return base_of(result)


def _compare(timed: TimedLayer, device: Device) -> Compared | None:
    layer, use = Layer(timed.name, timed.shape), Use()
    prediction = predict(layer, RECIPES[timed.recipe], device, use)
    if prediction.seconds is None:
        return None
    before = saved_bytes(timed.shape, None, use)
    return Compared(
        timed.name,
        timed.mode,
        timed.recipe,
        predicted=prediction.seconds.total / plain_seconds(layer, device, use),
        measured=timed.ratio,
        predicted_saved=1 - prediction.saved_bytes / before,
        measured_saved=timed.saved_ratio,
    )
