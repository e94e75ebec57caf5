"""What does float8 gain in a whole model: tokens per second and peak memory, by recipe?

The model is a stack of LLaMA-3-8B blocks (`models/transformer.py`), bfloat16 throughout, on one
device. Norms, rotation, attention and SwiGLU stay in bfloat16 in every recipe: their time makes a
model's speed-up less than a layer's. A step is forward, backward with a random gradient, and the
`sync` that delayed scaling owes; no optimizer, which costs the same in every recipe. So

    ratio    = time(recipe) / time(bf16), both eager or both compiled
    tokens/s = tokens of a step / median time

All models share their parameters and take turns on the clock. Compiled is block by block, as it is
done for long stacks: equal blocks share one graph. `SQNR` compares the models' outputs, in which
the errors of all blocks add up.

Peak memory is measured after all times, each model alone in a process of its own (`--no-peak`
leaves it out): what is allocated during one step, which is parameters, their gradients, what is
kept for backward, and temporary buffers. On a CPU it is the size of the process, the program
included.

    python benchmarks/bench_model.py --modes eager compiled -o model.json
    python benchmarks/bench_model.py --size tiny --recipes tensorwise

`--split` profiles a step: its time by kind of kernel, and when the device is idle. `--sharded`
shards each block by FSDP2, or its layers and the sequences (TP); tokens are those of a rank.
`--size qwen3-moe` and `gpt-oss` are layers of Transformers. Recipes may have parts, such as
``tensorwise+fast`` (`measuring/contenders.py`).

`--traced` measures nothing. It counts what a compiled step would keep for backward on an H100 and
move there, and predicts its time, on any machine (`measuring/inductor.py`):

    cast_gb = bytes of all kernels but products and attention, less those of bf16

    python benchmarks/bench_model.py --traced -o traced.json

With ``--unit`` the model is unit-scaled, and recipe `unit`, which measures no scale, is compared:

    time / unit = time(recipe) / time(unit): what measuring scales costs

    python benchmarks/bench_model.py --unit --recipes tensorwise delayed unit
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import contenders, harness, report
from benchmarks.measuring.alone import alone, peak_bytes
from benchmarks.measuring.harness import Row
from benchmarks.measuring.report import PEER
from benchmarks.measuring.step import Step, in_turns, saved_bytes
from benchmarks.models import published
from benchmarks.models.published import PUBLISHED, PublishedLayer
from benchmarks.models.transformer import LLAMA, Attention, Sizes, Stack, unit_stack
from float8 import Float8ColwiseParallel, Float8RowwiseParallel, cached_weights
from float8.linear.casts import DELAYED_CASTS

UNIT = "unit"
PRICED = "tensorwise", "delayed"  # recipes of `--traced`
CUT, JOINED = (
    partial(Float8ColwiseParallel, input_layouts=Shard(1)),
    partial(Float8RowwiseParallel, output_layouts=Shard(1)),
)
TP: dict[str, Callable[[], Any]] = {
    "attention.qkv": CUT, "attention.proj": JOINED,
    "feed_forward.gate_up": CUT, "feed_forward.down": JOINED,
}  # fmt: skip
COLUMNS = report.columns(
    "mode layer ms min_ms max_ms tokens_s ratio ratio_to_unit gemm_ms attention_ms cast_ms "
    "other_ms idle_ms launches saved_mib cast_gb predicted_ms peak_gib sqnr_db error",
    layer="linear layers", ms="fwd+bwd ms", ratio_to_unit="time / unit", gemm_ms="GEMMs",
    attention_ms="attention", cast_ms="casts", other_ms="other", idle_ms="idle",
    cast_gb="casts GB", predicted_ms="predicted ms",
)  # fmt: skip


class Operands(NamedTuple):
    """What all contenders share: a plain model, x_BTC, g_BTC."""

    plain: nn.Module
    x: Tensor
    grad_output: Tensor

    @classmethod
    def random(cls, options: argparse.Namespace) -> Operands:
        sizes = replace(sizes_of(options), layers=options.blocks)
        torch.manual_seed(options.seed)
        if options.size in PUBLISHED:
            plain: nn.Module = PublishedLayer(options.size, harness.on_cpu(options))
        else:
            plain = (unit_stack if options.unit else Stack)(sizes)
        plain = plain.to(options.device, torch.bfloat16)
        ranks = dist.get_world_size() if options.sharded == "tp" else 1
        batch = (sizes.batch, sizes.context // ranks, sizes.width)
        random = partial(torch.randn, device=options.device, dtype=torch.bfloat16)
        return cls(plain, random(batch, requires_grad=True), random(batch))


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Of the model that was asked for."""
    if options.size in PUBLISHED:
        return published.sizes_of(options.size, harness.on_cpu(options))
    return LLAMA[options.size]


def step(name: str, mode: str, operands: Operands, options: argparse.Namespace) -> Step:
    """A training step of a contender, eager or compiled."""
    plain = copy.deepcopy(operands.plain) if options.sharded else operands.plain
    model = contenders.model_of(name, plain)
    blocks = list(model.children())
    if options.sharded == "fsdp":
        model = nn.Sequential(model)  # torch 2.11 shards no root that is a list of blocks
        for module in [*blocks, model]:
            fully_shard(module)
    elif options.sharded == "tp":
        ranks = init_device_mesh(torch.device(options.device).type, (dist.get_world_size(),))
        parallelize_module(model, ranks, {f"*.{name}": style() for name, style in TP.items()})
        for module in model.modules():
            if isinstance(module, Attention):
                module.heads //= ranks.size()
                module.kv_heads //= ranks.size()
    again = {"custom_partitioner_fn": recomputing()} if "recompute" in name.split("+") else None
    for block in blocks if mode == "compiled" else ():
        block.compile(fullgraph=True, dynamic=False, options=again)
    cache = cached_weights(model).__enter__() if "cached" in name.split("+") else None
    return Step(model, model, operands.x, operands.grad_output, options.microbatches, cache)


def recomputing() -> Any:
    """A partitioner by which backward casts again; its import takes seconds."""
    from float8.kernels.recompute import RecomputeCasts

    return RecomputeCasts()


def peak(name: str, mode: str, options: argparse.Namespace) -> Row:
    """The peak memory of a contender, if this process has no other."""
    start_group(options)
    run = step(name, mode, Operands.random(options), options)
    return {"peak_gib": peak_bytes(run, options.device) / 2**30}


def timed(mode: str, options: argparse.Namespace) -> list[Row]:
    """One row per contender, all timed in the same rounds."""
    start_group(options)
    operands = Operands.random(options)
    names = contenders.names(options)
    makers = {name: partial(step, name, mode, operands, options) for name in names}
    rows = in_turns(makers, options, mode=mode, split=options.split)
    samples = {row["layer"]: row["samples_s"] for row in rows if "samples_s" in row}
    for row in rows:
        if "ms" in row:
            tokens = operands.x.shape[:-1].numel() * options.microbatches
            row["tokens_s"] = tokens / row["ms"] * 1e3
            if UNIT in samples:
                row["ratio_to_unit"] = harness.paired_ratio(row["samples_s"], samples[UNIT])
    return rows


def traced(options: argparse.Namespace) -> list[Row]:
    """Rows of contenders compiled for an H100, ours in two ways; bf16 comes first."""
    from benchmarks.measuring import eager, inductor  # which takes seconds to import

    ways: list[tuple[str, str, Any]] = []  # row, contender, partitioner
    for name in contenders.names(options, "bf16"):
        if name == "bf16" or name.startswith(PEER):
            ways.append((name, name, None))
        else:
            ways += [(f"{name} memory", name, recomputing()), (f"{name} speed", name, None)]
    operands, rows, plain = Operands.random(options), list[Row](), 0
    for layer, name, partitioner in ways:
        with inductor.tracing(partitioner) as graphs:
            run = step(name, "compiled", operands, options)
            for cast in DELAYED_CASTS.values():
                cast.history_ready = True  # as after the first step
            with eager.Step() as cached:
                if run.cache is not None:
                    run.cache.refresh()
            saved = saved_bytes(run)
        block, blocks = inductor.predict(graphs), options.blocks
        plain = plain or block.moved
        row = {"layer": layer, "launches": block.launches * blocks + cached.launches}
        row["saved_mib"] = saved / 2**20
        row["cast_gb"] = ((block.moved - plain) * blocks + cached.moved) / 1e9
        row["predicted_ms"] = (block.seconds * blocks + cached.seconds) * 1e3
        rows.append(row)
    return rows


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with what depends on the machine filled in."""
    parser = harness.parser(__doc__, repeats=10)
    contenders.add_options(parser, contenders.SCALED, UNIT)
    parser.add_argument("--unit", action="store_true", help="a unit-scaled model")
    default = "default: 8b on CUDA, else tiny"
    parser.add_argument("--size", choices=("8b", "tiny", *PUBLISHED), help=default)
    parser.add_argument("--blocks", type=harness.positive, help="default: what the size says")
    parser.add_argument("--split", action="store_true", help="where does the time go?")
    parser.add_argument("--no-peak", dest="peak", action="store_false", help="no peak memory")
    parser.add_argument("--microbatches", type=harness.positive, default=1, help="of a step")
    parser.add_argument("--sharded", choices=("fsdp", "tp"), help="also under torchrun")
    parser.add_argument("--traced", action="store_true", help="predict tensorwise and delayed")
    options = parser.parse_args(argv)
    if options.traced:
        options.device, options.size = "meta", options.size or "8b"
        options.blocks = options.blocks or 2
        options.recipes = [name for name in options.recipes if name.split("+")[0] in PRICED]
        if options.unit or options.sharded or options.size in PUBLISHED or not options.recipes:
            parser.error(f"--traced takes a size of {', '.join(LLAMA)} in {', '.join(PRICED)}")
    contenders.check(parser, options)
    options.peer = options.peer and not (options.unit or options.sharded)
    options.size = options.size or ("tiny" if harness.on_cpu(options) else "8b")
    options.blocks = options.blocks or sizes_of(options).layers
    return options


def start_group(options: argparse.Namespace) -> None:
    """With ``--sharded`` the process group: torchrun's, or one of this process alone."""
    if not options.sharded or dist.is_initialized():
        return
    backend = "gloo" if harness.on_cpu(options) else "nccl"
    harness.TARGET_S = 0.0  # all ranks make equally many calls
    if "RANK" in os.environ:
        if not harness.on_cpu(options):
            torch.cuda.set_device(int(os.environ["RANK"]))
        dist.init_process_group(backend)
        options.output = options.output if dist.get_rank() == 0 else None
    else:
        store: Any = vars(dist)["HashStore"]()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def main(argv: Sequence[str]) -> int:
    """Measure the model; 1 if one of our recipes failed (a refusal is no failure)."""
    options = parse(argv)
    if options.traced:
        return report.run("bench_model", argv, options, [""], lambda _: traced(options), COLUMNS)
    rows: dict[tuple[str, str], Row] = {}

    def measure(work: tuple[str, str | None]) -> list[Row]:
        mode, name = work
        if name is None:
            found = timed(mode, options)
            rows.update({(mode, row["layer"]): row for row in found})
            return found
        if "ms" in rows[mode, name]:
            rows[mode, name].update(alone(peak, name, mode, options))
        return []  # the row is there

    work: list[tuple[str, str | None]] = [(mode, None) for mode in options.modes]
    work += itertools.product(options.modes, contenders.names(options) if options.peak else ())
    return report.run("bench_model", argv, options, work, measure, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
