"""How much memory does float8 save in training, and where is the rest?

Llama-2-7B at COAT's setting (arXiv 2410.19313, end-to-end table: batch 2, context 2048), Llama-3-8B
and 70B, traced without a GPU (`memory.py`): parameters, gradients, optimizer states, activations,
the peak of a step. Sizes that fit on no GPU are computed, not measured.

A way is a recipe and what else is in float8, joined by "+". In all of
them embedding, norms and head and their gradients are bfloat16, and so is all that a way does not
keep in float8:

    bf16                  the baseline: weights and gradients bfloat16, AdamW's moments float32; no
                          master weights (8 + 2 + 2 bytes per parameter)
    +float8_adamw         float8.optim.AdamW; ``_v16`` has the second moment in float16
    +saved_activations    `float8.activations`
    +O1, +O2, +O3         MS-AMP's levels (`float8.ms_amp`). Activations are float16, which is as
                          large as bfloat16: its weights are float16, and autocast does not support
                          meta

The moments' updates count as one fused kernel in all runs: no temporary memory.

A block's activations are those of two blocks less those of one. "predicted ms" is an eager forward
and backward on an H100 by the model of `float8.estimate` (`measuring/eager.py`). "per GPU" shares
parameters, gradients and states among `--gpus` GPUs, as FSDP does, and nothing else: gathered
weights (two blocks, as a rule) and what each GPU keeps of its own batch come unshared.

With --timed, or on a GPU, the rows are measured, each in a process of its own, for they do not fit
beside each other: step times, and the peak (`measuring/alone.py`). ``tokens_in_80_gb`` is how many
tokens of a step fit into 80 GB, if what weights, gradients and states do not take grows with them.
``torchao`` is its recipe tensorwise.

    python benchmarks/bench_memory.py -o memory.json
    python benchmarks/bench_memory.py --models llama2-7b --ways bf16 tensorwise+O2
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import eager, harness, memory, report
from benchmarks.measuring.alone import alone, peak_bytes
from benchmarks.measuring.contenders import torchao_model
from benchmarks.measuring.harness import Row
from benchmarks.models.transformer import GPT, LLAMA, Sizes
from benchmarks.quality.contenders import all_but_the_head
from float8 import convert_to_float8_training
from float8.activations import saved_activations
from float8.config import RECIPES
from float8.ms_amp.ms_amp import ms_amp
from float8.optim import AdamW

COLUMNS = report.columns(
    "mode layer parameters_mib gradients_mib optimizer_mib activations_mib peak_mib predicted_ms "
    "ms ratio states_ratio block_ratio smaller per_gpu_mib smaller_per_gpu tokens_in_80_gb error",
    mode="model", layer="kept", parameters_mib="weights MiB", gradients_mib="gradients",
    optimizer_mib="optimizer", activations_mib="activations", peak_mib="peak",
    predicted_ms="predicted ms", ms="step ms",
    states_ratio="states / fp32's", block_ratio="block / bf16's", smaller="times smaller",
    per_gpu_mib="per GPU", smaller_per_gpu="times smaller", tokens_in_80_gb="tokens in 80 GB",
)  # fmt: skip
MIB = 2**20
ROUNDS = 5
BASELINE = "bf16"
TORCHAO = "torchao"
LEVELS = ("O1", "O2", "O3")
SAVED = "saved_activations"
# part of a way -> what its optimizer is given; by default both moments are float32
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "float8_adamw": {},
    "float8_adamw_v16": {"second_moment": "float16"},
}
WAYS = (
    *(BASELINE, "bf16+float8_adamw", "bf16+float8_adamw_v16"),
    *("tensorwise", "tensorwise+saved_activations", "tensorwise+O1", "tensorwise+O2"),
    *("tensorwise+O3", "tensorwise+saved_activations+O2"),
    "tensorwise+saved_activations+float8_adamw",
)
Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Held:
    """A model in training, one way.

    Args:
        model: tokens, next tokens -> loss.
        optimizer: of its parameters.
        forward: makes the context of each forward pass.
    """

    model: nn.Module
    optimizer: Optimizer
    forward: Context = nullcontext


def hold(way: str, sizes: Sizes, device: str) -> Held:
    """Set up a model on a device ("meta" to trace it) one way."""
    recipe, *parts = way.split("+")
    level = next((part for part in parts if part in LEVELS), None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16 if level else torch.bfloat16)
    try:
        with torch.device(device):
            model: Any = GPT(sizes)
    finally:
        torch.set_default_dtype(before)
    if recipe == TORCHAO:
        torchao_model(model, "tensorwise", all_but_the_head)
    elif recipe != BASELINE:
        convert_to_float8_training(model, config=RECIPES[recipe], module_filter_fn=all_but_the_head)
    options = next((OPTIMIZERS[part] for part in parts if part in OPTIMIZERS), None)
    if options is None:
        options = {"first_moment": "float32", "second_moment": "float32"}
    held: Any = AdamW(model.parameters(), **options)
    if level is not None:
        model, held = ms_amp(model, held, level, module_filter_fn=all_but_the_head)
    return Held(model, held, partial(saved_activations, model) if SAVED in parts else nullcontext)


def way_of(text: str) -> str:
    """A way, for argparse."""
    recipe, *parts = text.split("+")
    known = {*OPTIMIZERS, SAVED, *LEVELS}
    if recipe not in (BASELINE, TORCHAO, *RECIPES) or not known.issuperset(parts):
        raise argparse.ArgumentTypeError(
            f"{text!r}: a recipe of float8 or bf16, and {', '.join(known)}, joined by +"
        )
    return text


def batch_of(sizes: Sizes, device: str) -> tuple[Tensor, Tensor]:
    """Random tokens and the tokens after them."""
    shape = (2, sizes.batch, sizes.context)
    tokens, targets = torch.randint(sizes.vocabulary, shape, device=device).unbind()
    return tokens, targets


def trace(way: str, sizes: Sizes) -> Row:
    """What a step of the model holds, without a GPU."""
    steps = {}
    with memory.as_on_cuda():
        for blocks in dict.fromkeys((1, 2, sizes.layers)):  # the whole model last
            held = hold(way, replace(sizes, layers=blocks), "meta")
            batch = batch_of(sizes, "meta")
            steps[blocks] = memory.footprint(held.model, held.optimizer, batch, held.forward)
        held.optimizer.zero_grad()
        passes = eager.Step()
        with passes, held.forward():
            loss = held.model(*batch)
        with passes:
            loss.backward()
    whole = steps[sizes.layers]
    return {
        "predicted_ms": passes.seconds * 1e3,
        "parameters_mib": whole.parameters / MIB,
        "gradients_mib": whole.gradients / MIB,
        "optimizer_mib": whole.states / MIB,
        "activations_mib": whole.activations / MIB,
        "block_mib": (steps[2].activations - steps[1].activations) / MIB,
        "peak_backward_mib": whole.peak_backward / MIB,
        "peak_update_mib": whole.peak_update / MIB,
        "peak_mib": whole.peak / MIB,
    }


def measure(way: str, sizes: Sizes, options: argparse.Namespace) -> Row:
    """Time of a step and, on a GPU, its peak memory; in a process of its own."""
    device, tokens = options.device, sizes.batch * sizes.context
    held, batch = hold(way, sizes, device), batch_of(sizes, device)
    blocks: Any = held.model.get_submodule("blocks")
    for block in blocks if options.compiled else ():
        if SAVED in way.split("+"):
            saved_activations(block).__enter__()  # of each graph: its ops then share copies
        block.compile(dynamic=False)

    def step() -> None:
        with held.forward():
            loss = held.model(*batch)
        loss.backward()
        held.optimizer.step()
        held.optimizer.zero_grad()

    peak = peak_bytes(step, device)
    seconds = harness.timer_for(device)
    samples = [seconds(step, 1) for _ in range(ROUNDS)]
    parameters = memory.bytes_of(held.model.parameters())
    states = memory.bytes_of(memory.state_tensors(held.optimizer))
    row = {
        "parameters_mib": parameters / MIB,
        "optimizer_mib": states / MIB,
        "peak_mib": peak / MIB,
        "ms": statistics.median(samples) * 1e3,
        "samples_s": samples,
    }
    if torch.device(device).type == "cuda":
        fixed = 2 * parameters + states
        row["tokens_in_80_gb"] = tokens * (80e9 - fixed) / (peak - fixed)
    return row


def row_of(work: tuple[str, str], options: argparse.Namespace) -> list[Row]:
    """The row of a model and a way; of one that does not run here, the reason."""
    model, way = work
    sizes = replace(LLAMA[model], layers=options.blocks or LLAMA[model].layers)
    sizes = replace(sizes, batch=options.batch or sizes.batch)
    row: Row = {"layer": way, "mode": model, "blocks": sizes.layers}
    if not options.timed:
        return [row | trace(way, sizes)]
    row |= alone(measure, way, sizes, options)
    if row.get("error", "").startswith("OutOfMemoryError"):
        row |= {"error": "out of memory", "refused": True}
    return [row]


def compare(rows: Sequence[Row], gpus: int) -> list[Row]:
    """Add to each row its ratios to the baseline of its model; there are no targets."""
    bases = {row["mode"]: row for row in rows if row["layer"] == BASELINE and "error" not in row}
    for row in rows:
        base = bases.get(row["mode"])
        if "error" in row or base is None:
            continue
        row["states_ratio"] = row["optimizer_mib"] / base["optimizer_mib"]
        row["smaller"] = base["peak_mib"] / row["peak_mib"]
        if "samples_s" in row:
            row["ratio"] = row["ms"] / base["ms"]
        if "block_mib" in row:
            row["block_ratio"] = row["block_mib"] / base["block_mib"]
            held = ("parameters_mib", "gradients_mib", "optimizer_mib")
            row["per_gpu_mib"], whole = (
                sum(r[key] for key in held) / gpus + r["activations_mib"] for r in (row, base)
            )
            row["smaller_per_gpu"] = whole / row["per_gpu_mib"]
    return []


def main(argv: Sequence[str]) -> int:
    """Measure, compare and report; 1 if a run of this library failed."""
    parser = harness.plain_parser(__doc__)
    default = ["llama2-7b", "llama3-8b", "llama3-70b"]
    parser.add_argument("--models", nargs="+", choices=LLAMA, default=default)
    parser.add_argument("--ways", nargs="+", type=way_of, default=list(WAYS), metavar="WAY")
    parser.add_argument("--blocks", type=harness.positive, help="as many as the model has")
    parser.add_argument("--batch", type=harness.positive, help="sequences of a step")
    parser.add_argument("--compiled", action="store_true", help="compile the blocks")
    parser.add_argument("--timed", action="store_true", help="measure, on a GPU if there is one")
    parser.add_argument("--gpus", type=harness.positive, default=4, help="that share a model")
    parser.add_argument("--quick", action="store_true", help="sizes that take no time")
    parser.add_argument("--stop-after", type=harness.positive, metavar="SECONDS")
    parser.set_defaults(device=None)
    options = parser.parse_args(argv)
    on_gpu = options.timed and torch.cuda.is_available()
    options.device = options.device or ("cuda" if on_gpu else "cpu")
    options.timed |= not harness.on_cpu(options)
    if BASELINE not in options.ways:
        parser.error(f"--ways: {BASELINE} is what the others are compared with; name it too")
    if options.quick:
        options.models, options.blocks = ["tiny"], 2
    return report.run(
        "bench_memory", argv, options, list(itertools.product(options.models, options.ways)),
        partial(row_of, options=options), COLUMNS, partial(compare, gpus=options.gpus),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
