"""`plan_save`: what `save_pretrained` would write, as an object that prints as a table."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from torch import Tensor, nn

from float8.checkpoints.layout import Layout
from float8.checkpoints.readers import TRANSFORMERS
from float8.checkpoints.shard_writer import MAX_SHARD_BYTES, check_shard_bytes, files_of
from float8.checkpoints.shards import Spec, kind_of
from float8.checkpoints.weights import Checkpoint, items

__all__ = ["SavePlan", "plan_save"]

_WIDTH = 60  # of a reason in the table


@dataclass(frozen=True)
class SavePlan:
    """What a checkpoint will have. ``print(plan)`` shows it as a table.

    Layers whose names differ in numbers alone share a line of the table.

    Attributes:
        layout: how layers in float8 are stored.
        layers: the layers in float8, as files name them -> how their weights are cast.
        skipped: the linear layers that stay in high precision -> why.
        tensors: key -> dtype, shape and file of every tensor.
        files: file -> bytes of its tensors.
        quantization_config: what ``config.json`` says to readers.
        notes: which libraries read it, and what they do with it.
    """

    layout: Layout
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

    def layer_of(self, key: str) -> str | None:
        """The layer in float8 to which a tensor belongs, or None."""
        suffixes = (".weight", *self.layout.suffixes())
        names = [key.removesuffix(suffix) for suffix in suffixes if key.endswith(suffix)]
        return next((name for name in names if name in self.layers), None)

    def __str__(self) -> str:
        from tabulate import tabulate

        sizes: dict[str, int] = dict.fromkeys(self.layers, 0)
        others: dict[str, list[int]] = {}
        for key, spec in self.tensors.items():
            if (layer := self.layer_of(key)) is not None:
                sizes[layer] += spec.nbytes
            else:
                others.setdefault(str(spec.dtype).removeprefix("torch."), []).append(spec.nbytes)
        lines: dict[tuple[str, ...], list[int]] = {}
        for name, how in self.layers.items():
            shape = "x".join(map(str, self.tensors[f"{name}.weight"].shape))
            lines.setdefault((kind_of(name), shape, how), []).append(sizes[name])
        rows = [(name, len(n), shape, _mb(sum(n)), how) for (name, shape, how), n in lines.items()]
        rows += [
            (f"other tensors, {dtype}", len(n), "", _mb(sum(n)), "as they are")
            for dtype, n in others.items()
        ]
        reasons: dict[tuple[str, str], int] = {}
        for name, reason in self.skipped.items():
            reasons[kind_of(name), reason] = reasons.get((kind_of(name), reason), 0) + 1
        headers = ("layers", "count", "weight", "MB", "float8 by")
        align = ("left", "right", "right", "right", "left")
        parts = [
            f"{self.layout}\n{len(self.layers)} layers in float8, {self.nbytes / 1e9:.3g} GB in "
            f"{len(self.files)} file{'s' if len(self.files) > 1 else ''}",
            tabulate(rows, headers, "simple", disable_numparse=True, colalign=align),
        ]
        if reasons:
            skipped = [(name, n, reason) for (name, reason), n in reasons.items()]
            headers = ("in high precision", "count", "why")  # type: ignore[assignment]
            width = [None, None, _WIDTH]
            parts.append(tabulate(skipped, headers, "simple", maxcolwidths=width))
        parts.append("\n".join(fill(note, 100) for note in self.notes))
        return "\n\n".join(parts)


def plan_save(
    model: nn.Module,
    layout: Layout | str | None = None,
    *,
    input_scales: Mapping[str, float | Tensor] | None = None,
    recast: bool = False,
    max_shard_bytes: float = MAX_SHARD_BYTES,
) -> SavePlan:
    """What `save_pretrained` would write for a model; no data is read, and nothing is written.

    Args:
        model: converted to float8; also on the meta device.
        layout, input_scales, recast, max_shard_bytes: as `save_pretrained`.

    Raises:
        TypeError: an argument of another type.
        ValueError: the model has no layer in float8, or some that the layout cannot store; the
            message names all of them, and the fix.
    """
    found = items(model, layout, input_scales=input_scales, recast=recast)
    return plan_of(found, max_shard_bytes)


def plan_of(checkpoint: Checkpoint, max_shard_bytes: float) -> SavePlan:
    """The plan of a checkpoint whose items are known."""
    check_shard_bytes(max_shard_bytes)
    if checkpoint.misread is not None:
        warnings.warn(
            f"{TRANSFORMERS} misreads this checkpoint: {checkpoint.misread}. It reads "
            "CompressedTensors(Rowwise()) in all sizes",
            stacklevel=3,
        )
    shards = files_of(checkpoint.specs, max_shard_bytes)
    return SavePlan(
        layout=checkpoint.layout,
        layers=dict(checkpoint.layers),
        skipped=dict(checkpoint.skipped),
        tensors={
            key: Spec(spec.dtype, spec.shape, file)
            for file, specs in shards.items()
            for key, spec in specs.items()
        },
        files={file: sum(spec.nbytes for spec in specs.values()) for file, specs in shards.items()},
        quantization_config=checkpoint.config,
        notes=checkpoint.notes,
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.2f}"
