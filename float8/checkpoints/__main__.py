"""Looks at checkpoints, float8 or not, compares them, and rewrites them in another layout.

    python -m float8.checkpoints inspect FOLDER
    python -m float8.checkpoints compare A B
    python -m float8.checkpoints convert FOLDER OUT --layout fine_grained

A checkpoint is a folder of safetensors files with config.json, or one such file. Tensors are read
one at a time, and nothing is unpickled. The exit status is 0 where all is well, 1 where inspect
finds problems or compare finds differences, and 2 where the input cannot be used.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from float8.checkpoints.files import MAX_SHARD_BYTES, table, write_shards
from float8.checkpoints.layouts import (
    MXFP4,
    WEIGHT,
    CompressedTensors,
    FineGrained,
    Layout,
    ModelOpt,
)
from float8.checkpoints.plan import SavePlan, tensor_parallel_sizes
from float8.checkpoints.rewriting import SKIP, files_beside, rewriting
from float8.checkpoints.source import Source
from float8.convert.folding import pattern_of
from float8.formats import HIGH_PRECISION_DTYPES, ScaleFormat
from float8.granularity import Rowwise, Tensorwise, block_name
from float8.kernels import e8m0
from float8.kernels.sqnr import decibels, power
from float8.tensor import Float8Tensor

# What --layout takes.
TARGETS: dict[str, Layout | torch.dtype] = {
    "fine_grained": FineGrained(),
    "fine_grained:power_of_two": FineGrained(scale_format=ScaleFormat.POWER_OF_TWO),
    "fine_grained:e8m0": FineGrained(scale_format=ScaleFormat.E8M0),
    "compressed_tensors:tensorwise": CompressedTensors(Tensorwise()),
    "compressed_tensors:rowwise": CompressedTensors(Rowwise()),
    "compressed_tensors:static": CompressedTensors(Tensorwise(), static_inputs=True),
    "modelopt": ModelOpt(),
    "mxfp4": MXFP4(),
    **{str(dtype).removeprefix("torch."): dtype for dtype in HIGH_PRECISION_DTYPES},
}
Result = tuple[int, str, dict[str, Any]]  # the exit status, what is printed, and as JSON
_MISSING = "missing"


def size(text: str) -> float:
    """``"5GB"`` or ``"500MB"`` in bytes."""
    return float(text.upper().replace("GB", "e9").replace("MB", "e6"))


def _inspect(options: argparse.Namespace) -> Result:
    """What a checkpoint holds, and what is wrong with it."""
    # Layers whose names differ by numbers alone, as those of all blocks of a transformer, are one
    # kind: the plan shows the smallest and the largest scale of its layers.
    source = Source(options.path, raises=False)
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
        is_nan = weight.float8_data.view(torch.uint8) & 0x7F == 0x7F if options.data else None
        if is_nan is not None and (count := int(is_nan.sum())):
            place = source.place(name + source.data_key)
            problems.append(f"{place} has {count} values that are NaN")
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
    sizes = tensor_parallel_sizes(source.layout, layers, source.specs, source.model_config)
    plan = SavePlan(source.layout, layers, {}, source.specs, {}, sizes)
    title = f"{len(problems)} problems:" if problems else "no problems"
    text = "\n".join([str(plan), "", title, *(f"- {text}" for text in problems)])
    return int(bool(problems)), text, {"problems": problems, **_as_json(plan)}


def _compare(options: argparse.Namespace) -> Result:
    """How far the weights of B are from those of A, by value."""
    first, second = Source(options.a), Source(options.b)
    found: list[tuple[float, str, str, str]] = []
    for key in sorted(first.weights.keys() | second.weights.keys()):
        x, y = (source.read(key) if key in source.weights else None for source in (first, second))
        found.append((_sqnr(x, y), key, _stored(x), _stored(y)))
    found.sort()  # the worst first
    different = [entry for entry in found if entry[0] < math.inf]  # entry[0]: the SQNR
    both = [key for _, key, *stored in found if _MISSING not in stored]
    lines = [f"A = {options.a}", f"B = {options.b}"]
    equal = len(found) - len(different)
    lines.append(f"{len(both)} weights in both, {equal} of them with equal values")
    if different:
        rows = [[f"{sqnr:.1f}", *others] for sqnr, *others in different[: options.top]]
        lines += ["", table(["SQNR dB", "weight", "in A", "in B"], rows, "rlll")]
    if (more := len(different) - options.top) > 0:
        lines.append(f"... and {more} more, up to {different[-1][0]:.1f} dB")
    weights = []
    for sqnr, key, in_a, in_b in found:
        entry = {"key": key, "a": in_a, "b": in_b, "equal": sqnr == math.inf}
        weights.append(entry | {"sqnr": sqnr if math.isfinite(sqnr) else None})  # no inf in JSON
    status = int(any(entry[0] < options.at_least for entry in found))
    return status, "\n".join(lines), {"a": options.a, "b": options.b, "weights": weights}


def _stored(x: Tensor | None) -> str:
    if x is None:
        return _MISSING
    by = f"float8 by {block_name(x.block)}" if isinstance(x, Float8Tensor) else str(x.dtype)
    return f"{by.removeprefix('torch.')} {tuple(x.shape)}"


def _sqnr(a: Tensor | None, b: Tensor | None) -> float:
    """The SQNR of b against a: ``10 log10( sum a^2 / sum (a - b)^2 )`` in dB.

    Infinite where all values are equal; -inf where one is missing, of another shape, or NaN or
    infinite where the other is not.
    """
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


def _convert(options: argparse.Namespace) -> Result:
    """Write a checkpoint in another layout, or in high precision."""
    source, target = Source(options.path), TARGETS[options.layout]
    found = rewriting(source, target, options.skip, options.max_shard_size)
    end = "nothing was written"
    if not options.dry_run:
        write_shards(
            options.out,
            found.plan.tensors,
            found.tensors(iter(found.keys)),
            files=files_beside(source, target, found.plan.quantization_config),
            overwrite=options.overwrite,
        )
        end = f"written to {options.out}"
    return 0, f"{found.plan}\n\n{end}", _as_json(found.plan)


def _as_json(plan: SavePlan) -> dict[str, Any]:
    """A plan for JSON."""
    names = ("layers", "skipped", "files", "nbytes", "quantization_config", "tensor_parallel_sizes")
    return {"layout": repr(plan.layout), **{name: getattr(plan, name) for name in names}}


def parser() -> argparse.ArgumentParser:
    """The options; the description is the top of this file."""
    options = argparse.ArgumentParser(
        prog="python -m float8.checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = options.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], Result]) -> Callable[..., argparse.Action]:
        name = run.__name__.removeprefix("_")
        own = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        own.set_defaults(run=run, name=name)
        own.add_argument("--json", action="store_true", help="print JSON, with all weights")
        return own.add_argument

    add = command(_inspect)
    add("path", metavar="FOLDER")
    add("--data", action="store_true", help="read the weights too, and find NaN")
    add = command(_compare)
    add("a", metavar="A", help="the reference")
    add("b", metavar="B")
    least = "a weight is fine from this SQNR on; by default values must be equal"
    add("--at-least", type=float, default=math.inf, metavar="DB", help=least)
    add("--top", type=int, default=20, metavar="N", help="print the N worst weights; default 20")
    add = command(_convert)
    add("path", metavar="FOLDER")
    add("out", metavar="OUT", help="a folder that does not exist yet")
    add("--layout", required=True, choices=list(TARGETS), help="of the result")
    patterns = "modules that stay in high precision, for a FOLDER in high precision; default: "
    add("--skip", nargs="+", metavar="PATTERN", help=patterns + " ".join(SKIP))
    largest = "the largest size of a file, as 500MB; default 5GB"
    add("--max-shard-size", type=size, default=MAX_SHARD_BYTES, metavar="SIZE", help=largest)
    add("--overwrite", action="store_true", help="replace the checkpoint in OUT")
    add("--dry-run", action="store_true", help="print what would be written")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the command line; bad input ends it with a message and status 2."""
    options = parser().parse_args(argv)
    try:
        status, text, found = options.run(options)
    except (ValueError, OSError) as error:
        message = str(error).replace("overwrite=True", "--overwrite")  # as it is written here
        print(f"{options.name}: {message}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1, allow_nan=False) if options.json else text)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
