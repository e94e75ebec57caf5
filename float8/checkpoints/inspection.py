"""`inspect_checkpoint`, `compare_checkpoints`: what folders of weights hold, and how they differ.

Layers whose names differ by numbers alone, as those of all blocks of a transformer, are one kind
and one line. Headers and scales are read; with ``data=True`` the weights too, one at a time, which
finds values that are NaN, saturated or zero. Problems are those of `Source`, and two more: a layer
in high precision that the config does not list, where others of its kind are in float8; and, with
``data=True``, float8 data that are NaN.

Two checkpoints may be in high precision or in float8, in the same or in different layouts: values
are compared, ``data * scale`` of float8 weights. For each weight

::

    SQNR = 10 log10( sum a^2 / sum (a - b)^2 )      in dB, infinite where all values are equal

A cast of normal weights to E4M3 has about 31.5 dB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from float8.checkpoints.files import kind_of
from float8.checkpoints.layouts import read_by
from float8.checkpoints.source import WEIGHT, Source
from float8.granularity import block_name
from float8.kernels import e8m0
from float8.kernels.sqnr import decibels, power
from float8.tensor import Float8Tensor

_CODES = {"nan": 0x7F, "saturated": 0x7E, "zero": 0}  # magnitudes in E4M3


@dataclass
class Kind:
    """Tensors whose names differ by numbers alone.

    Attributes:
        name: with ``*`` for numbers.
        count: of tensors; of layers in float8.
        dtype: of the weights.
        shapes: of the weights, all that occur.
        nbytes: of the weights and their scales.
        smallest_scale, largest_scale: of the scales of all layers; None in high precision.
        nan, saturated, zero: the mean shares of elements, if the data were read.
    """

    name: str
    count: int
    dtype: str
    shapes: list[tuple[int, ...]]
    nbytes: int
    smallest_scale: float | None = None
    largest_scale: float | None = None
    nan: float | None = None
    saturated: float | None = None
    zero: float | None = None

    def row(self) -> list[str]:
        """Number, shape and size as people read them."""
        shapes = ["x".join(map(str, shape)) or "()" for shape in self.shapes]
        more = ", ..." if len(shapes) > 2 else ""
        return [str(self.count), ", ".join(shapes[:2]) + more, size(self.nbytes)]


@dataclass
class Inspection:
    """What `inspect_checkpoint` found.

    Attributes:
        path: of the folder or file.
        layout: of the layers in float8, or None.
        read_by: which libraries read it, or None.
        files: of tensors.
        nbytes: of all tensors.
        float8, high_precision: the kinds of layers in float8, and of all other tensors.
        problems: one sentence each.
    """

    path: str
    layout: str | None
    read_by: str | None
    files: int
    nbytes: int
    problems: list[str]
    float8: list[Kind] = field(default_factory=list)
    high_precision: list[Kind] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.path}: {size(self.nbytes)} in {self.files} file{'s' * (self.files != 1)}"]
        if self.float8:
            count = sum(kind.count for kind in self.float8)
            lines += [f"{count} layers in float8, stored as {self.layout}"]
            lines += [] if self.read_by is None else [self.read_by]
            shares = list(_CODES) if self.float8[0].nan is not None else []
            rows = []
            for kind in self.float8:
                scales = (kind.smallest_scale, kind.largest_scale)
                texts = ["-" if scale is None else f"{scale:.3g}" for scale in scales]
                texts += [f"{100 * getattr(kind, share):.2g} %" for share in shares]
                rows.append([kind.name, *kind.row(), *texts])
            headers = ["layers", "number", "shape", "size", "smallest scale", "largest scale"]
            lines += [_table([*headers, *shares], rows, "lrl")]
        else:
            lines += ["no layer in float8"]
        if self.high_precision:
            rows = [[k.name, k.row()[0], k.dtype, *k.row()[1:]] for k in self.high_precision]
            headers = ["tensors", "number", "dtype", "shape", "size"]
            lines += ["", "in high precision", _table(headers, rows, "lrll")]
        problems = f"{len(self.problems)} problems:" if self.problems else "no problems"
        return "\n".join([*lines, "", problems, *(f"- {text}" for text in self.problems)])


def inspect_checkpoint(path: str | Path, *, data: bool = False) -> Inspection:
    """Look at a checkpoint, float8 or not: a folder of safetensors files, or one file.

    ``data=True`` reads the weights in float8 too. Raises FileNotFoundError if a folder, file or
    shard is missing, and ValueError if a file or the config cannot be read at all.
    """
    source = Source(path, raises=False)
    shapes = {name: source.specs[name + WEIGHT].shape for name in source.layers}
    shapes = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    found = Inspection(
        str(path),
        None if source.layout is None else str(source.layout),
        None if source.layout is None else read_by(source.layout, shapes),
        len({spec.file for spec in source.specs.values()}),
        sum(spec.nbytes for spec in source.specs.values()),
        list(source.problems),
    )
    kinds: dict[tuple[bool, str], list[str]] = {}
    for key in source.weights:
        name = key.removesuffix(WEIGHT)
        is_layer = key.endswith(WEIGHT) and name in source.layers
        kinds.setdefault((is_layer, kind_of(name if is_layer else key)), []).append(key)
    for (is_layer, name), keys in kinds.items():
        specs = [source.specs[key] for key in keys]
        names = [key.removesuffix(WEIGHT) for key in keys]
        dtypes = dict.fromkeys(str(spec.dtype).removeprefix("torch.") for spec in specs)
        parts = [part for own in names if is_layer for part in source.layers[own]]
        nbytes = sum(source.specs[key].nbytes for key in (*keys, *parts))
        shapes_of_kind = list(dict.fromkeys(spec.shape for spec in specs))
        kind = Kind(name, len(keys), ", ".join(dtypes), shapes_of_kind, nbytes)
        (found.float8 if is_layer else found.high_precision).append(kind)
        if is_layer:
            found.problems += _measure(kind, source, names, data)
        elif others := kinds.get((True, name.removesuffix(WEIGHT))):
            found.problems += [
                f"{source.place(key)} is {source.specs[key].dtype}, {len(others)} others of its "
                f"kind are in float8, and {source.config_file} does not list it as left in high "
                "precision; readers look for its scale"
                for key, own in zip(keys, names, strict=True)
                if len(source.specs[key].shape) == 2 and not source.lists(own)
            ]
    return found


def _measure(kind: Kind, source: Source, names: list[str], data: bool) -> list[str]:
    """Find the scales of layers, and what their data are; the problems with them."""
    problems, ends = [], []
    shares: dict[str, list[float]] = {share: [] for share in _CODES if data}
    for name in names:
        try:
            weight = source.layer(name, torch.float32).weight if source.layout else None
        except ValueError:
            continue  # one of source.problems
        if weight is None or not weight.numel():
            continue
        ends += [float(end) for end in torch.aminmax(e8m0.as_float32(weight.scale))]
        codes = weight.float8_data.view(torch.uint8)
        for share, found in shares.items():
            count = int(((codes & 0x7F) == _CODES[share]).sum())  # without the sign
            found.append(count / codes.numel())
            if share == "nan" and count:
                problems.append(f"{source.place(name + WEIGHT)} has {count} values that are NaN")
    if ends:
        kind.smallest_scale, kind.largest_scale = min(ends), max(ends)
    for share, found in shares.items():
        setattr(kind, share, sum(found) / max(len(found), 1))
    return problems


def size(nbytes: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def _table(headers: list[str], rows: list[list[str]], align: str) -> str:
    """``align`` has a letter for each of the first columns; the others are right."""
    kinds = [{"l": "left", "r": "right"}[x] for x in align.ljust(len(headers), "r")]
    return tabulate(rows, headers, "simple", colalign=kinds, disable_numparse=True)


# --- compare


@dataclass
class Comparison:
    """What `compare_checkpoints` found.

    Attributes:
        a, b: the paths.
        weights: of each weight that both have, the worst first: its ``key``; ``a`` and ``b``, how
            each stores it; ``equal``; and ``sqnr``, of B's values against A's in dB. That is None
            for equal weights, and where one is NaN or infinite and the other is not: JSON has no
            infinities.
        only_a, only_b: keys that the other lacks.
        other_shapes: key -> both shapes, of weights that cannot be compared.
    """

    a: str
    b: str
    weights: list[dict[str, Any]]
    only_a: list[str]
    only_b: list[str]
    other_shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def is_within(self, least: float) -> bool:
        """Whether both have the same weights, each with at least this SQNR in dB."""
        is_same = not (self.only_a or self.only_b or self.other_shapes)
        return is_same and all(w["equal"] or _of(w) >= least for w in self.weights)

    def table(self, top: int) -> str:
        """The ``top`` worst weights, and what only one of the two has."""
        different = [found for found in self.weights if not found["equal"]]
        equal = len(self.weights) - len(different)
        lines = [f"A = {self.a}", f"B = {self.b}"]
        lines.append(f"{len(self.weights)} weights in both, {equal} of them with equal values")
        if different:
            rows = [[f"{_of(w):.1f}", w["key"], w["a"], w["b"]] for w in different[:top]]
            lines += ["", _table(["SQNR dB", "weight", "in A", "in B"], rows, "rlll")]
        if len(different) > top:
            lines.append(f"... and {len(different) - top} more, up to {_of(different[-1]):.1f} dB")
        shapes = [f"{key}: {a} in A, {b} in B" for key, (a, b) in self.other_shapes.items()]
        left = {"only in A": self.only_a, "only in B": self.only_b, "of other shapes": shapes}
        for title, texts in left.items():
            if texts:
                more = f", ... ({len(texts)} in all)" if len(texts) > top else ""
                lines += ["", f"{title}: " + ", ".join(texts[:top]) + more]
        return "\n".join(lines)


def _of(weight: dict[str, Any]) -> float:
    found: float | None = weight["sqnr"]
    return -math.inf if found is None else found


def compare_checkpoints(a: str | Path, b: str | Path) -> Comparison:
    """Compare all weights of two checkpoints by value; ``a`` is the reference.

    Each is a folder of safetensors files, or one file. Raises FileNotFoundError if a folder, file
    or shard is missing, and ValueError if files are damaged or contradict each other or their
    config.
    """
    sources = Source(a), Source(b)
    only_a, only_b = (
        [key for key in own.weights if key not in other.weights]
        for own, other in (sources, sources[::-1])
    )
    found = Comparison(str(a), str(b), [], only_a, only_b, {})
    for key, spec in sources[0].weights.items():
        other = sources[1].weights.get(key)
        if other is not None and other.shape != spec.shape:
            found.other_shapes[key] = spec.shape, other.shape
        elif other is not None:
            x, y = (source.read(key, torch.float32) for source in sources)
            sqnr = _sqnr(x, y)
            own: dict[str, Any] = {"key": key, "a": _stored(x), "b": _stored(y)}
            own["sqnr"] = sqnr if math.isfinite(sqnr) else None
            found.weights.append(own | {"equal": sqnr == math.inf})
    found.weights.sort(key=lambda w: (w["equal"], _of(w), w["key"]))
    return found


def _stored(x: Tensor) -> str:
    if isinstance(x, Float8Tensor):
        return f"float8 by {block_name(x.block)}"
    return str(x.dtype).removeprefix("torch.")


def _sqnr(a: Tensor, b: Tensor) -> float:
    """The SQNR of b against a, in dB; see `Comparison`."""
    x, y = _values(a), _values(b)
    # Equal infinities and NaNs at the same place are equal.
    difference = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, x - y)
    if not bool(difference.isfinite().all()):
        return -math.inf
    noise = power(difference)
    return math.inf if noise == 0 else decibels(power(torch.where(x.isfinite(), x, 0.0)), noise)


def _values(x: Tensor) -> Tensor:
    if isinstance(x, Float8Tensor):
        return x.dequantize(torch.float32)
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.double() if x.dtype.itemsize > 4 else x.float()
