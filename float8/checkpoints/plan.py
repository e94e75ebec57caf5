"""`SavePlan`: what a checkpoint will have, saved from a model or converted from another one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from float8.checkpoints.casts import StoredLayer
from float8.checkpoints.files import Spec, in_files, table
from float8.checkpoints.layouts import BLOCKS, Layout, read_by
from float8.convert.folding import pattern_of
from float8.formats import ScaleFormat


@dataclass(frozen=True)
class SavePlan:
    """What a checkpoint will have. ``print(plan)`` shows it as a table.

    Layers whose names differ in numbers alone share a line of the table.

    Attributes:
        layout: how layers in float8 are stored; None if the whole checkpoint is in high precision.
        layers: the layers in float8, as files name them -> how their weights are cast.
        skipped: the linear layers that stay in high precision -> why.
        tensors: key -> dtype, shape and file of every tensor.
        files: file -> bytes of its tensors.
        quantization_config: what ``config.json`` says to readers.
        notes: which libraries read it, and what they do with it.
    """

    layout: Layout | None
    layers: dict[str, str]
    skipped: dict[str, str]
    tensors: dict[str, Spec]
    files: dict[str, int]
    quantization_config: dict[str, Any]
    notes: list[str]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(self.files.values())

    def __str__(self) -> str:
        sizes = {key: spec.nbytes for key, spec in self.tensors.items()}
        lines: dict[tuple[str, str, str], list[int]] = defaultdict(list)  # -> bytes
        for name, how in self.layers.items():
            assert self.layout is not None
            shape = "x".join(map(str, self.tensors[f"{name}.weight"].shape))
            keys = [f"{name}{suffix}" for suffix in (".weight", *self.layout.suffixes)]
            lines[pattern_of(name), shape, how].append(sum(sizes.pop(key) for key in keys))
        for key, nbytes in sizes.items():
            dtype = str(self.tensors[key].dtype).removeprefix("torch.")
            lines[f"other tensors, {dtype}", "", "as they are"].append(nbytes)
        rows = [[a, len(n), b, f"{sum(n) / 1e6:,.2f}", c] for (a, b, c), n in lines.items()]
        title = "high precision" if self.layout is None else repr(self.layout)
        files = f"{len(self.files)} file{'s' * (len(self.files) > 1)}"
        parts = [
            f"{title}\n{len(self.layers)} layers in float8, {self.nbytes / 1e9:.3g} GB in {files}",
            table(["layers", "count", "weight", "MB", "float8 by"], rows, "lrrrl"),
        ]
        if self.skipped:
            kinds = Counter((pattern_of(name), why) for name, why in self.skipped.items())
            left = [[name, count, fill(why, 60)] for (name, why), count in kinds.items()]
            parts.append(table(["in high precision", "count", "why"], left, "lrl"))
        notes = "\n".join(fill(note, 100) for note in self.notes)
        return "\n\n".join([*parts, *([notes] if notes else [])])


def plan_of(
    layout: Layout | None,
    layers: Mapping[str, StoredLayer],
    how: dict[str, str],
    skipped: dict[str, str],
    specs: Mapping[str, Spec],
    max_shard_bytes: float,
) -> SavePlan:
    """The plan of a checkpoint that has ``layers`` in float8, and tensors of these ``specs``.

    Raises ValueError if readers would take a name of ``skipped`` for one of ``layers``.
    """
    tensors = in_files(specs, max_shard_bytes)
    files: dict[str, int] = defaultdict(int)
    for spec in tensors.values():
        files[spec.file] += spec.nbytes
    config, notes = {}, []
    if layout is not None:
        config = layout.quantization_config(layers, skipped)
        notes = [read_by(layout, {name: layer.shape for name, layer in layers.items()})]
        scales = {layer.scale_format for layer in layers.values()}
        if layout.granularity == BLOCKS and ScaleFormat.FLOAT32 in scales:
            notes.append(
                "not all scales are powers of two: on Blackwell, engines that multiply by UE8M0 "
                "scales cast such weights again, or misread them (SGLang before June 2026; by its "
                "source); take FineGrained(scale_format=ScaleFormat.POWER_OF_TWO)"
            )
    return SavePlan(layout, how, skipped, tensors, dict(files), config, notes)
