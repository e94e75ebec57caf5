"""What does recipe `unit` gain over measured scales, on one unit-scaled model?

The model is `uu.TransformerDecoder`'s stack of layers, with rotary positions; embedding and readout
stay in high precision in practice. All contenders share its parameters and are timed in turns. A
step is forward, backward with a random gradient and, for `delayed`, its `sync`:

    time / hp   = time(recipe) / time(the unit-scaled layers in high precision), same mode
    time / unit = time(recipe) / time(unit): what measuring scales costs
    tokens/s    = tokens of a step / median time

Two columns count the cost of the linear layers on a GPU, without one (`traffic.py`): the bytes that
all of them move outside the GEMMs, and the launches of one. On a CPU float8 is emulated: its times
do not say which recipe is the fastest on a GPU. The model's dtype is float32 on a CPU, the dtype
that CPUs multiply fastest, and bfloat16 on CUDA.

    python benchmarks/bench_unit.py --modes eager compiled -o unit.json
    python benchmarks/bench_unit.py --quick
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, without installation

import float8.unit_scaling as uu
from benchmarks import bench_model
from benchmarks.measuring import contenders, harness, report, traffic
from benchmarks.measuring.step import Step, room_to_compile
from float8 import Float8LinearConfig, convert_to_float8_training

BASELINE = "high precision"
UNIT = "unit"
RECIPES = ("tensorwise", "delayed", UNIT)
COLUMNS = {
    "mode": ("mode", ""),
    "layer": ("linear layers", ""),
    "ms": ("fwd+bwd ms", ".1f"),
    "min_ms": ("min", ".1f"),
    "max_ms": ("max", ".1f"),
    "ratio": ("time / hp", ".3f"),
    "ratio_to_unit": ("time / unit", ".3f"),
    "tokens_s": ("tokens/s", ",.0f"),
    "cuda_mib": ("MiB moved on CUDA", ",.1f"),
    "cuda_launches": ("launches of a layer", ".0f"),
    "launches": ("launches", ".0f"),
    "saved_mib": ("saved MiB", ".1f"),
    "peak_gib": ("peak GiB", ".2f"),
    "sqnr_db": ("SQNR dB", ".1f"),
    "error": ("not run", ".80"),
}
# option -> its default on a CPU, on CUDA
SIZES = {"width": (256, 4096), "layers": (2, 4), "batch": (2, 2), "context": (128, 4096)}
QUICK = {"width": 64, "layers": 1, "batch": 1, "context": 32, "repeats": 2, "warmup": 1}


def config_of(name: str) -> Float8LinearConfig | None:
    return None if name == BASELINE else Float8LinearConfig.from_recipe_name(name)


def model_of(name: str, plain: nn.Module) -> nn.Module:
    """The layers in a recipe; their parameters are those of `plain`."""
    shared = {id(parameter): parameter for parameter in plain.parameters()}
    model: nn.Module = copy.deepcopy(plain, shared)
    if (config := config_of(name)) is not None:
        convert_to_float8_training(model, config=config)
    return model


def step(
    name: str, mode: str, plain: nn.Module, x: torch.Tensor, grad_output: torch.Tensor
) -> Step:
    model = model_of(name, plain)
    if mode == "compiled":
        for layer in model.children():
            layer.compile(fullgraph=True, dynamic=False)
    return Step(model, model, x, grad_output)


def measure(mode: str, options: argparse.Namespace) -> list[harness.Row]:
    """One row per contender, all timed in the same rounds."""
    torch.manual_seed(options.seed)
    plain = uu.TransformerStack(
        options.layers,
        hidden_size=options.width,
        heads=options.heads,
        is_causal=True,
        rotary_base=10_000.0,
    ).to(options.device, options.dtype)
    shape = (options.batch, options.context, options.width)
    random = partial(torch.randn, device=options.device, dtype=options.dtype)
    x, grad_output = random(shape, requires_grad=True), random(shape)
    names = [BASELINE, *options.recipes]
    makers = {name: partial(step, name, mode, plain, x, grad_output) for name in names}
    rows: list[harness.Row] = []
    with room_to_compile():
        rounds = harness.take_turns([makers], options)
        base = rounds.runs[BASELINE]
        assert isinstance(base, Step)
        for name in names:
            row: harness.Row = {"layer": name, "mode": mode, **rounds.row(name, BASELINE)}
            row |= counted(name, plain, x)
            if isinstance(mine := rounds.runs.get(name), Step):
                row["tokens_s"] = options.batch * options.context / row["ms"] * 1e3
                row |= bench_model.weigh(mine, base, options.device)
                if UNIT in rounds.samples:
                    ratio = harness.paired_ratio(rounds.samples[name], rounds.samples[UNIT])
                    row["ratio_to_unit"] = ratio
            rows.append(row)
    return rows


def counted(name: str, plain: nn.Module, x: torch.Tensor) -> harness.Row:
    """What the linear layers cost on CUDA: bytes of all, launches of one."""
    linears = [module for module in plain.modules() if isinstance(module, nn.Linear)]
    rows = x.shape[:-1].numel()
    total = traffic.of_layers(rows, linears, config_of(name))
    return {
        "cuda_mib": total.bytes / 2**20,
        "cuda_launches": total.launches // len(linears),
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with what depends on the machine filled in."""
    parser = harness.parser(__doc__)
    parser.set_defaults(repeats=10, peer=False)
    contenders.add_options(parser, RECIPES)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="float32 on a CPU")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run?")
    for name, (small, large) in SIZES.items():
        text = f"default: {large} on CUDA, else {small}"
        parser.add_argument(f"--{name}", type=harness.positive, help=text)
    options = parser.parse_args(argv)
    contenders.check(parser, options)
    on_cpu = torch.device(options.device).type == "cpu"
    for key, value in QUICK.items() if options.quick else ():
        setattr(options, key, value)
    for name, (small, large) in SIZES.items():
        setattr(options, name, getattr(options, name) or (small if on_cpu else large))
    options.dtype = getattr(torch, options.dtype or ("float32" if on_cpu else "bfloat16"))
    head = min(options.width, 32 if on_cpu else 128)
    if options.width % head:
        parser.error(f"--width must be a multiple of {head}, the size of a head: {options.width}")
    options.heads = options.width // head
    return options


def main(argv: Sequence[str]) -> int:
    """Measure the layers; 1 if a recipe failed (a refusal is no failure)."""
    options = parse(argv)
    rows: list[harness.Row] = []
    try:
        for mode in harness.in_time(options.modes, options.stop_after):
            rows += measure(mode, options)
    finally:  # an interrupted run keeps what it measured
        report.publish("bench_unit", argv, options, rows, COLUMNS)
    return int(any(not row.get("refused", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
