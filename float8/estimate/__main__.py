"""Predicts what float8 does for linear layers of given shapes.

A shape is M,K,N: tokens, in_features, out_features of one linear layer. M,K,N,E is a grouped GEMM
with E experts; a token counts once in M for each expert that reads it. Printed are the time of one
forward and backward in bfloat16 and under each recipe, and how much less memory float8 keeps for
backward.

    python -m float8.estimate 16384,8192,28672 16384,4096,4096 --device H100
    python -m float8.estimate 32768,2048,1536,128 --device B200 --recipes tensorwise mxfp8
    python -m float8.estimate 16384,4096,28672,8 --fast-sums --cached-microbatches 4
    python -m float8.estimate 8192,4096,14336 --device here.json --recipes tensorwise rowwise

From a checkout, python benchmarks/measure_device.py --save here.json measures this machine, and
python benchmarks/check_estimate.py compares predictions with a result of bench_linear.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from float8.config import RECIPES, GemmConfig
from float8.config.gemms import GEMM_NAMES
from float8.estimate.devices import DEVICES
from float8.estimate.predict import estimate
from float8.estimate.roofline import Shape


def shape(text: str) -> Shape:
    """``"8192,4096,14336"`` as a Shape, a fourth number being experts."""
    return Shape(*map(int, text.split(",")))


def main(argv: Sequence[str]) -> int:
    """Run the command line; bad input ends it with a message and status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m float8.estimate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("shapes", nargs="+", type=shape, metavar="M,K,N[,E]")
    known = ", ".join(DEVICES)
    add("--device", default="H100", help=f"{known}, or a file of Device.save; default H100")
    add("--recipes", nargs="+", choices=list(RECIPES), default=["tensorwise", "rowwise"])
    add("--forward", action="store_true", help="forward alone, not a training step")
    shared = "microbatches that share a cast of each weight; default 0, no cache"
    add("--cached-microbatches", type=int, default=0, metavar="N", help=shared)
    add("--fast-sums", action="store_true", help="sum all three products of experts fast")
    options = parser.parse_args(argv)
    names = [f"gemm_config_{name}" for name in GEMM_NAMES] if options.fast_sums else []
    fast: dict[str, Any] = dict.fromkeys(names, GemmConfig(use_fast_accum=True))
    recipes = {name: replace(RECIPES[name], **fast) for name in options.recipes}
    try:
        result = estimate(
            options.shapes,
            None,
            options.device,
            recipes,
            training=not options.forward,
            cached_microbatches=options.cached_microbatches,
        )
    except ValueError as error:
        parser.error(str(error))
    print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
