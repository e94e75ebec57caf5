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

from float8.checkpoints import inspection
from float8.checkpoints.files import MAX_SHARD_BYTES, write_shards
from float8.checkpoints.layouts import MXFP4, CompressedTensors, FineGrained, Layout, ModelOpt
from float8.checkpoints.plan import SavePlan
from float8.checkpoints.rewriting import SKIP, files_beside, rewriting
from float8.checkpoints.source import Source
from float8.formats import HIGH_PRECISION_DTYPES, ScaleFormat
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
    "mxfp4": MXFP4(),
    **{str(dtype).removeprefix("torch."): dtype for dtype in HIGH_PRECISION_DTYPES},
}
Result = tuple[int, str, dict[str, Any]]  # the exit status, what is printed, and as JSON


def size(text: str) -> float:
    """``"5GB"`` or ``"500MB"`` in bytes."""
    return float(text.upper().replace("GB", "e9").replace("MB", "e6"))


def _inspect(options: argparse.Namespace) -> Result:
    """What a checkpoint holds, and what is wrong with it."""
    found = inspection.inspect_checkpoint(options.path, data=options.data)
    plan, problems = found["plan"], found["problems"]
    title = f"{len(problems)} problems:" if problems else "no problems"
    text = "\n".join([str(plan), "", title, *(f"- {text}" for text in problems)])
    return int(bool(problems)), text, {"problems": problems, **_as_json(plan)}


def _compare(options: argparse.Namespace) -> Result:
    """How far the weights of B are from those of A, by value."""
    found = inspection.compare_checkpoints(options.a, options.b)
    status = int(any(weight["sqnr"] < options.at_least for weight in found["weights"]))
    text = inspection.comparison_text(found, options.top)
    for weight in found["weights"]:  # JSON has no infinities
        weight["sqnr"] = weight["sqnr"] if math.isfinite(weight["sqnr"]) else None
    return status, text, found


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
