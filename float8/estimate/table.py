"""The result of a prediction: one row per layer to compute with, and a table to read.

Layers with equal predictions whose names differ in numbers only share a line of the table, such as
``layers.*.ffn.w1`` with their count; `Estimate.rows` keeps them apart. Times of a line are those of
one layer; the last two lines are sums over all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from float8.convert.folding import pattern_of
from float8.estimate.devices import Device
from float8.estimate.roofline import Seconds, Shape, Use

MIB = 2**20
Cells = list[str]


@dataclass(frozen=True)
class Prediction:
    """One layer under one recipe: its time and the memory that it saves, or why it is refused.

    ``saved_bytes`` is what ``nn.Linear`` saves for backward, minus what the float8 layer saves and
    the bytes of a cached weight.
    """

    seconds: Seconds | None = None
    saved_bytes: int = 0
    refused: str | None = None


@dataclass(frozen=True)
class LayerEstimate:
    """One layer: its name, its shape, its plain time in seconds, and recipe -> prediction.

    ``is_float32`` says that its weight is float32, so that autocast is assumed.
    """

    layer: str
    shape: Shape
    bf16_s: float
    recipes: dict[str, Prediction]
    is_float32: bool = False

    def speedup(self, recipe: str) -> float | None:
        """The speed-up of one recipe; None where refused."""
        seconds = self.recipes[recipe].seconds
        return None if seconds is None else self.bf16_s / seconds.total

    def gains(self, recipe: str) -> bool:
        """Whether the recipe is predicted to be faster."""
        return (self.speedup(recipe) or 0) > 1


@dataclass(frozen=True)
class Total:
    """A sum over layers: seconds in bfloat16, seconds with a recipe, bytes saved."""

    bf16_s: float
    seconds: float
    saved_bytes: int

    @property
    def speedup(self) -> float:
        """The speed-up of all linear layers together."""
        return self.bf16_s / self.seconds


@dataclass(frozen=True, repr=False)
class Estimate:
    """What `float8.estimate` predicts; printed, or shown by a REPL, it is the table.

    Args:
        device: the device whose figures were used; ``device.provenance()`` has their sources.
        use: how the model is run: training or not, cached weights, microbatches.
        rows: one `LayerEstimate` per layer.
    """

    device: Device
    use: Use
    rows: Sequence[LayerEstimate]

    @property
    def recipes(self) -> list[str]:
        """The recipes, in the order of the call."""
        return list(self.rows[0].recipes)

    def total(self, recipe: str, only_gains: bool = False) -> Total:
        """The sum over all layers; refused layers count with their plain time.

        Args:
            recipe: its name in the table.
            only_gains: convert only layers predicted to gain, as `faster_layers` does.

        Returns:
            Its ``speedup``, and what that is made of: ``bf16_s`` and ``seconds``, the times in
            bfloat16 and with the recipe, and ``saved_bytes``.
        """
        seconds, saved = 0.0, 0
        for row in self.rows:
            prediction = row.recipes[recipe]
            if prediction.seconds is None or (only_gains and not row.gains(recipe)):
                seconds += row.bf16_s
            else:
                seconds += prediction.seconds.total
                saved += prediction.saved_bytes
        return Total(sum(row.bf16_s for row in self.rows), seconds, saved)

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
        from tabulate import tabulate

        reasons: dict[str, int] = {}
        groups: dict[tuple[object, ...], list[LayerEstimate]] = {}  # by the line that they share
        for row in self.rows:
            line = (pattern_of(row.layer), row.shape, row.bf16_s, *row.recipes.values())
            groups.setdefault(line, []).append(row)
        lines = [_line(rows, reasons) for rows in groups.values()]
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
            cells += _cells(total.seconds, total.speedup, total.saved_bytes)
        return cells

    def _footnotes(self, reasons: dict[str, int]) -> list[str]:
        what = "Forward and backward" if self.use.training else "Forward"
        autocast = " under autocast" if any(row.is_float32 for row in self.rows) else ""
        casts = "the compiler's kernels" if self.device.compiled_casts else "fused kernels"
        casts = "plain PyTorch" if self.device.emulates else casts
        return [f"[{number}] refused: {reason}" for reason, number in reasons.items()] + [
            f"{what} of one batch{autocast} on {self.device.name} ({self.device.arch}), casts by "
            f"{casts}, predicted from {_sources(self.device)}."
        ]


def _sources(device: Device) -> str:
    """How reliable the figures are."""
    kinds = {figure.kind for figure in device.figures().values()}
    if not kinds & {"measured", "fitted"}:
        return "datasheets and published efficiencies: NOTHING HERE WAS MEASURED"
    if kinds & {"assumed", "published", "predicted"}:
        return "measured or fitted figures and published or assumed ones"
    return "measured or fitted figures"


def _line(rows: Sequence[LayerEstimate], reasons: dict[str, int]) -> Cells:
    row = rows[0]
    name = row.layer if len(rows) == 1 else pattern_of(row.layer)
    cells = [name, str(len(rows)), str(row.shape), _ms(row.bf16_s)]
    for prediction in row.recipes.values():
        if prediction.seconds is None:
            assert prediction.refused is not None
            number = reasons.setdefault(prediction.refused, len(reasons) + 1)
            cells += [f"refused [{number}]", "", ""]
        else:
            seconds = prediction.seconds.total
            cells += _cells(seconds, row.bf16_s / seconds, prediction.saved_bytes)
    return cells


def _as_dict(row: LayerEstimate, recipe: str) -> dict[str, Any]:
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


def _cells(seconds: float, speedup: float, saved: int) -> Cells:
    """Of one recipe."""
    return [_ms(seconds), f"{speedup:.2f}x", f"{saved / MIB:.1f}"]
