"""What a prediction looks like: rows to compute with, and a table to read.

Layers with equal predictions whose names differ in numbers only become one line of the table, such
as ``layers.*.ffn.w1`` with their count; `Estimate.rows` keeps them apart. Times of a line are those
of one layer, the last two lines are sums over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from float8.estimate.casts import Use
from float8.estimate.devices import Device
from float8.estimate.roofline import Seconds, Shape

MIB = 2**20
Cells = list[str]


@dataclass(frozen=True)
class Prediction:
    """One layer under one recipe: its time and the memory that it saves, or why it is refused.

    ``saved_bytes`` is what backward keeps of ``nn.Linear`` less what it keeps of the float8 layer,
    and less what a cache of the weight holds.
    """

    seconds: Seconds | None = None
    saved_bytes: int = 0
    refused: str | None = None

    def speedup(self, bf16_s: float) -> float | None:
        """How many times faster than the layer as it is; None where refused."""
        return None if self.seconds is None else bf16_s / self.seconds.total


@dataclass(frozen=True)
class Row:
    """One layer: its name, its shape, its time as it is in seconds, and recipe -> prediction.

    ``is_float32`` says that its weight is, so that autocast is assumed.
    """

    layer: str
    shape: Shape
    bf16_s: float
    recipes: dict[str, Prediction]
    is_float32: bool = False

    def speedup(self, recipe: str) -> float | None:
        """Of one recipe; None where refused."""
        return self.recipes[recipe].speedup(self.bf16_s)

    def gains(self, recipe: str) -> bool:
        """Whether the recipe is predicted to be faster."""
        return (self.speedup(recipe) or 0) > 1


@dataclass(frozen=True)
class Total:
    """A sum over layers: seconds as they are, seconds with a recipe, bytes saved."""

    bf16_s: float
    seconds: float
    saved_bytes: int

    @property
    def speedup(self) -> float:
        """Of all linear layers together."""
        return self.bf16_s / self.seconds


@dataclass(frozen=True, repr=False)
class Estimate:
    """What `float8.estimate` predicts: one `Row` per layer; ``str`` is the table."""

    device: Device
    use: Use
    rows: Sequence[Row]

    @property
    def recipes(self) -> list[str]:
        """The recipes, in the order in which they were asked for."""
        return list(self.rows[0].recipes)

    def total(self, recipe: str, only_gains: bool = False) -> Total:
        """The sum over all layers; those that are refused stay as they are.

        Args:
            recipe: its name in the table.
            only_gains: convert only layers predicted to gain, as `faster_layers` does.
        """
        converted = [
            row.recipes[recipe].seconds is not None and (row.gains(recipe) or not only_gains)
            for row in self.rows
        ]
        seconds = saved = 0.0
        for row, converts in zip(self.rows, converted, strict=True):
            prediction = row.recipes[recipe]
            if converts and prediction.seconds is not None:
                seconds += prediction.seconds.total
                saved += prediction.saved_bytes
            else:
                seconds += row.bf16_s
        return Total(sum(row.bf16_s for row in self.rows), seconds, int(saved))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the rows with seconds and bytes, and the sources of the device's figures."""
        return {
            "device": self.device.name,
            "sources": self.device.provenance(),
            "rows": [
                {"layer": row.layer, "shape": str(row.shape), "bf16_s": row.bf16_s}
                | {name: _as_dict(row, name) for name in row.recipes}
                for row in self.rows
            ],
        }

    def __repr__(self) -> str:
        return f"Estimate({self.device.name}, {len(self.rows)} layers, {', '.join(self.recipes)})"

    def __str__(self) -> str:
        from tabulate import tabulate

        reasons: dict[str, int] = {}
        lines = [_line(rows, reasons) for rows in _alike(self.rows)]
        lines += [
            self._total_line("all that run", False),
            self._total_line("only those that gain", True),
        ]
        headers = ["layer", "n", "M,K,N", "bf16 ms"]
        for name in self.recipes:
            headers += [f"{name} ms", "speed-up", "saves MiB"]
        align = ["left", "right", "left"] + ["right"] * (len(headers) - 3)
        table = tabulate(lines, headers, disable_numparse=True, colalign=align)
        return "\n".join([table, "", *self._footnotes(reasons)])

    def _total_line(self, what: str, only_gains: bool) -> Cells:
        totals = [self.total(recipe, only_gains) for recipe in self.recipes]
        cells = [what, "" if only_gains else str(len(self.rows)), "", _ms(totals[0].bf16_s)]
        for total in totals:
            cells += [_ms(total.seconds), _times(total.speedup), _mib(total.saved_bytes)]
        return cells

    def _footnotes(self, reasons: dict[str, int]) -> list[str]:
        what = "Forward and backward" if self.use.training else "Forward"
        casts = "plain PyTorch" if self.device.emulates else "fused kernels"
        notes = [f"[{number}] refused: {reason}" for reason, number in reasons.items()]
        notes.append(
            f"{what} of one batch on {self.device.name} ({self.device.arch}), casts by {casts}, "
            f"predicted. {_trust(self.device)}"
        )
        if any(row.is_float32 for row in self.rows):
            notes.append(
                "Layers with float32 weights are taken to run under bfloat16 autocast: float8 "
                "converts the weight before each cast."
            )
        if self.use.weights_cached:
            notes.append("Memory saved is less the 2 bytes per element of cached weights.")
        return notes + [f"  {line}" for line in self.device.provenance()]


def _trust(device: Device) -> str:
    """One sentence on what the figures rest on."""
    kinds = {figure.kind for figure in device.figures().values()}
    if not kinds & {"measured", "fitted"}:
        return (
            "NOTHING HERE WAS MEASURED: datasheet peaks under assumed efficiencies; device="
            "'measured' measures this machine."
        )
    if "assumed" in kinds:
        return "Some figures are measured or fitted, others assumed:"
    return "Its figures:"


def _alike(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows grouped by what their line says."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        said = (_pattern(row.layer), row.shape, row.bf16_s, *row.recipes.values())
        groups.setdefault(said, []).append(row)
    return list(groups.values())


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _line(rows: Sequence[Row], reasons: dict[str, int]) -> Cells:
    row = rows[0]
    name = row.layer if len(rows) == 1 else _pattern(row.layer)
    cells = [name, str(len(rows)), str(row.shape), _ms(row.bf16_s)]
    for recipe, prediction in row.recipes.items():
        if prediction.seconds is None:
            assert prediction.refused is not None
            number = reasons.setdefault(prediction.refused, len(reasons) + 1)
            cells += [f"refused [{number}]", "", ""]
        else:
            speedup = row.speedup(recipe)
            cells += [_ms(prediction.seconds.total), _times(speedup), _mib(prediction.saved_bytes)]
    return cells


def _as_dict(row: Row, recipe: str) -> dict[str, Any]:
    prediction = row.recipes[recipe]
    if prediction.seconds is None:
        return {"refused": prediction.refused}
    return {
        "gemms_s": prediction.seconds.gemms,
        "casts_s": prediction.seconds.casts,
        "speedup": row.speedup(recipe),
        "saved_bytes": prediction.saved_bytes,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"


def _times(speedup: float | None) -> str:
    return "" if speedup is None else f"{speedup:.2f}x"


def _mib(saved: int) -> str:
    return f"{saved / MIB:.1f}"
