"""How many bytes does training in several processes send, and how many in float8?

One training step of a stack of LLaMA blocks (`llama.py`), in float32 parameters and bfloat16
arithmetic, in 2 and in 4 processes of this machine, is counted at the process group (`wire.py`
says what a rank sends in each collective; nothing is estimated, and nothing is timed):

    FSDP2                    ``fully_shard`` per block: weights gathered and gradients scattered in
                             bfloat16, the baseline
    FSDP2, recipe            float8 products, and their weights gathered as float8
    ..., precomputed         and the scales of all weights found together after the optimizer's step
    FSDP2, float8 gradients  gradients sent as float8 (`float8.distributed.gradients`)
    DDP                      bfloat16 parameters, gradients all-reduced in bfloat16
    DDP, float8 gradients    the same, sent as float8

Weights are gathered for forward and again for backward. Bytes are those of the rank that sends
most, per step. The first step is left out: it has dynamic scales and other preparations. A form's
bytes include those of its scales. "unsharded" is the peak memory of gathered parameters.

    python benchmarks/bench_comm.py -o comm.json
    python benchmarks/bench_comm.py --quick
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.spawn import start_processes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import harness, report
from benchmarks.measuring.harness import Row
from benchmarks.measuring.wire import Wire
from benchmarks.models.llama import SIZES, Llama, Sizes

FSDP2, DDP = "FSDP2", "DDP"
ALL = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
QUICK = Sizes(64, 192, 2, 1, batch=1, tokens=16, blocks=1)
COLUMNS = {
    "processes": ("processes", "d"),
    "form": ("form", ""),
    **{f"{kind}_kib": (f"{kind} KiB", ",.1f") for kind in ALL},
    "sent_kib": ("sent KiB", ",.1f"),
    "weights_ratio": ("weights / FSDP2", ".3f"),
    "gradients_ratio": ("gradients / bf16", ".3f"),
    "collectives": ("collectives", ".0f"),
    "scale_collectives": ("for scales", ".0f"),
    "unsharded_kib": ("unsharded KiB", ",.1f"),
    "error": ("not run", ".80"),
}


@dataclass(frozen=True)
class Form:
    """One way to train in several processes.

    Args:
        name: for the table.
        base: the form that sends the same in bfloat16.
        weights, gradients: which collectives carry them, scales included.
        recipe: a float8 recipe with weights gathered as float8; None for bfloat16.
        precomputes: whether the weights' scales are found together.
        float8_gradients: whether gradients are sent as float8.
    """

    name: str
    base: str
    weights: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    recipe: str | None = None
    precomputes: bool = False
    float8_gradients: bool = False


GATHERED = (("all_gather", "all_reduce"), ("reduce_scatter",))  # in float8; scales are reduced
FORMS = (
    Form(FSDP2, FSDP2, ("all_gather",), ("reduce_scatter",)),
    Form(f"{FSDP2}, tensorwise", FSDP2, *GATHERED, recipe="tensorwise"),
    Form(
        f"{FSDP2}, tensorwise, precomputed",
        FSDP2,
        *GATHERED,
        recipe="tensorwise",
        precomputes=True,
    ),
    Form(f"{FSDP2}, delayed", FSDP2, *GATHERED, recipe="delayed"),
    Form(
        f"{FSDP2}, float8 gradients",
        FSDP2,
        ("all_gather",),
        ("all_to_all", "all_reduce"),
        float8_gradients=True,
    ),
    Form(DDP, DDP, (), ALL),
    Form(f"{DDP}, float8 gradients", DDP, (), ALL, float8_gradients=True),
)


def sharded(form: Form, sizes: Sizes, device: str) -> nn.Module:
    """The model of a form on FSDP2."""
    model: nn.Module = Llama(sizes).to(device)
    if form.recipe is not None:
        from benchmarks.measuring.step import settled
        from float8 import convert_to_float8_training

        config = replace(settled(form.recipe), enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(model, config=config)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mp_policy=half)
    fully_shard(model, mp_policy=half)
    return model


def replicated(sizes: Sizes, device: str) -> nn.Module:
    """The model on DDP, which also broadcasts its one buffer, a small table, at each step."""
    return nn.parallel.DistributedDataParallel(Llama(sizes).to(device, torch.bfloat16))


def steps_of(form: Form, sizes: Sizes, device: str) -> Callable[[], None]:
    """A training step of the form, to be called again and again."""
    torch.manual_seed(0)
    model = replicated(sizes, device) if form.base == DDP else sharded(form, sizes, device)
    if form.float8_gradients:
        from float8.distributed.gradients import float8_gradients

        float8_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    shape = (sizes.batch, sizes.tokens, sizes.hidden)
    x, grad_output = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))

    def step() -> None:
        model(x).backward(grad_output)
        optimizer.step()
        optimizer.zero_grad()
        _after_step(form, model)

    return step


def _after_step(form: Form, model: nn.Module) -> None:
    from float8 import sync_float8_amax_and_scale_history

    if form.precomputes:
        from float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
    if form.recipe == "delayed":
        sync_float8_amax_and_scale_history(model)


def count(form: Form, sizes: Sizes, device: str) -> Row:
    """What this rank sends in one step."""
    step = steps_of(form, sizes, device)
    step()
    with Wire() as wire:
        step()
    kinds = {kind: wire.bytes(kind) for kind in dict.fromkeys(each.kind for each in wire.sent)}
    scales = wire.count("all_reduce") if form.recipe else 0
    return {
        "bytes": kinds,
        "weights": sum(kinds.get(kind, 0.0) for kind in form.weights),
        "gradients": sum(kinds.get(kind, 0.0) for kind in form.gradients),
        "sent": sum(kinds.values()),
        "collectives": len(wire.sent),
        "scale_collectives": scales,
        "unsharded": wire.unsharded_bytes,
    }


def rank(rank: int, world: int, folder: str, sizes: Sizes, device: str) -> None:
    """One process: counts every form; rank 0 reports the rank that sends most."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store{world}"
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world)
    rows: dict[str, Row] = {}
    for form in FORMS:
        try:
            mine: Row = count(form, sizes, device)
        except (ImportError, TypeError, ValueError) as error:  # a refusal, the same on every rank
            mine = harness.why(error)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine)
        rows[form.name] = max(everyone, key=lambda row: row.get("sent", 0.0))
    if rank == 0:
        Path(folder, f"{world}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def measure(world: int, sizes: Sizes, device: str) -> list[Row]:
    """One row per form, counted in so many processes, which end with this call."""
    with tempfile.TemporaryDirectory() as folder:
        # Not "spawn": its processes run Python's finalisation, and a gloo thread that frees a
        # tensor meanwhile aborts them. These end at once.
        start_processes(rank, (world, folder, sizes, device), world, start_method="forkserver")
        counted = json.loads(Path(folder, f"{world}.json").read_text())
    return [row_of(form, world, counted) for form in FORMS]


def row_of(form: Form, world: int, counted: dict[str, Row]) -> Row:
    """The columns of a form: KiB, and ratios to the form that it is compared with."""
    row: Row = {"processes": world, "form": form.name, **counted[form.name]}
    if "error" in row:
        return row
    row |= {f"{kind}_kib": row["bytes"].get(kind, 0.0) / 2**10 for kind in ALL}
    row |= {f"{part}_kib": row[part] / 2**10 for part in ("sent", "unsharded")}
    base = counted[form.base]
    for part in ("weights", "gradients"):
        if base.get(part):
            row[f"{part}_ratio"] = row[part] / base[part]
    return row


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: gloo")
    parser.add_argument("--processes", nargs="+", type=harness.positive, default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write JSON there")
    options = parser.parse_args(argv)
    there = torch.cuda.device_count()
    if options.device == "cuda" and there < max(options.processes):
        parser.error(f"--processes {max(options.processes)} need as many GPUs; here are {there}")
    return options


def main(argv: Sequence[str]) -> int:
    """Count every form."""
    options = parse(argv)
    sizes = QUICK if options.quick else SIZES["tiny"]
    rows = [row for world in options.processes for row in measure(world, sizes, options.device)]
    report.publish("bench_comm", argv, options, rows, COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
