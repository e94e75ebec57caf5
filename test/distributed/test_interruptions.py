"""A rank is killed in mid-step: torchrun continues from the last complete checkpoint."""

import os
import subprocess
import sys

import checkpoint_program
import interrupted_training as training
import pytest
from fresh import ROOT

ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'test'}",
    "OMP_NUM_THREADS": "1",
    # Else (torch 2.13) the second attempt may read the addresses of the first one's processes.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1"


@pytest.mark.slow
def test_torchrun_continues_from_the_last_complete_checkpoint_to_the_same_losses(tmp_path):
    """A checkpoint is half written when the rank is killed."""
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
