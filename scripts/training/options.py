"""The options of a training: names, defaults and sizes, and their command line.

`Options.identity` determines the numbers; a checkpoint is resumed only under the same identity.
Default sizes depend on the GEMM speed of the machine.
"""

import argparse
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch

from scripts.training import savings

# A CPU without matrix units for bf16 multiplies at float32's speed, at best (see half_products.py).
# Its learning rate is the best for bf16 of 1, 2 and 4e-3, with seed 0.
# fmt: off
SIZES: dict[str, dict[str, float]] = {
    "cpu":      {"layers": 4, "width": 256, "heads": 4, "context": 128, "batch": 16, "steps": 160},
    "slow cpu": {"layers": 2, "width": 128, "heads": 2, "context": 64, "batch": 32, "steps": 160,
                 "learning_rate": 2e-3},
    "cuda":     {"layers": 12, "width": 1024, "heads": 8, "context": 512, "batch": 32,
                 "steps": 600},
}
# fmt: on
LARGEST_SEED = 2**42  # corpus.py multiplies it by a million: 64 bits hold that


EPILOG = """\
Ctrl-C finishes the running step and writes a checkpoint, as every validation does; the same command
with --resume goes on from there, on a CPU to the same bits.

demo.py and bench_memory.py write such a run as one name, recipe and savings joined by "+":
--recipe tensorwise --saved-activations --optimizer float8_adamw is
tensorwise+saved_activations+float8_adamw, and --recipe tensorwise --ms-amp O2 is tensorwise+O2.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = "bf16"
    optimizer: str = "adamw"
    saved_activations: bool = False
    ms_amp: str | None = None
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    learning_rate: float = 1e-3  # the best for bf16 of 0.7, 1, 1.5, 2 and 3e-3 at the CPU's sizes
    unit_learning_rate: float = 2**-2  # the best for unit_bf16 of 2**-3 to 2**1, slow cpu, seed 0
    seed: int = 0
    eval_interval: int = 40
    eval_batches: int = 8
    device: str = "cpu"
    compile: bool = False
    nproc: int = 1  # processes that share each batch
    experts: int = 0  # 0: every token passes the same feed-forward part
    top_k: int = 2  # experts for each token
    data: Path | None = None
    checkpoint: Path = Path("out/gpt.pt")
    inspect: Path | None = None  # what casts do, at every eval_interval-th step
    resume: bool = False

    def __post_init__(self) -> None:
        savings.check(self.recipe, self.optimizer, self.ms_amp, self.nproc)
        if self.experts and self.recipe in ("delayed", "unit_bf16", "unit"):
            raise ValueError(
                f"--recipe {self.recipe} does not train --experts {self.experts}: grouped GEMMs "
                "have no delayed scales, and unit_scale no rule for them; take tensorwise, "
                "rowwise, blockwise or mxfp8"
            )
        if self.inspect is not None and self.recipe in ("bf16", "unit_bf16"):
            raise ValueError(f"--inspect looks at float8 layers; --recipe {self.recipe} has none")

    @property
    def run(self) -> str:
        """The name of this run among others of the same sizes, as `savings.parts_of` parses it."""
        return savings.name_of(self.recipe, self.optimizer, self.saved_activations, self.ms_amp)

    def identity(self) -> dict[str, str | int | float | None]:
        free = {"eval_interval", "device", "compile", "data", "checkpoint", "inspect", "resume"}
        return {name: value for name, value in asdict(self).items() if name not in free}

    def record(self) -> dict[str, str | int | float | None]:
        """What a report says of them: the identity, and where and how it was computed."""
        return {**self.identity(), "device": self.device, "compile": self.compile}


def parser(description: str) -> argparse.ArgumentParser:
    """The options of training, all but those that tell one run from another."""
    p = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = "\n".join(
        f"  {device:>8}: {' '.join(f'{name}={value}' for name, value in row.items())}"
        for device, row in SIZES.items()
    )
    sizes = p.add_argument_group(
        "sizes", f"chosen by device (slow: without AMX), if not given\n{rows}"
    )
    sizes.add_argument("--layers", type=positive)
    sizes.add_argument("--width", type=positive, help="of the residual stream, a multiple of 16")
    sizes.add_argument("--heads", type=positive, help="of attention; they share the width")
    sizes.add_argument("--context", type=positive, help="bytes in one training window")
    sizes.add_argument("--batch", type=positive, help="windows in one step")
    sizes.add_argument("--steps", type=positive)
    p.add_argument(
        "--experts",
        type=positive,
        help="a mixture of so many in each block, and one that all tokens share",
    )
    p.add_argument("--top-k", type=positive, help="experts for each token (2)")
    p.add_argument("--learning-rate", type=rate, help="its peak (1e-3 where no size has its own)")
    p.add_argument(
        "--unit-learning-rate",
        type=rate,
        default=Options.unit_learning_rate,
        help="its peak where the model is unit-scaled, before u-muP's factors",
    )
    p.add_argument("--seed", type=seed, default=Options.seed, help="of the weights and the data")
    p.add_argument("--data", type=Path, help="a folder of text files (the standard library's)")
    p.add_argument("--device", help="cuda where there is one, else cpu")
    p.add_argument(
        "--nproc",
        type=positive,
        help="processes, started by torchrun, that share the model by FSDP2",
    )
    p.add_argument("--compile", action="store_true", help="torch.compile (needs a C++ compiler)")
    p.add_argument(
        "--eval-interval",
        type=positive,
        default=Options.eval_interval,
        help=f"steps from one validation and checkpoint to the next ({Options.eval_interval})",
    )
    p.add_argument(
        "--eval-batches",
        type=positive,
        default=Options.eval_batches,
        help=f"batches in one validation ({Options.eval_batches})",
    )
    p.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    return p


def positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def rate(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number >= 0")
    return value


def seed(text: str) -> int:
    value = int(text)
    if abs(value) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{text} is beyond {LARGEST_SEED:,}")
    return value


def options_from(args: argparse.Namespace) -> Options:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if torch.device(device).type == "meta":
            raise RuntimeError("it computes no values")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # an assertion where CUDA was not compiled in
        raise ValueError(f"torch has no device {device!r} here: take --device cpu") from error
    given = {name: value for name, value in vars(args).items() if value is not None}
    names = Options.__dataclass_fields__
    settings = {**SIZES[row_of(device)], "nproc": processes(), **given, "device": device}
    options = Options(**{name: value for name, value in settings.items() if name in names})
    _check_processes(options)
    return options


def _check_processes(options: Options) -> None:
    started = processes()
    if started not in (1, options.nproc):
        raise ValueError(
            f"--nproc {options.nproc} among {started} processes that torchrun started: leave out "
            "--nproc"
        )
    if options.batch % options.nproc:
        near = max(1, round(options.batch / options.nproc)) * options.nproc
        raise ValueError(
            f"--batch {options.batch} does not divide among --nproc {options.nproc}: "
            f"take --batch {near}"
        )
    if options.nproc > 1 and torch.device(options.device).type == "cuda":
        _check_gpus(options)
    if options.compile and options.nproc > 1:
        raise ValueError("--compile trains in one process so far: leave out --compile or --nproc")


def _check_gpus(options: Options) -> None:
    """Each process takes the GPU of its number, which one that is not there would say late."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", options.nproc))
    if here > torch.cuda.device_count():
        raise ValueError(
            f"{here} processes on this machine need as many GPUs, not {torch.cuda.device_count()}: "
            "take fewer, or --device cpu"
        )
    if torch.device(options.device).index is not None:
        raise ValueError(
            f"--device {options.device} names one GPU for all processes: take --device cuda"
        )


def processes() -> int:
    """How many torchrun started, this one included; 1 where it did not."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def give_up(script: str, error: Exception) -> NoReturn:
    """End with one line that says why, also with several processes."""
    sys.exit(f"{script}: {error}" if os.environ.get("RANK", "0") == "0" else 1)


def row_of(device: str) -> str:
    if torch.device(device).type == "cuda":
        return "cuda"
    # `get_capabilities` is not in every torch this runs on; without it, expect little.
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return "cpu" if known.get("amx_bf16") else "slow cpu"
