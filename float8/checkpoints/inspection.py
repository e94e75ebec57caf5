"""`inspect_checkpoint`, `compare_checkpoints`: what folders of weights hold, and how they differ.

Layers whose names differ by numbers alone, as those of all blocks of a transformer, are one kind
and one line. Headers and scales are read; with ``data=True`` the weights too, one at a time, which
finds NaN. Problems are those of `Source`, and two more: a layer in high precision that the config
does not list, where others of its kind are in float8; and, with ``data=True``, float8 data that are
NaN.

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

from float8.checkpoints.files import table
from float8.checkpoints.layouts import WEIGHT
from float8.checkpoints.source import Source
from float8.convert.folding import pattern_of
from float8.granularity import block_name
from float8.kernels import e8m0
from float8.kernels.sqnr import decibels, power
from float8.tensor import Float8Tensor

_MISSING = "missing"
_ENDS = ("smallest_scale", "largest_scale")
Report = dict[str, Any]


def inspect_checkpoint(path: str | Path, *, data: bool = False) -> Report:
    """Look at a checkpoint, float8 or not: a folder of safetensors files, or one file.

    ``data=True`` reads the weights in float8 too. Raises FileNotFoundError if a folder, file or
    shard is missing, and ValueError if a file or the config cannot be read at all.

    Returns:
        ``path``; the ``layout`` of the layers in float8, or None; the number of ``files`` and the
        ``nbytes`` of all tensors; the ``problems``, one sentence each; and the kinds of layers in
        ``float8`` and of all other tensors (``high_precision``). A kind has its ``name``, with
        ``*`` for numbers; the ``count`` of tensors; the ``dtype``, all ``shapes`` and the
        ``nbytes`` of the weights, with their scales; and the smallest and the largest scale, None
        in high precision.
    """
    source = Source(path, raises=False)
    problems = list(source.problems)
    found: dict[bool, list[Report]] = {True: [], False: []}  # whether in float8
    kinds: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for key in source.weights:
        name = source.layer_of(key)
        kinds[name is not None, pattern_of(name or key)].append(key)
    for (is_layer, name), keys in kinds.items():
        specs, names = [source.specs[key] for key in keys], map(source.layer_of, keys)
        parts = [part for own in names if own for part in source.layers[own]]
        kind = {
            "name": name,
            "count": len(keys),
            "dtype": ", ".join(dict.fromkeys(_text(spec.dtype) for spec in specs)),
            "shapes": list(dict.fromkeys(spec.shape for spec in specs)),
            "nbytes": sum(source.specs[key].nbytes for key in (*keys, *parts)),
            **dict.fromkeys(_ENDS),
        }
        found[is_layer].append(kind)
        if is_layer:
            problems += _measure(kind, source, keys, data)
        elif others := kinds.get((True, name.removesuffix(WEIGHT))):
            problems += [
                f"{source.place(key)} is {spec.dtype}, {len(others)} others of its kind are in "
                f"float8, and {source.config_file} does not list it as left in high precision"
                for key, spec in zip(keys, specs, strict=True)
                if len(spec.shape) == 2 and not source.lists(key.removesuffix(WEIGHT))
            ]
    return {
        "path": str(path),
        "layout": None if source.layout is None else repr(source.layout),
        "files": len({spec.file for spec in source.specs.values()}),
        "nbytes": sum(spec.nbytes for spec in source.specs.values()),
        "problems": problems,
        "float8": found[True],
        "high_precision": found[False],
    }


def _measure(kind: Report, source: Source, keys: list[str], data: bool) -> list[str]:
    """Find the smallest and largest scale of layers; the problems with their data."""
    problems, scales = [], []
    for key in keys:
        try:
            weight = source.read(key) if source.layout else None
        except ValueError:
            continue  # one of source.problems
        if isinstance(weight, Float8Tensor) and weight.numel():
            scales += [float(end) for end in torch.aminmax(e8m0.as_float32(weight.scale))]
            count = int((weight.float8_data.view(torch.uint8) & 0x7F == 0x7F).sum()) if data else 0
            problems += [f"{source.place(key)} has {count} values that are NaN"] * (count > 0)
    kind |= dict(zip(_ENDS, (min(scales), max(scales)), strict=True)) if scales else {}
    return problems


def inspection_text(report: Report) -> str:
    """What `inspect_checkpoint` returned, as tables."""
    files = f"{report['files']} file{'s' * (report['files'] != 1)}"
    lines = [f"{report['path']}: {report['nbytes'] / 1e6:,.2f} MB in {files}"]
    count = sum(kind["count"] for kind in report["float8"])
    lines += [f"{count or 'no'} layers in float8" + f", {report['layout']}" * (count > 0)]
    for kinds, title in (("float8", ""), ("high_precision", "in high precision")):
        rows = []
        for kind in report[kinds]:
            shapes = ["x".join(map(str, shape)) or "()" for shape in kind["shapes"]]
            shown = ", ".join(shapes[:2]) + ", ..." * (len(shapes) > 2)
            scales = ["" if kind[end] is None else f"{kind[end]:.3g}" for end in _ENDS]
            own = scales if kinds == "float8" else [kind["dtype"]]
            rows.append([kind["name"], kind["count"], shown, f"{kind['nbytes'] / 1e6:,.2f}", *own])
        last = ["smallest scale", "largest scale"] if kinds == "float8" else ["dtype"]
        headers = [title or "layers", "number", "shape", "MB", *last]
        lines += ["", table(headers, rows, "lrrr")] if rows else []
    problems = report["problems"]
    title = f"{len(problems)} problems:" if problems else "no problems"
    return "\n".join([*lines, "", title, *(f"- {text}" for text in problems)])


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
        x, y = (source.read(key) if key in source.weights else None for source in (first, second))
        sqnr = _sqnr(x, y)
        own: Report = {"key": key, "a": _stored(x), "b": _stored(y), "equal": sqnr == math.inf}
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
    by = f"float8 by {block_name(x.block)}" if isinstance(x, Float8Tensor) else _text(x.dtype)
    return f"{by} {tuple(x.shape)}"


def _sqnr(a: Tensor | None, b: Tensor | None) -> float:
    """The SQNR of b against a, in dB; see `compare_checkpoints`."""
    if a is None or b is None or a.shape != b.shape:
        return -math.inf
    x, y = _values(a), _values(b)
    # Equal infinities and NaNs at the same place are equal.
    difference = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, x - y)
    if not bool(difference.isfinite().all()):
        return -math.inf
    return decibels(power(torch.where(x.isfinite(), x, 0.0)), power(difference))


def _values(x: Tensor) -> Tensor:
    if isinstance(x, Float8Tensor):
        return x.dequantize(torch.float32)
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.double() if x.dtype.itemsize > 4 else x.float()
