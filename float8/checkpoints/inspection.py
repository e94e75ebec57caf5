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
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from float8.checkpoints.files import size, table
from float8.checkpoints.layouts import read_by
from float8.checkpoints.source import WEIGHT, Source
from float8.convert.folding import pattern_of
from float8.granularity import block_name
from float8.kernels import e8m0
from float8.kernels.sqnr import decibels, power
from float8.tensor import Float8Tensor

_CODES = {"nan": 0x7F, "saturated": 0x7E, "zero": 0}  # magnitudes in E4M3
_MISSING = "missing"
_MEASURED = ("smallest_scale", "largest_scale", *_CODES)


Report = dict[str, Any]


def inspect_checkpoint(path: str | Path, *, data: bool = False) -> Report:
    """Look at a checkpoint, float8 or not: a folder of safetensors files, or one file.

    ``data=True`` reads the weights in float8 too. Raises FileNotFoundError if a folder, file or
    shard is missing, and ValueError if a file or the config cannot be read at all.

    Returns:
        ``path``; the ``layout`` of the layers in float8 and the libraries that read it
        (``read_by``), or None; the number of ``files`` and the ``nbytes`` of all tensors; the
        ``problems``, one sentence each; and the kinds of layers in ``float8`` and of all other
        tensors (``high_precision``). A kind has its ``name``, with ``*`` for numbers; the ``count``
        of tensors; the ``dtype``, all ``shapes`` and the ``nbytes`` of the weights, with their
        scales; the smallest and the largest scale; and the mean shares of elements that are
        ``nan``, ``saturated`` and ``zero``. These are None in high precision, and the shares if no
        data were read.
    """
    source = Source(path, raises=False)
    shapes = {name: source.specs[name + WEIGHT].shape for name in source.layers}
    shapes = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    problems = list(source.problems)
    found: dict[bool, list[Report]] = {True: [], False: []}  # whether in float8
    kinds: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for key in source.weights:
        name = key.removesuffix(WEIGHT)
        is_layer = key.endswith(WEIGHT) and name in source.layers
        kinds[is_layer, pattern_of(name if is_layer else key)].append(key)
    for (is_layer, name), keys in kinds.items():
        specs = [source.specs[key] for key in keys]
        names = [key.removesuffix(WEIGHT) for key in keys]
        parts = [part for own in names if is_layer for part in source.layers[own]]
        kind = {
            "name": name,
            "count": len(keys),
            "dtype": ", ".join(dict.fromkeys(_text(spec.dtype) for spec in specs)),
            "shapes": list(dict.fromkeys(spec.shape for spec in specs)),
            "nbytes": sum(source.specs[key].nbytes for key in (*keys, *parts)),
            **dict.fromkeys(_MEASURED),
        }
        found[is_layer].append(kind)
        if is_layer:
            problems += _measure(kind, source, names, data)
        elif others := kinds.get((True, name.removesuffix(WEIGHT))):
            problems += [
                f"{source.place(key)} is {source.specs[key].dtype}, {len(others)} others of its "
                f"kind are in float8, and {source.config_file} does not list it as left in high "
                "precision; readers look for its scale"
                for key, own in zip(keys, names, strict=True)
                if len(source.specs[key].shape) == 2 and not source.lists(own)
            ]
    return {
        "path": str(path),
        "layout": None if source.layout is None else str(source.layout),
        "read_by": None if source.layout is None else read_by(source.layout, shapes),
        "files": len({spec.file for spec in source.specs.values()}),
        "nbytes": sum(spec.nbytes for spec in source.specs.values()),
        "problems": problems,
        "float8": found[True],
        "high_precision": found[False],
    }


def inspection_text(report: Report) -> str:
    """What `inspect_checkpoint` returned, as tables."""
    files = f"{report['files']} file{'s' * (report['files'] != 1)}"
    lines = [f"{report['path']}: {size(report['nbytes'])} in {files}"]
    if report["float8"]:
        count = sum(kind["count"] for kind in report["float8"])
        lines += [f"{count} layers in float8, stored as {report['layout']}"]
        lines += [] if report["read_by"] is None else [report["read_by"]]
        shares = [share for share in _CODES if report["float8"][0][share] is not None]
        rows = []
        for kind in report["float8"]:
            scales = [kind[end] for end in _MEASURED[:2]]
            texts = ["-" if scale is None else f"{scale:.3g}" for scale in scales]
            texts += [f"{100 * kind[share]:.2g} %" for share in shares]
            rows.append([kind["name"], kind["count"], *_sizes(kind), *texts])
        headers = ["layers", "number", "shape", "size", "smallest scale", "largest scale"]
        lines += [table([*headers, *shares], rows, "lrl")]
    else:
        lines += ["no layer in float8"]
    if report["high_precision"]:
        rows = [[k["name"], k["count"], k["dtype"], *_sizes(k)] for k in report["high_precision"]]
        headers = ["tensors", "number", "dtype", "shape", "size"]
        lines += ["", "in high precision", table(headers, rows, "lrll")]
    problems = report["problems"]
    title = f"{len(problems)} problems:" if problems else "no problems"
    return "\n".join([*lines, "", title, *(f"- {text}" for text in problems)])


def _sizes(kind: Report) -> list[str]:
    shapes = ["x".join(map(str, shape)) or "()" for shape in kind["shapes"]]
    return [", ".join(shapes[:2]) + ", ..." * (len(shapes) > 2), size(kind["nbytes"])]


def _measure(kind: Report, source: Source, names: list[str], data: bool) -> list[str]:
    """Find the scales of layers, and what their data are; the problems with them."""
    problems, ends = [], []
    shares: dict[str, list[float]] = {share: [] for share in _CODES if data}
    for name in names:
        try:
            weight = source.layer(name, torch.float32)[0] if source.layout else None
        except ValueError:
            continue  # one of source.problems
        if weight is None or not weight.numel():
            continue
        ends += [float(end) for end in torch.aminmax(e8m0.as_float32(weight.scale))]
        codes = weight.float8_data.view(torch.uint8) & 0x7F  # without the sign
        for share, found in shares.items():
            count = int((codes == _CODES[share]).sum())
            found.append(count / codes.numel())
            if share == "nan" and count:
                problems.append(f"{source.place(name + WEIGHT)} has {count} values that are NaN")
    if ends:
        kind["smallest_scale"], kind["largest_scale"] = min(ends), max(ends)
    kind |= {share: sum(found) / max(len(found), 1) for share, found in shares.items()}
    return problems


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- compare


def compare_checkpoints(a: str | Path, b: str | Path) -> Report:
    """Compare all weights of two checkpoints by value; ``a`` is the reference.

    Each is a folder of safetensors files, or one file. Raises FileNotFoundError if a folder, file
    or shard is missing, and ValueError if files are damaged or contradict each other or their
    config.

    Returns:
        the paths ``a`` and ``b``; and the ``weights``, the worst first, each with its ``key``, how
        ``a`` and ``b`` store it, whether all values are ``equal``, and the ``sqnr`` of B's values
        against A's in dB. That is None for equal weights, and where one is missing, of another
        shape, or NaN or infinite where the other is not: JSON has no infinities.
    """
    first, second = Source(a), Source(b)
    weights = []
    for key in sorted(first.weights.keys() | second.weights.keys()):
        x, y = (s.read(key, torch.float32) if key in s.weights else None for s in (first, second))
        sqnr, stored = -math.inf, [_stored(x), _stored(y)]
        if x is not None and y is not None and x.shape == y.shape:
            sqnr = _sqnr(_values(x), _values(y))
        elif x is not None and y is not None:
            stored = [f"{_stored(each)} {tuple(each.shape)}" for each in (x, y)]
        own: Report = {"key": key, "a": stored[0], "b": stored[1], "equal": sqnr == math.inf}
        weights.append(own | {"sqnr": sqnr if math.isfinite(sqnr) else None})
    weights.sort(key=lambda weight: (weight["equal"], _of(weight)))
    return {"a": str(a), "b": str(b), "weights": weights}


def is_within(report: Report, least: float) -> bool:
    """Whether both have the same weights, each with at least this SQNR in dB."""
    return all(w["equal"] or _of(w) >= least for w in report["weights"])


def comparison_text(report: Report, top: int) -> str:
    """What `compare_checkpoints` returned: the ``top`` worst weights as a table."""
    different = [found for found in report["weights"] if not found["equal"]]
    both = [found for found in report["weights"] if _MISSING not in (found["a"], found["b"])]
    equal = len(report["weights"]) - len(different)
    lines = [f"A = {report['a']}", f"B = {report['b']}"]
    lines.append(f"{len(both)} weights in both, {equal} of them with equal values")
    if different:
        rows = [[f"{_of(w):.1f}", w["key"], w["a"], w["b"]] for w in different[:top]]
        lines += ["", table(["SQNR dB", "weight", "in A", "in B"], rows, "rlll")]
    if len(different) > top:
        lines.append(f"... and {len(different) - top} more, up to {_of(different[-1]):.1f} dB")
    return "\n".join(lines)


def _of(weight: Report) -> float:
    found: float | None = weight["sqnr"]
    return -math.inf if found is None else found


def _stored(x: Tensor | None) -> str:
    if x is None:
        return _MISSING
    return f"float8 by {block_name(x.block)}" if isinstance(x, Float8Tensor) else _text(x.dtype)


def _values(x: Tensor) -> Tensor:
    if isinstance(x, Float8Tensor):
        return x.dequantize(torch.float32)
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.double() if x.dtype.itemsize > 4 else x.float()


def _sqnr(x: Tensor, y: Tensor) -> float:
    """The SQNR of y against x, in dB; see `compare_checkpoints`."""
    # Equal infinities and NaNs at the same place are equal.
    difference = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, x - y)
    if not bool(difference.isfinite().all()):
        return -math.inf
    return decibels(power(torch.where(x.isfinite(), x, 0.0)), power(difference))
