"""How much memory does float8 save in training, and where is the rest?

Llama-2-7B at COAT's setting (arXiv 2410.19313, end-to-end table: batch 2, context 2048), Llama-3-8B
and 70B, traced without a GPU (`memory.py`): parameters, gradients, optimizer states, activations,
the peak of a step. Sizes that fit on no GPU are computed, not measured.

`savers.py` lists the ways. A block's activations are those of two blocks less those of one. "per
GPU" shares parameters, gradients and states among `--gpus` GPUs, as FSDP does, and nothing else:
gathered weights (two blocks, as a rule) and what each GPU keeps of its own batch come unshared.
With --device cuda the LLaMA rows are measured: `max_memory_allocated` over one step, step times.

    python benchmarks/bench_memory.py -o memory.json
    python benchmarks/bench_memory.py --models llama2-7b --ways bf16 tensorwise+O2
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import harness, memory, report, savers
from benchmarks.measuring.harness import Row
from benchmarks.measuring.savers import BASELINE
from benchmarks.models.llama import MODELS, Sizes
from scripts.training import savings
from scripts.training.tensors import bytes_of, state_tensors

COLUMNS = {
    "mode": ("model", ""),
    "layer": ("kept", ""),
    "parameters_mib": ("weights MiB", ",.1f"),
    "gradients_mib": ("gradients", ",.1f"),
    "optimizer_mib": ("optimizer", ",.1f"),
    "activations_mib": ("activations", ",.1f"),
    "peak_mib": ("peak", ",.1f"),
    "ms": ("step ms", ",.1f"),
    "states_ratio": ("states / fp32's", ".3f"),
    "block_ratio": ("block / bf16's", ".3f"),
    "smaller": ("times smaller", ".2f"),
    "per_gpu_mib": ("per GPU", ",.1f"),
    "smaller_per_gpu": ("times smaller", ".2f"),
    "error": ("not run", ".60"),
}
MIB = 2**20
ROUNDS = 5
QUICK = {"models": ["tiny"], "blocks": 2}


def trace(way: str, sizes: Sizes) -> Row:
    """What a step of the model holds, without a GPU."""
    with memory.as_on_cuda():
        steps = {
            blocks: _footprint(way, replace(sizes, blocks=blocks))
            for blocks in {sizes.blocks, 1, 2}
        }
    whole = steps[sizes.blocks]
    return {
        "parameters_mib": whole.parameters / MIB,
        "gradients_mib": whole.gradients / MIB,
        "optimizer_mib": whole.states / MIB,
        "activations_mib": whole.activations / MIB,
        "block_mib": (steps[2].activations - steps[1].activations) / MIB,
        "peak_backward_mib": whole.peak_backward / MIB,
        "peak_update_mib": whole.peak_update / MIB,
        "peak_mib": whole.peak / MIB,
    }


def _footprint(way: str, sizes: Sizes) -> memory.Footprint:
    held = savers.hold(way, sizes, "meta")
    batch = savers.batch_of(sizes, "meta")
    return memory.footprint(held.model, held.optimizer, batch, held.forward, held.updates)


def measure(way: str, sizes: Sizes, device: str) -> Row:
    """Peak memory and time of a step on a GPU."""
    held, batch = savers.hold(way, sizes, device), savers.batch_of(sizes, device)
    step = partial(savers.step, held, batch)
    step()
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    samples = [harness.cuda_seconds(step, 1) for _ in range(ROUNDS)]
    return {
        "parameters_mib": bytes_of(held.model.parameters()) / MIB,
        "optimizer_mib": bytes_of(state_tensors(held.optimizer)) / MIB,
        "peak_mib": peak / MIB,
        "ms": statistics.median(samples) * 1e3,
        "samples_s": samples,
    }


def row_of(way: str, model: str, options: argparse.Namespace) -> Row:
    """A row of a LLaMA; of a way that does not run here, the reason."""
    blocks = options.blocks or MODELS[model].blocks
    sizes = replace(MODELS[model], blocks=blocks)
    row: Row = {"layer": way, "mode": model, "blocks": blocks}
    try:
        if torch.device(options.device).type == "cuda":
            gc.collect()  # what the row before held
            torch.cuda.empty_cache()
            return row | measure(way, sizes, options.device)
        return row | trace(way, sizes)
    except savers.NotHere as reason:
        return row | {"error": str(reason), "refused": True}
    except torch.OutOfMemoryError:
        return row | {"error": "out of memory", "refused": True}


def compare(rows: Sequence[Row], gpus: int) -> None:
    """Add to each row its ratios to the baseline of its model."""
    bases = {row["mode"]: row for row in rows if row["layer"] == BASELINE and "error" not in row}
    for row in rows:
        base = bases.get(row["mode"])
        if "error" in row or base is None:
            continue
        row["states_ratio"] = row["optimizer_mib"] / base["optimizer_mib"]
        if "block_mib" in row:
            row["block_ratio"] = row["block_mib"] / base["block_mib"]
            held = ("parameters_mib", "gradients_mib", "optimizer_mib")
            row["per_gpu_mib"], whole = (
                sum(r[key] for key in held) / gpus + r["activations_mib"] for r in (row, base)
            )
            row["smaller_per_gpu"] = whole / row["per_gpu_mib"]
        if "peak_mib" in row:
            row["smaller"] = base["peak_mib"] / row["peak_mib"]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with what depends on others filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=harness.device, default="cpu", help="cuda: measure there")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=["llama2-7b", "llama3-8b", "llama3-70b"]
    )
    parser.add_argument("--ways", nargs="+", help=f"all of: {', '.join(savers.WAYS)}")
    parser.add_argument("--blocks", type=harness.positive, help="as many as the model has")
    parser.add_argument("--gpus", type=harness.positive, default=4, help="that share a model")
    parser.add_argument("--quick", action="store_true", help="sizes that take no time")
    parser.add_argument("--stop-after", type=harness.positive, metavar="SECONDS")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write JSON there")
    options = parser.parse_args(argv)
    for key, value in QUICK.items() if options.quick else ():
        setattr(options, key, value)
    _check_ways(parser, options)
    return options


def _check_ways(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for way in options.ways or ():
        if way not in savers.WAYS:
            try:
                savings.parts_of(way)
            except ValueError as error:
                parser.error(f"--ways {error}")
    if options.ways and BASELINE not in options.ways:
        parser.error(f"--ways: {BASELINE} is what the others are compared with; name it too")


def rows_of(options: argparse.Namespace, rows: list[Row]) -> None:
    """Add the rows one by one, so that an interrupted run keeps those that it measured."""
    ways = options.ways or savers.WAYS
    for model, way in harness.in_time(
        list(itertools.product(options.models, ways)), options.stop_after
    ):
        rows.append(row_of(way, model, options))


def main(argv: Sequence[str]) -> int:
    """Measure, compare and report; 1 if a run of this library failed."""
    options = parse(argv)
    rows: list[Row] = []
    try:
        rows_of(options, rows)
    finally:
        compare(rows, options.gpus)
        report.publish("bench_memory", argv, options, rows, COLUMNS)
    return int(any("error" in row and not row["refused"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
