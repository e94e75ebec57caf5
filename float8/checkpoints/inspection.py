"""`inspect_checkpoint`: what a folder of weights holds, and what is wrong with it.

Layers whose names differ by numbers alone, as those of all blocks of a transformer, are one kind
and one line. Headers and scales are read; with ``data=True`` the weights too, one at a time, which
finds values that are NaN, saturated or zero.

Problems are those of `Source`, and two of its own: a layer in high precision that the config does
not list, where others of its kind are in float8; and, with ``data=True``, float8 data that are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from float8.checkpoints.layout import Layer, Layout
from float8.checkpoints.readers import read_by
from float8.checkpoints.shards import Spec, kind_of
from float8.checkpoints.source import WEIGHT, Source
from float8.granularity import block_name
from float8.kernels import e8m0

Progress = Callable[[int, int, str], None]
_NAN, _LARGEST = 0x7F, 0x7E  # the bits of magnitudes in E4M3


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
        nan, saturated, zero: the shares of elements, if the data were read.
    """

    name: str
    count: int = 0
    dtype: str = ""
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    nbytes: int = 0
    smallest_scale: float | None = None
    largest_scale: float | None = None
    nan: float | None = None
    saturated: float | None = None
    zero: float | None = None

    def add(self, spec: Spec, nbytes: int) -> None:
        """Count one more tensor."""
        self.count += 1
        self.nbytes += nbytes
        name = str(spec.dtype).removeprefix("torch.")
        if name not in self.dtype.split(", "):
            self.dtype = f"{self.dtype}, {name}" if self.dtype else name
        if spec.shape not in self.shapes:
            self.shapes.append(spec.shape)

    def add_scale(self, scale: Tensor) -> None:
        """Count the scales of one layer."""
        if not scale.numel():
            return
        smallest, largest = (float(end) for end in torch.aminmax(e8m0.as_float32(scale)))
        known = self.smallest_scale, self.largest_scale
        self.smallest_scale = smallest if known[0] is None else min(known[0], smallest)
        self.largest_scale = largest if known[1] is None else max(known[1], largest)


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
    float8: list[Kind]
    high_precision: list[Kind]
    problems: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        count = sum(kind.count for kind in self.float8)
        files = f"{self.files} file{'s' * (self.files != 1)}"
        lines = [f"{self.path}: {size(self.nbytes)} in {files}"]
        if self.float8:
            lines += [f"{count} layers in float8, stored as {self.layout}"]
            lines += [] if self.read_by is None else [self.read_by]
            lines += [_float8(self.float8)]
        else:
            lines += ["no layer in float8"]
        if self.high_precision:
            lines += ["", "in high precision", _high_precision(self.high_precision)]
        lines += [""]
        problems = "no problems" if not self.problems else f"{len(self.problems)} problems:"
        return "\n".join([*lines, problems, *(f"- {text}" for text in self.problems)])


def inspect_checkpoint(
    path: str | Path, *, data: bool = False, progress: Progress | None = None
) -> Inspection:
    """Look at a checkpoint, float8 or not: a folder of safetensors files, or one file.

    ``data=True`` reads the weights in float8 too. ``progress`` is called with the number of tensors
    that are done, the number of all, and the key. Raises FileNotFoundError if a folder, file or
    shard is missing, and ValueError if a file or the config cannot be read at all.
    """
    source = Source(path, raises=False)
    specs, weights = source.shards.keys(), source.weights()
    problems = list(source.problems)
    float8: dict[str, Kind] = {}
    rest: dict[str, Kind] = {}
    names = set(source.layers)
    for done, (key, spec) in enumerate(weights.items()):
        if progress is not None:
            progress(done, len(weights), key)
        name = key.removesuffix(WEIGHT)
        if not (key.endswith(WEIGHT) and name in names):
            rest.setdefault(kind_of(key), Kind(kind_of(key))).add(spec, spec.nbytes)
            continue
        kind = float8.setdefault(kind_of(name), Kind(kind_of(name)))
        kind.add(spec, spec.nbytes + sum(specs[part].nbytes for part in source.parts(name)))
        if source.layout is None:
            continue
        try:
            layer = source.layer(name, torch.float32)
        except ValueError:
            continue  # one of source.problems
        kind.add_scale(layer.weight.scale)
        if data and (text := _read(layer, kind)) is not None:
            problems.append(f"{spec.file}: {text}")
    problems += _unlisted(weights, float8, names, source)
    nbytes = sum(spec.nbytes for spec in specs.values())
    files = len({spec.file for spec in specs.values()})
    layout = readers = None
    if source.layout is not None:
        layout = layout_text(source.layout)
        shapes = {name: weights[name + WEIGHT].shape for name in source.layers}
        readers = read_by(source.layout, {n: s for n, s in shapes.items() if len(s) == 2})
    kinds = ([*float8.values()], [*rest.values()])
    return Inspection(str(path), layout, readers, files, nbytes, *kinds, problems)


def _read(layer: Layer, kind: Kind) -> str | None:
    """Count what the data of one layer are; the problem with them, or None."""
    codes = layer.weight.float8_data.view(torch.uint8) & 0x7F  # without the sign
    total = max(codes.numel(), 1)
    nan, largest, zero = (int((codes == code).sum()) for code in (_NAN, _LARGEST, 0))
    for name, count in (("nan", nan), ("saturated", largest), ("zero", zero)):
        mean = getattr(kind, name) or 0.0  # of the layers before
        setattr(kind, name, mean + (count / total - mean) / kind.count)
    return f"{layer.name}{WEIGHT} has {nan} values that are NaN" if nan else None


def _unlisted(
    weights: dict[str, Spec], float8: dict[str, Kind], names: set[str], source: Source
) -> Iterable[str]:
    for key, spec in weights.items():
        name = key.removesuffix(WEIGHT)
        if not key.endswith(WEIGHT) or name in names or len(spec.shape) != 2:
            continue
        kind = float8.get(kind_of(name))
        if kind is not None and not source.lists(name):
            yield (
                f"{spec.file}: {key} is {spec.dtype}, {kind.count} others of its kind are in "
                f"float8, and {source.config_file} does not list it as left in high precision; "
                "readers look for its scale"
            )


def layout_text(layout: Layout) -> str:
    """A layout in words."""
    granularity = block_name(layout.granularity.block_of((0, 0)))
    inputs = "static" if layout.static_inputs else "dynamic"
    return f"{layout.name}, {granularity} {layout.scale_format.value} scales, {inputs} inputs"


def size(nbytes: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def _shapes(kind: Kind) -> str:
    texts = ["x".join(map(str, shape)) or "()" for shape in kind.shapes]
    return ", ".join(texts[:2]) + (", ..." if len(texts) > 2 else "")


def _float8(kinds: list[Kind]) -> str:
    from tabulate import tabulate

    shares = ("nan", "saturated", "zero")
    read = kinds[0].nan is not None
    headers = ["layers", "number", "shape", "size", "smallest scale", "largest scale"]
    rows = []
    for kind in kinds:
        scales = (kind.smallest_scale, kind.largest_scale)
        row = [kind.name, kind.count, _shapes(kind), size(kind.nbytes)]
        row += ["-" if scale is None else f"{scale:.3g}" for scale in scales]
        row += [f"{100 * (getattr(kind, share) or 0):.2g} %" for share in shares] if read else []
        rows.append(row)
    headers += [*shares] if read else []
    align = ["left", "right", "left", *["right"] * (len(headers) - 3)]
    return tabulate(rows, headers, "simple", colalign=align, disable_numparse=True)


def _high_precision(kinds: list[Kind]) -> str:
    from tabulate import tabulate

    rows = [[k.name, k.count, k.dtype, _shapes(k), size(k.nbytes)] for k in kinds]
    align = ["left", "right", "left", "left", "right"]
    headers = ["tensors", "number", "dtype", "shape", "size"]
    return tabulate(
        rows, headers, "simple", colalign=align if rows else None, disable_numparse=True
    )
