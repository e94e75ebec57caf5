"""What does float8 gain in a whole model: tokens per second and peak memory, by recipe?

The model is a stack of LLaMA-3-8B blocks (`llama.py`), bfloat16 throughout, on one device. A step
is forward, backward with a random gradient, and the `sync` that delayed scaling owes; no optimizer,
which costs the same in every recipe. So

    ratio    = time(recipe) / time(bf16), both eager or both compiled
    tokens/s = tokens of a step / median time

All models share their parameters and take turns on the clock. Compiled is block by block, as it is
done for long stacks: equal blocks share one graph. Peak memory is `max_memory_allocated` over one
step (not on a CPU): parameters, their gradients, what is kept for backward, and temporary buffers.
`SQNR` compares the models' outputs, in which the errors of all blocks add up.

    python benchmarks/bench_model.py --modes eager compiled -o model.json
    python benchmarks/bench_model.py --size tiny --recipes tensorwise
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

from benchmarks.measuring import contenders, harness, report
from benchmarks.measuring.contenders import BASELINE, PEER
from benchmarks.measuring.step import Step, compare, room_to_compile, settled
from benchmarks.models.llama import SIZES, Llama, Sizes
from float8 import convert_to_float8_training

COLUMNS = {
    "mode": ("mode", ""),
    "layer": ("linear layers", ""),
    "ms": ("fwd+bwd ms", ".1f"),
    "min_ms": ("min", ".1f"),
    "max_ms": ("max", ".1f"),
    "tokens_s": ("tokens/s", ",.0f"),
    "ratio": ("time / bf16", ".3f"),
    "launches": ("launches", ".0f"),
    "saved_mib": ("saved MiB", ".1f"),
    "peak_gib": ("peak GiB", ".2f"),
    "sqnr_db": ("SQNR dB", ".1f"),
    "error": ("not run", ".80"),
}


def model_of(name: str, plain: Llama) -> nn.Module:
    """The model with a contender's layers; its parameters are those of `plain`."""
    shared = {id(parameter): parameter for parameter in plain.parameters()}
    model: nn.Module = copy.deepcopy(plain, shared)
    if name == BASELINE:
        return model
    if name.startswith(PEER):
        return contenders.torchao_model(model, contenders.recipe_of(name))
    convert_to_float8_training(model, config=settled(name))
    return model


def step(name: str, mode: str, plain: Llama, x: torch.Tensor, grad_output: torch.Tensor) -> Step:
    model = model_of(name, plain)
    if mode == "compiled":
        for block in model.get_submodule("blocks").children():
            block.compile(fullgraph=True, dynamic=False)
    return Step(model, model, x, grad_output)


def peak_bytes(step: Step, device: str) -> int | None:
    """The peak of allocated memory in one step; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    step()
    step.x.grad = None
    for parameter in step.layer.parameters():
        parameter.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def measure(
    mode: str, sizes: Sizes, options: argparse.Namespace, late: harness.Late = harness.never
) -> list[harness.Row]:
    """One row per contender, all timed in the same rounds."""
    torch.manual_seed(options.seed)
    random = partial(torch.randn, device=options.device, dtype=torch.bfloat16)
    shape = (sizes.batch, sizes.tokens, sizes.hidden)
    x, grad_output = random(shape, requires_grad=True), random(shape)
    plain = Llama(sizes).to(options.device, torch.bfloat16)
    names = contenders.names(options)
    makers = {name: partial(step, name, mode, plain, x, grad_output) for name in names}
    rows: list[harness.Row] = []
    with room_to_compile():
        rounds = harness.take_turns([makers], options, late)
        base = rounds.runs[BASELINE]
        assert isinstance(base, Step)
        for name in names:
            row: harness.Row = {"layer": name, "mode": mode, **rounds.row(name, BASELINE)}
            if isinstance(mine := rounds.runs.get(name), Step):
                row["tokens_s"] = sizes.batch * sizes.tokens / row["ms"] * 1e3
                row |= weigh(mine, base, options.device)
            rows.append(row)
    return rows


def weigh(step: Step, baseline: Step, device: str) -> harness.Row:
    """What a step saves, launches and allocates, and the SQNR of its output to bf16's."""
    peak = peak_bytes(step, device)
    row = compare(step, baseline, device)
    return row if peak is None else row | {"peak_gib": peak / 2**30}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with what depends on the machine filled in."""
    parser = harness.parser(__doc__)
    parser.set_defaults(repeats=10)
    contenders.add_options(parser, contenders.SCALED)
    parser.add_argument("--size", choices=list(SIZES), help="default: 8b on CUDA, else tiny")
    parser.add_argument("--blocks", type=harness.positive, help="default: what the size says")
    options = parser.parse_args(argv)
    contenders.check(parser, options)
    on_cpu = torch.device(options.device).type == "cpu"
    options.size = options.size or ("tiny" if on_cpu else "8b")
    options.blocks = options.blocks or SIZES[options.size].blocks
    return options


def main(argv: Sequence[str]) -> int:
    """Measure the model; 1 if one of our recipes failed (a refusal is no failure)."""
    options = parse(argv)
    sizes = replace(SIZES[options.size], blocks=options.blocks)
    rows: list[harness.Row] = []
    late = harness.countdown(options.stop_after)
    try:
        for mode in harness.in_time(options.modes, options.stop_after):
            rows += measure(mode, sizes, options, late)
            report.write("bench_model", argv, options, rows, COLUMNS)
    finally:  # an interrupted run keeps what it measured
        report.publish("bench_model", argv, options, rows, COLUMNS)
    ours = [row for row in rows if not row["layer"].startswith(PEER)]
    return int(any(not row.get("refused", True) for row in ours))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
