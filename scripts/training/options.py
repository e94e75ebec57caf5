"""The options of a training: names, defaults and sizes, and their command line.

`Options.identity` determines the numbers; a checkpoint is resumed only under the same identity.
"""

import argparse
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks.measuring.harness import positive
from scripts.training import savings

# The learning rate of "cpu" is the best for bf16 of 1, 2 and 4e-3, with seed 0.
_NAMES = ("layers", "width", "heads", "context", "batch", "steps")
SIZES: dict[str, dict[str, float]] = {
    "cpu": dict(zip(_NAMES, (2, 128, 2, 64, 32, 160), strict=True)) | {"learning_rate": 2e-3},
    "cuda": dict(zip(_NAMES, (12, 1024, 8, 512, 32, 600), strict=True)),
}
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
    learning_rate: float = 1e-3  # the best for bf16 of 0.7 to 3e-3, at 4 layers of 256
    unit_learning_rate: float = 2**-2  # the best for unit_bf16 of 2**-3 to 2**1, "cpu", seed 0
    seed: int = 0
    eval_interval: int = 40
    eval_batches: int = 8
    device: str = "cpu"
    compile: bool = False
    nproc: int = 1  # processes that share each batch
    data: Path | None = None
    checkpoint: Path = Path("out/gpt.pt")
    inspect: Path | None = None  # what casts do, at every eval_interval-th step
    resume: bool = False

    def __post_init__(self) -> None:
        savings.check(self.recipe, self.optimizer, self.ms_amp, self.nproc)
        if self.batch % self.nproc:  # the mean of unequal parts' means is not the mean
            raise ValueError(f"--batch {self.batch} does not divide among --nproc {self.nproc}")
        if self.compile and self.nproc > 1:
            raise ValueError("--compile trains in one process: leave out --compile or --nproc")

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
    rows = [
        f"  {device:>4}: {' '.join(f'{name}={value}' for name, value in row.items())}"
        for device, row in SIZES.items()
    ]
    sizes = p.add_argument_group(
        "sizes", "\n".join(["chosen by device, if not given (demo.py: steps by speed)", *rows])
    )
    help_of = {
        "width": "of the residual stream, a multiple of 16",
        "heads": "of attention; they share the width",
        "context": "bytes in one training window",
        "batch": "windows in one step",
    }
    for name in _NAMES:
        sizes.add_argument(f"--{name}", type=positive, help=help_of.get(name))
    for name, kind, text in (
        ("learning-rate", float, "its peak (1e-3 where no size has its own)"),
        ("unit-learning-rate", float, "its peak for unit-scaled models"),
        ("seed", int, "of the weights and the data (0)"),
        ("data", Path, "a folder of text files (the standard library's)"),
        ("device", str, "cuda where there is one, else cpu"),
        ("nproc", positive, "processes under torchrun that share the model"),
        ("eval-interval", positive, "steps from one validation to the next"),
        ("eval-batches", positive, "batches in one validation"),
    ):
        p.add_argument(f"--{name}", type=kind, help=text)
    p.add_argument("--compile", action="store_true", help="torch.compile (needs a C++ compiler)")
    p.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    return p


def options_from(args: argparse.Namespace) -> Options:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    given = {name: value for name, value in vars(args).items() if value is not None}
    sizes = SIZES["cuda" if torch.device(device).type == "cuda" else "cpu"]
    settings = {**sizes, "nproc": processes(), **given, "device": device}
    names = Options.__dataclass_fields__
    return Options(**{name: value for name, value in settings.items() if name in names})


def processes() -> int:
    """How many torchrun started, this one included; 1 where it did not."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def give_up(script: str, error: Exception) -> NoReturn:
    """End with one line that says why, also with several processes."""
    sys.exit(f"{script}: {error}" if os.environ.get("RANK", "0") == "0" else 1)
