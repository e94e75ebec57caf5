"""Something goes wrong on one process: all processes get an error, or continue correctly."""

import datetime
import os
import signal
import subprocess
import sys
from pathlib import Path

import checkpoint_program
import interrupted_training as training
import one_process as one
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fresh import ROOT
from parallel_forms import FORMS
from processes import pool
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter


def dies_in_mid_step(rank, form, how):
    """Train until rank 1 kills or stops itself, in the backward of its second step."""
    store = dist.PrefixStore("patience", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    timeout = datetime.timedelta(seconds=600 if how == signal.SIGKILL else 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    model = one.make("delayed")
    layer, mine = model[2], FORMS[form]["wrap"](model)
    optimizer = one.adamw(mine)
    one.rank_step(mine, [one.batch(0, rank)])
    one.update(mine, optimizer)
    if rank == 1:
        layer.register_full_backward_hook(lambda *_: os.kill(os.getpid(), how))
    one.rank_step(mine, [one.batch(1, rank)])
    one.update(mine, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "how"), [("DDP", signal.SIGKILL), ("FSDP2", signal.SIGSTOP)])
def test_the_other_process_gets_an_error_in_bounded_time(form, how):
    """A killed rank ends its connections; a stopped one lets collectives run into their timeout."""
    with pytest.raises(AssertionError) as ended:
        pool().run(2, __file__, "dies_in_mid_step", form, how, patience=30)
    assert "rank 0 of 2: Traceback" in str(ended.value)
    assert "RuntimeError" in str(ended.value)  # as torch.distributed's errors are
    died = "rank 1 of 2: its process ended with exit status -9" in str(ended.value)
    assert died == (how == signal.SIGKILL)


ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'test'}",
    "OMP_NUM_THREADS": "1",
    # Else (torch 2.13) the second attempt may read the addresses of the first one's processes.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1"


@pytest.mark.slow
def test_torchrun_continues_from_the_last_complete_checkpoint_to_the_same_losses(tmp_path):
    """A rank is killed in mid-step, while a checkpoint is being written."""
    done = subprocess.run(
        [sys.executable, *TORCHRUN.split(), "--monitor-interval", "0.1",
         str(ROOT / "test/multiprocess/interrupted_training.py"), str(tmp_path)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = checkpoint_program.expected_losses("delayed")
    assert len(expected) == training.STEPS
    again = training.SAVED + 1
    steps = [(0, step) for step in range(training.KILLED)]
    steps += [(again, step) for step in range(again, training.STEPS)]
    for rank in range(2):
        lines = [line.split() for line in (tmp_path / f"losses-{rank}").read_text().splitlines()]
        assert [(int(start), int(step)) for start, step, _ in lines] == steps
        assert all(float.fromhex(loss) == expected[int(step)] for _, step, loss in lines)


class TornWriter(FileSystemWriter):
    """A disk that is full in the middle of a file."""

    def write_data(self, plan, planner):
        """Write half of each file."""
        super().write_data(plan, planner)
        for file in Path(self.path).glob("*.distcp"):
            os.truncate(file, file.stat().st_size // 2)
        raise OSError("No space left on device")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")
def test_an_interrupted_write_keeps_earlier_checkpoints_in_other_directories_only(tmp_path):
    before, now, after = ({"x": torch.full((64,), value)} for value in (1.0, 2.0, 0.0))
    dcp.save(before, storage_writer=FileSystemWriter(tmp_path / "step-0"))
    with pytest.raises(CheckpointException, match="No space left"):
        dcp.save(now, storage_writer=TornWriter(tmp_path / "step-1"))
    assert training.newest(tmp_path).name == "step-0"
    dcp.load(after, checkpoint_id=training.newest(tmp_path))
    assert torch.equal(after["x"], before["x"])

    with pytest.raises(CheckpointException, match="No space left"):  # into the same directory
        dcp.save(now, storage_writer=TornWriter(tmp_path / "step-0"))
    with pytest.raises(CheckpointException):
        dcp.load(after, checkpoint_id=tmp_path / "step-0")
