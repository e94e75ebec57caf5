"""Predicted against measured: how far to trust the cost model, in numbers.

The ratio of a layer's step to ``nn.Linear``'s, predicted, beside the ratio that ``bench_linear``
measured, per shape and recipe::

    error = predicted / measured - 1        median over rows of |error|

A prediction by a device that was fitted to the same file is a description of that file, not a
prediction; the table says which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from float8.config import RECIPES
from float8.estimate.casts import Use
from float8.estimate.devices import Device
from float8.estimate.fit import base_of
from float8.estimate.layers import Layer
from float8.estimate.lookup import find_device
from float8.estimate.predict import plain_seconds, predict
from float8.estimate.results import LINEAR, Report, TimedLayer, read_report
from float8.estimate.roofline import saved_bytes


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
        """Relative, of the time: 0.1 is 10 % slower predicted than measured."""
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
    def right_side(self) -> int:
        """How many rows are predicted on the side of 1, faster or slower, that was measured."""
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
            f"slower predicted rightly in {self.right_side} of {len(self.rows)} rows.",
        ]
        if any(self.file in figure.source for figure in self.device.figures().values()):
            lines.append("The device was fitted to this very file: a description, no prediction.")
        return "\n".join(lines + [f"  {line}" for line in self.device.provenance()])


def predicted_against_measured(results: str | Path, device: str | Device | None = None) -> Check:
    """Compare predictions with what ``benchmarks/bench_linear.py`` measured.

    Args:
        results: a JSON file that the benchmark wrote with ``-o``.
        device: as `float8.estimate`; by default the datasheet row of the device in the file.

    Raises:
        ValueError: no such file, no row of ours in it, or a device that is not known: for files
            measured on a CPU say ``"measured"`` (on that machine) or give a fitted device.
    """
    report = read_report(results)
    if report.benchmark != LINEAR:
        raise ValueError(f"{results} is by {report.benchmark}; what is compared is {LINEAR}")
    found = _device_for(report) if device is None else find_device(device)
    rows = [
        row
        for timed in report.layers_on(found.emulates)
        if (row := _compare(timed, found)) is not None
    ]
    if not rows:
        what = "eager " if found.emulates else ""
        raise ValueError(f"{results} has no {what}row of a recipe that {found.name} runs")
    return Check(report.file, report.hardware, found, rows)


def _device_for(report: Report) -> Device:
    if report.on_cpu:
        raise ValueError(
            f"{report.file} was measured on a CPU, of which there is no datasheet row: give "
            "device='measured' on that machine, or a device fitted to its files"
        )
    return base_of(report)


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
