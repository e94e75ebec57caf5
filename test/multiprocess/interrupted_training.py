"""A training that is killed once, and continues from its last complete checkpoint.

``torchrun --max-restarts 1 ... interrupted_training.py FOLDER``: FSDP2 over all ranks with delayed
scaling, a distributed checkpoint each step. In the first attempt rank 1 is killed in the backward
of step 3, while the checkpoint of step 2 is half written in the background. torchrun ends the other
rank and starts both again. They continue from the newest complete checkpoint, that of step 1.

**How to save**: every checkpoint into a new directory. `torch.distributed.checkpoint` writes and
syncs all data files first and ``.metadata`` last, by a rename: a directory with that file is
complete. Delete an older checkpoint only after a newer one is complete.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import checkpoint_program
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import shorten_the_dynamic_start
from torch.distributed.checkpoint.filesystem import FileSystemWriter

STEPS, SAVED, KILLED = 6, 1, 3  # all; the last one with a complete checkpoint; the killed one


class HalfWriter(FileSystemWriter):
    """A writer that stops in the middle of a file, as a killed process does."""

    def write_data(self, plan, planner):
        """Write half of each file, and never return."""
        super().write_data(plan, planner)
        for file in Path(self.path).glob("*.distcp"):
            os.truncate(file, file.stat().st_size // 2)
        halfway.set()
        threading.Event().wait()


halfway = threading.Event()


def newest(folder):
    """The newest complete checkpoint, or None."""
    return max((p.parent for p in Path(folder).glob("step-*/.metadata")), default=None)


def main(folder):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    shorten_the_dynamic_start()
    first, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", dist.get_rank()
    background = dist.new_group(backend="gloo")
    model, optimizer = checkpoint_program.sharded("delayed")
    start, last = 0, newest(folder)
    if last is not None:
        checkpoint_program.load(model, optimizer, last)
        start = int(last.name.removeprefix("step-")) + 1
    for step in range(start, STEPS):
        if first and step == KILLED and rank == 1:
            halfway.wait()
            model[2].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        (loss,) = checkpoint_program.train(model, optimizer, [step])
        with open(f"{folder}/losses-{rank}", "a") as file:
            print(start, step, loss.hex(), file=file)
        path = f"{folder}/step-{step}"
        if first and step > SAVED:
            state = checkpoint_program.state_of(model, optimizer)
            dcp.async_save(state, storage_writer=HalfWriter(path), process_group=background)
        else:
            checkpoint_program.save(model, optimizer, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # Python's finalisation may abort while FSDP2 holds gloo's threads
