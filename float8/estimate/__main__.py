"""What would float8 do for layers of these shapes? The cost model on the command line.

A shape is M,K,N: tokens, in_features, out_features of one linear layer. Printed are the time of one
forward and backward in bfloat16 and under each recipe, and what backward saves.

    python -m float8.estimate 16384,8192,28672 16384,4096,4096 --device H100
    python -m float8.estimate 8192,4096,14336 --device measured --save here.json
    python -m float8.estimate 8192,4096,14336 --device here.json --recipes tensorwise rowwise
    python -m float8.estimate --fit bench_matmul.json bench_linear.json --save fitted.json
    python -m float8.estimate --check bench_linear.json --device fitted.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from float8.config import RECIPES
from float8.estimate.casts import LARGEST
from float8.estimate.check import predicted_against_measured
from float8.estimate.devices import DEVICES, Device
from float8.estimate.fit import fit
from float8.estimate.lookup import MEASURED, find_device
from float8.estimate.predict import estimate
from float8.estimate.roofline import Shape

DEFAULT_DEVICE = "H100"
MAX_DIGITS = 100


def parse_shape(text: str) -> Shape:
    """``"8192,4096,14336"`` as a Shape; for argparse."""
    sizes, said = text.split(","), _cut(text)
    # Python refuses to read thousands of digits; a size of so many is too large in any case.
    sizes = [size.lstrip("0")[:MAX_DIGITS] if size.isdecimal() else "" for size in sizes]
    if len(sizes) != 3 or not all(sizes):
        raise argparse.ArgumentTypeError(f"a shape is three numbers M,K,N >= 1, not {said!r}")
    if any(int(size) > LARGEST for size in sizes):
        raise argparse.ArgumentTypeError(f"sizes of a shape are at most {LARGEST}, not {said!r}")
    return Shape(*(int(size) for size in sizes))


def parse_count(text: str) -> int:
    """``"8"`` as a number; for argparse."""
    if len(text) > MAX_DIGITS or not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"a count is at most {LARGEST}, not {_cut(text)!r}")
    return int(text)


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def parser() -> argparse.ArgumentParser:
    """The options; the description is the top of this file."""
    options = argparse.ArgumentParser(
        prog="python -m float8.estimate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("shapes", nargs="*", type=parse_shape, metavar="M,K,N")
    known = f"{', '.join(DEVICES)}, {MEASURED} (this machine), or a file that --save wrote"
    add("--device", help=f"{known}; default {DEFAULT_DEVICE}, for --check that of the file")
    add("--recipes", nargs="+", choices=list(RECIPES), default=["tensorwise", "rowwise"])
    add("--forward", action="store_true", help="forward alone, not a training step")
    add("--weights-cached", action="store_true", help="cast weights once per step")
    microbatches = "microbatches per step"
    add("--gradient-accumulation", type=parse_count, default=1, metavar="N", help=microbatches)
    add("--fit", nargs="+", type=Path, metavar="FILE", help="fit to results of the benchmarks")
    add("--check", type=Path, metavar="FILE", help="compare with a result of bench_linear")
    add("--save", type=Path, metavar="FILE", help="write the device as JSON")
    add("-o", "--output", type=Path, metavar="FILE", help="write the prediction as JSON")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the command line; bad input ends it with a message and status 2."""
    arguments = parser()
    options = arguments.parse_args(argv)
    if not (options.shapes or options.check or options.save):
        arguments.error("nothing to do: give shapes M,K,N, --check FILE, or --save FILE")
    if options.output and not options.shapes:
        arguments.error("-o writes a prediction: give shapes M,K,N")
    try:
        for path in filter(None, (options.output, options.save)):
            _make_room(path)  # before anything is measured
        _run(options)
    except (ValueError, OSError) as error:
        arguments.error(str(error))
    except ArithmeticError as error:
        named = options.device or DEFAULT_DEVICE
        arguments.error(f"figures of device {named!r} are too large or small to use ({error})")
    return 0


def _make_room(path: Path) -> None:
    """Make the directory of a file that is to be written, or say why it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}") from error
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"cannot write {path}: permission denied")


def _run(options: argparse.Namespace) -> None:
    device = _device(options)
    if options.shapes:
        _estimate(options, device or find_device(DEFAULT_DEVICE))
    if options.check:
        print(predicted_against_measured(options.check, device))
    if options.save:
        (device or find_device(DEFAULT_DEVICE)).save(options.save)
        print(f"wrote {options.save}")


def _device(options: argparse.Namespace) -> Device | None:
    """The device asked for; None where the default is to be used."""
    named = None if options.device is None else find_device(options.device)
    return fit(*options.fit, base=named) if options.fit else named


def _estimate(options: argparse.Namespace, device: Device) -> None:
    result = estimate(
        options.shapes,
        device=device,
        recipes=options.recipes,
        training=not options.forward,
        weights_cached=options.weights_cached,
        gradient_accumulation=options.gradient_accumulation,
    )
    if options.output:
        options.output.write_text(json.dumps(result.as_dict(), indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
