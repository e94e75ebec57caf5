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
from collections.abc import Sequence
from dataclasses import asdict

import torch

from float8.checkpoints.inspection import (
    Comparison,
    Inspection,
    compare_checkpoints,
    inspect_checkpoint,
)
from float8.checkpoints.layouts import CompressedTensors, FineGrained, Layout, ModelOpt
from float8.checkpoints.rewriting import SKIP, Rewriting, plan_rewriting
from float8.checkpoints.source import Source
from float8.formats import ScaleFormat
from float8.granularity import Rowwise, Tensorwise

# What --layout takes.
TARGETS: dict[str, Layout | torch.dtype] = {
    "fine_grained": FineGrained(),
    "fine_grained:power_of_two": FineGrained(scale_format=ScaleFormat.POWER_OF_TWO),
    "fine_grained:e8m0": FineGrained(scale_format=ScaleFormat.E8M0),
    "compressed_tensors:tensorwise": CompressedTensors(Tensorwise()),
    "compressed_tensors:rowwise": CompressedTensors(Rowwise()),
    "compressed_tensors:static": CompressedTensors(Tensorwise(), static_inputs=True),
    "modelopt": ModelOpt(),
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_UNITS = {"MB": 1e6, "GB": 1e9}


def parse_bytes(text: str) -> float:
    """``"5GB"`` or ``"500MB"`` in bytes; for argparse."""
    number, unit = text[:-2], text[-2:].upper()
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        size = 0.0
    if not 0 < size < math.inf:
        raise argparse.ArgumentTypeError(f"a size is such as 5GB or 500MB, not {text!r}")
    return size


def parser() -> argparse.ArgumentParser:
    """The options; the description is the top of this file."""
    options = argparse.ArgumentParser(
        prog="python -m float8.checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = options.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "what a checkpoint holds, and what is wrong with it"
    add = commands.add_parser("inspect", help=text, description=text).add_argument
    add("path", metavar="FOLDER")
    add("--data", action="store_true", help="read the weights too: NaN, saturated and zero values")
    add("--json", action="store_true", help="print JSON")
    text = "how far the weights of B are from those of A, by value"
    add = commands.add_parser("compare", help=text, description=text).add_argument
    add("a", metavar="A", help="the reference")
    add("b", metavar="B")
    least = "a weight is fine from this SQNR on; by default values must be equal"
    add("--at-least", type=float, default=math.inf, metavar="DB", help=least)
    add("--top", type=int, default=20, metavar="N", help="print the N worst weights; default 20")
    add("--json", action="store_true", help="print JSON, with all weights")
    text = "write a checkpoint in another layout, or in high precision"
    add = commands.add_parser("convert", help=text, description=text).add_argument
    add("path", metavar="FOLDER")
    add("out", metavar="OUT", help="a folder that does not exist yet")
    add("--layout", required=True, choices=list(TARGETS), help="of the result")
    patterns = "modules that stay in high precision, for a FOLDER in high precision; default: "
    add("--skip", nargs="+", metavar="PATTERN", help=patterns + " ".join(SKIP))
    largest = "the largest size of a file; default 5GB"
    add("--max-shard-size", type=parse_bytes, default="5GB", metavar="SIZE", help=largest)
    add("--overwrite", action="store_true", help="replace the checkpoint in OUT")
    add("--dry-run", action="store_true", help="print what would be written")
    add("--json", action="store_true", help="print JSON")
    return options


def _run(options: argparse.Namespace) -> tuple[int, str]:
    """The exit status and what is printed."""
    if options.command == "inspect":
        found = inspect_checkpoint(options.path, data=options.data)
        return int(bool(found.problems)), _json(found) if options.json else str(found)
    if options.command == "compare":
        both = compare_checkpoints(options.a, options.b)
        status = int(not both.is_within(options.at_least))
        return status, _json(both) if options.json else both.table(options.top)
    plan = plan_rewriting(Source(options.path), TARGETS[options.layout], options.skip)
    if not options.dry_run:
        limit = options.max_shard_size
        plan.write(options.out, max_shard_bytes=limit, overwrite=options.overwrite)
    end = "nothing was written" if options.dry_run else f"written to {options.out}"
    return 0, _json(plan) if options.json else f"{plan}\n{end}"


def _json(found: Inspection | Comparison | Rewriting) -> str:
    own = found.as_dict() if isinstance(found, Rewriting) else asdict(found)
    return json.dumps(own, indent=1, allow_nan=False)


def main(argv: Sequence[str]) -> int:
    """Run the command line; bad input ends it with a message and status 2."""
    options = parser().parse_args(argv)
    try:
        status, text = _run(options)
    except (ValueError, OSError) as error:
        message = str(error).replace("overwrite=True", "--overwrite")  # as it is written here
        print(f"{options.command}: {message}", file=sys.stderr)
        return 2
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
