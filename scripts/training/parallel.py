"""Training in one or several processes: the part of the data and of the model of each.

    bash scripts/demo.sh --nproc 2                               # one machine: starts torchrun
    torchrun --nproc-per-node 8 scripts/train_gpt.py --recipe tensorwise      # or by hand

`Alone` is one process. `Sharded` (sharded.py) is one of several under torchrun, on gloo (CPU) or
NCCL (CUDA), and the model is sharded by FSDP2:

* What the blocks multiply by, their attention and feed-forward, is one group per block: gathered
  before its forward and again before its backward, in bf16, which is what autocast rounds these
  weights to anyway; or as float8, one byte per element, where both GEMMs of the recipe read one
  cast of a weight (`GATHERED`). Gradients are summed in float32.
* All else (embedding, norms, head) is a group of the root, in float32.

The global batch stays that of one process: of the batch of a step, each process takes its equal
part, and the gradient of the batch's mean is the mean of the parts' gradients. So losses compare
with those of one process. They are not equal to the bit: sums run in another order, bf16 gradients
are rounded per part, and float8 scales of activations and gradients follow each part's own amax.
Over the first steps the difference stays within bf16's own error, the distance of one process in
bf16 to one in float32, and for a float8 recipe twice its distance to bf16 more, one for each run
(test/scripts/test_parallel.py). Later it grows, as any two rounding errors do in training.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.measuring.memory import plain_tensors
from scripts.training import gpt


class Alone:
    """One process: nothing is divided."""

    rank, size = 0, 1

    def model(self, plain: gpt.GPT, recipe: str) -> nn.Module:
        """The model in its recipe."""
        return gpt.in_recipe(plain, recipe)

    def part(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This process's windows of a batch."""
        return batch

    def mean(self, *values: float) -> list[float]:
        """Each value's mean over all processes."""
        return list(values)

    def state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """What a checkpoint holds of them; on rank 0."""
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return flag

    def addresses(self, model: nn.Module) -> set[int]:
        """The addresses of the parameters after a forward pass."""
        tensors = (plain for p in model.parameters() for plain in plain_tensors(p))
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def close(self) -> None:
        """At the end, together."""


def team_of(nproc: int, device: str) -> Alone:
    """This process among those that share the training."""
    if nproc == 1:
        return Alone()
    from scripts.training.sharded import Sharded

    return Sharded(device)


def launch(script: str, argv: Sequence[str], nproc: int) -> int:
    """Run a script in `nproc` processes of this machine, under torchrun.

    Ctrl-C in a terminal reaches all of them; this process waits for them to write their checkpoint.

    Returns:
        torchrun's exit status, or 130 after Ctrl-C.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={nproc}", "--", script, *argv]  # --: our options are not its own
    threads = max(1, torch.get_num_threads() // nproc)  # theirs together are those of one process
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # their memory may be that of this process
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    pressed: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        status = subprocess.run(command, env=environment, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, previous)
    return 130 if pressed else status


def leave(status: int) -> NoReturn:
    """End the program; as one of several processes at once, without Python's finalisation.

    FSDP2 keeps the process group, and with it gloo's threads, to the end. A thread that frees a
    tensor while Python finalises cannot take the interpreter's lock and aborts the process:
    "terminate called without an active exception".
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
