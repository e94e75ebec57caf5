"""`compare_checkpoints`: how far the weights of one checkpoint are from those of another.

Both may be in high precision or in float8, in the same or in different layouts: values are
compared, ``data * scale`` of float8 weights. For each weight

::

    SQNR = 10 log10( sum a^2 / sum (a - b)^2 )      in dB, infinite where all values are equal

A cast of normal weights to E4M3 has about 31.5 dB. Rows of a weight are compared some at a time, so
that memory does not grow with its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from float8.checkpoints.inspection import Progress
from float8.checkpoints.source import Source
from float8.granularity import block_name
from float8.kernels.sqnr import decibels, power
from float8.tensor import Float8Tensor

_ELEMENTS = 1 << 21  # that are compared at a time


@dataclass(frozen=True)
class Difference:
    """How one weight differs.

    Attributes:
        key: of the weight.
        a, b: how each checkpoint stores it.
        sqnr: of B's values against A's, in dB; infinite where all are equal, -inf where one is NaN
            or infinite and the other is not.
    """

    key: str
    a: str
    b: str
    sqnr: float


@dataclass
class Comparison:
    """What `compare_checkpoints` found.

    Attributes:
        a, b: the paths.
        differences: one for each weight that both have, the worst first.
        only_a, only_b: keys that the other lacks.
        other_shapes: key -> both shapes, of weights that cannot be compared.
    """

    a: str
    b: str
    differences: list[Difference]
    only_a: list[str]
    only_b: list[str]
    other_shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @property
    def worst(self) -> float:
        """The smallest SQNR of all weights; infinite if all are equal."""
        return min((found.sqnr for found in self.differences), default=math.inf)

    def is_within(self, least: float) -> bool:
        """Whether both have the same weights, each with at least this SQNR in dB."""
        return not (self.only_a or self.only_b or self.other_shapes) and self.worst >= least

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinities: ``sqnr`` is None for equal weights, and not finite."""
        weights = [
            {
                "key": found.key,
                "a": found.a,
                "b": found.b,
                "sqnr": found.sqnr if math.isfinite(found.sqnr) else None,
                "equal": found.sqnr == math.inf,
            }
            for found in self.differences
        ]
        same = {"a": self.a, "b": self.b, "weights": weights}
        other = {"only_a": self.only_a, "only_b": self.only_b, "other_shapes": self.other_shapes}
        return same | other

    def table(self, top: int) -> str:
        """The ``top`` worst weights, and what only one of the two has."""
        from tabulate import tabulate

        different = [found for found in self.differences if found.sqnr != math.inf]
        lines = [f"A = {self.a}", f"B = {self.b}"]
        equal = len(self.differences) - len(different)
        lines.append(f"{len(self.differences)} weights in both, {equal} of them with equal values")
        if different:
            rows = [[f"{d.sqnr:.1f}", d.key, d.a, d.b] for d in different[:top]]
            align = ["right", "left", "left", "left"]
            headers = ["SQNR dB", "weight", "in A", "in B"]
            table = tabulate(rows, headers, "simple", colalign=align, disable_numparse=True)
            lines += ["", table]
            if len(different) > top:
                last = different[-1].sqnr
                lines.append(f"... and {len(different) - top} more, up to {last:.1f} dB")
        for name, keys in (("A", self.only_a), ("B", self.only_b)):
            if keys:
                more = f", ... ({len(keys)} in all)" if len(keys) > top else ""
                lines += ["", f"only in {name}: " + ", ".join(keys[:top]) + more]
        shapes = [f"{key}: {a} in A, {b} in B" for key, (a, b) in self.other_shapes.items()]
        if shapes:
            lines += ["", *shapes[:top]]
            if len(shapes) > top:
                lines.append(f"... and {len(shapes) - top} more of other shapes")
        return "\n".join(lines)


def compare_checkpoints(
    a: str | Path, b: str | Path, *, progress: Progress | None = None
) -> Comparison:
    """Compare all weights of two checkpoints by value; ``a`` is the reference.

    Each is a folder of safetensors files, or one file. ``progress`` is called with the number of
    weights that are done, the number of all, and the key. Raises FileNotFoundError if a folder,
    file or shard is missing, and ValueError if files are damaged or contradict each other or their
    config.
    """
    sources = Source(a), Source(b)
    specs_a, specs_b = (source.weights() for source in sources)
    both = [key for key in specs_a if key in specs_b]
    found = Comparison(
        str(a),
        str(b),
        [],
        [key for key in specs_a if key not in specs_b],
        [key for key in specs_b if key not in specs_a],
        {},
    )
    for done, key in enumerate(both):
        if progress is not None:
            progress(done, len(both), key)
        if specs_a[key].shape != specs_b[key].shape:
            found.other_shapes[key] = specs_a[key].shape, specs_b[key].shape
            continue
        x, y = (source.read(key, torch.float32) for source in sources)
        found.differences.append(Difference(key, _stored(x), _stored(y), _sqnr(x, y)))
    found.differences.sort(key=lambda each: (each.sqnr, each.key))
    return found


def _stored(x: Tensor) -> str:
    if isinstance(x, Float8Tensor):
        return f"float8 by {block_name(x.block)}"
    return str(x.dtype).removeprefix("torch.")


def _sqnr(a: Tensor, b: Tensor) -> float:
    """The SQNR of b against a, in dB; see `Difference`."""
    signal = noise = 0.0
    for x, y in _parts(a, b):
        # Equal infinities and NaNs at the same place are equal.
        difference = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, x - y)
        if not bool(difference.isfinite().all()):
            return -math.inf
        signal += power(torch.where(x.isfinite(), x, 0.0))
        noise += power(difference)
    return math.inf if noise == 0 else decibels(signal, noise)


def _parts(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in float32, some rows at a time."""
    if a.dim() == 0 or not a.numel():
        yield _float32(a), _float32(b)
        return
    blocks = [x.block[0] for x in (a, b) if isinstance(x, Float8Tensor)]
    unit = math.lcm(*(block for block in blocks if block > 0))
    rows = max(1, _ELEMENTS * a.shape[0] // max(1, a.numel()) // unit) * unit
    for begin in range(0, a.shape[0], rows):
        end = min(begin + rows, a.shape[0])
        yield _float32(a[begin:end]), _float32(b[begin:end])


def _float32(x: Tensor) -> Tensor:
    if isinstance(x, Float8Tensor):
        return x.dequantize(torch.float32)
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.double() if x.dtype.itemsize > 4 else x.float()
