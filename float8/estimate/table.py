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
from float8.kernels.casts import KERNELS

MIB = 2**20


@dataclass(frozen=True)
class Prediction:
    """One layer, or all, under one recipe: time and memory saved, or why the recipe is refused.

    ``bf16_s`` is the plain time in seconds. ``saved_bytes`` is what ``nn.Linear`` saves for
    backward, minus what the float8 layer saves and the bytes of a cached weight.
    """

    bf16_s: float
    seconds: Seconds | None = None
    saved_bytes: int = 0
    refused: str | None = None

    @property
    def speedup(self) -> float:
        """How many times faster than bfloat16; 1 where it is refused."""
        return 1.0 if self.seconds is None else self.bf16_s / self.seconds.total


@dataclass(frozen=True)
class LayerEstimate:
    """One layer: its name, its shape, its plain time in seconds, and recipe -> prediction."""

    layer: str
    shape: Shape
    bf16_s: float
    recipes: dict[str, Prediction]


@dataclass(frozen=True, repr=False)
class Estimate:
    """What `float8.estimate` predicts; printed, or shown by a REPL, it is the table.

    Args:
        device: the device whose rates were used; ``device.sources`` says where they are from.
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

    def total(self, recipe: str, only_gains: bool = False) -> Prediction:
        """The sum over all layers; refused layers count with their plain time.

        Args:
            recipe: its name in the table.
            only_gains: convert only layers predicted to gain, as `faster_layers` does
                (which takes all stacks of a module of experts, or none).

        Returns:
            Its ``speedup``, and what that is made of: ``bf16_s`` and ``seconds.total``, the times
            in bfloat16 and with the recipe, and ``saved_bytes``.
        """
        plain = seconds = 0.0
        saved = 0
        for each in (row.recipes[recipe] for row in self.rows):
            plain += each.bf16_s
            if each.seconds is None or (only_gains and each.speedup <= 1):
                seconds += each.bf16_s
            else:
                seconds += each.seconds.total
                saved += each.saved_bytes
        return Prediction(plain, Seconds(seconds), saved)

    def __repr__(self) -> str:
        from tabulate import tabulate

        groups: dict[tuple[Any, ...], list[LayerEstimate]] = {}  # by the line that they share
        for row in self.rows:
            line = (pattern_of(row.layer), row.shape, *row.recipes.values())
            groups.setdefault(line, []).append(row)
        reasons = dict[str, int]()
        lines = []
        for (pattern, shape, *predictions), rows in groups.items():
            name = rows[0].layer if len(rows) == 1 else pattern
            lines.append([name, str(len(rows)), str(shape), *_cells(predictions, reasons)])
        for what, number, gains in (
            ("all that run", str(len(self.rows)), False),
            ("only those that gain", "", True),
        ):
            totals = [self.total(recipe, gains) for recipe in self.recipes]
            lines.append([what, number, "", *_cells(totals, reasons)])
        headers = ["layer", "n", "M,K,N", "bf16 ms"]
        for name in self.recipes:
            headers += [f"{name} ms", "speed-up", "saves MiB"]
        align = ["left", "right", "left"] + ["right"] * (len(headers) - 3)
        table = tabulate(lines, headers, disable_numparse=True, colalign=align)
        notes = [f"[{number}] refused: {reason}" for reason, number in reasons.items()]
        what = "Forward and backward" if self.use.training else "Forward"
        sources = "datasheets and published efficiencies: NOTHING HERE WAS MEASURED"
        if any(source.startswith("measured: ") for source in self.device.sources):
            sources = "what was measured here, and published or assumed figures"
        casts = "in plain PyTorch" if self.device.arch not in KERNELS else "by fused kernels"
        notes.append(
            f"{what} of one batch on {self.device.name} ({self.device.arch}), casts "
            f"{casts}, predicted from {sources}."
        )
        return "\n".join([table, "", *notes])


def _cells(predictions: list[Prediction], reasons: dict[str, int]) -> list[str]:
    """The numbers of a line; a reason of a refusal is a number, which a footnote explains."""
    cells = [_ms(predictions[0].bf16_s)]
    for each in predictions:
        if each.seconds is None:
            number = reasons.setdefault(str(each.refused), len(reasons) + 1)
            cells += [f"refused [{number}]", "", ""]
        else:
            saved = f"{each.saved_bytes / MIB:.1f}"
            cells += [_ms(each.seconds.total), f"{each.speedup:.2f}x", saved]
    return cells


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"
