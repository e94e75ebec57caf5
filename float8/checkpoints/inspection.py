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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from float8.checkpoints.files import table
from float8.checkpoints.layouts import WEIGHT
from float8.checkpoints.plan import SavePlan, tensor_parallel_sizes
from float8.checkpoints.rewriting import model_config_of
from float8.checkpoints.source import Source
from float8.convert.folding import pattern_of
from float8.granularity import block_name
from float8.kernels import e8m0
from float8.kernels.sqnr import decibels, power
from float8.tensor import Float8Tensor

_MISSING = "missing"
CheckpointReport = dict[str, Any]


def inspect_checkpoint(path: str | Path, *, data: bool = False) -> CheckpointReport:
    """Look at a checkpoint, float8 or not: a folder of safetensors files, or one file.

    ``data=True`` reads the weights in float8 too. Raises FileNotFoundError if a folder, file or
    shard is missing, and ValueError if a file or the config cannot be read at all.

    Returns:
        ``plan``, a `SavePlan` of what the files have, in which layers have the smallest and the
        largest scale of their kind; and the ``problems``, one sentence each.
    """
    source = Source(path, raises=False)
    problems = list(source.problems)
    scales: dict[str, list[float]] = {pattern_of(name): [] for name in source.layers}
    for name in source.layers if source.layout else ():
        try:
            weight, _ = source.layer(name)
        except ValueError:
            continue  # one of source.problems
        if weight.numel():
            ends = torch.aminmax(e8m0.as_float32(weight.scale))
            scales[pattern_of(name)] += map(float, ends)
        count = int((weight.float8_data.view(torch.uint8) & 0x7F == 0x7F).sum()) if data else 0
        place = source.place(name + source.data_key)
        problems += [f"{place} has {count} values that are NaN"] if count else []
    for key, spec in source.weights.items():
        name = key.removesuffix(WEIGHT)
        is_plain = len(spec.shape) == 2 and name != key and name not in source.layers
        if is_plain and pattern_of(name) in scales and not source.lists(name):
            problems.append(
                f"{source.place(key)} is {spec.dtype}, others of its kind are in float8, and "
                f"{source.config_file} does not list it as left in high precision"
            )
    how = {k: f"scales {min(x):.3g} to {max(x):.3g}" if x else "?" for k, x in scales.items()}
    layers = {name: how[pattern_of(name)] for name in source.layers}
    sizes = tensor_parallel_sizes(source.layout, layers, source.specs, model_config_of(source))
    plan = SavePlan(source.layout, layers, {}, source.specs, {}, sizes)
    return {"plan": plan, "problems": problems}


# --- compare


def compare_checkpoints(a: str | Path, b: str | Path) -> CheckpointReport:
    """Compare all weights of two checkpoints by value; ``a`` is the reference.

    Each is a folder of safetensors files, or one file. Raises FileNotFoundError if a folder, file
    or shard is missing, and ValueError if files are damaged or contradict each other or their
    config.

    Returns:
        the paths ``a`` and ``b``; and the ``weights``, the worst first, each with its ``key``, how
        ``a`` and ``b`` store it, whether all values are ``equal``, and the ``sqnr`` of B's values
        against A's in dB. That is inf for equal weights, and -inf where one is missing, of another
        shape, or NaN or infinite where the other is not.
    """
    first, second = Source(a), Source(b)
    weights: list[tuple[float, str, str, str]] = []
    for key in sorted(first.weights.keys() | second.weights.keys()):
        x, y = (source.read(key) if key in source.weights else None for source in (first, second))
        weights.append((_sqnr(x, y), key, _stored(x), _stored(y)))
    found = [
        {"key": key, "a": x, "b": y, "equal": sqnr == math.inf, "sqnr": sqnr}
        for sqnr, key, x, y in sorted(weights)
    ]
    return {"a": str(a), "b": str(b), "weights": found}


def comparison_text(report: CheckpointReport, top: int) -> str:
    """What `compare_checkpoints` returned: the ``top`` worst weights as a table."""
    different = [found for found in report["weights"] if not found["equal"]]
    both = [found for found in report["weights"] if _MISSING not in (found["a"], found["b"])]
    equal = len(report["weights"]) - len(different)
    lines = [f"A = {report['a']}", f"B = {report['b']}"]
    lines.append(f"{len(both)} weights in both, {equal} of them with equal values")
    if different:
        rows = [[f"{w['sqnr']:.1f}", w["key"], w["a"], w["b"]] for w in different[:top]]
        lines += ["", table(["SQNR dB", "weight", "in A", "in B"], rows, "rlll")]
    if len(different) > top:
        lines.append(f"... and {len(different) - top} more, up to {different[-1]['sqnr']:.1f} dB")
    return "\n".join(lines)


def _stored(x: Tensor | None) -> str:
    if x is None:
        return _MISSING
    by = f"float8 by {block_name(x.block)}" if isinstance(x, Float8Tensor) else str(x.dtype)
    return f"{by.removeprefix('torch.')} {tuple(x.shape)}"


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
