"""FSDP2, HSDP and tensor parallel: states are sharded, saved and resharded, bit for bit."""

import optim_program as claims
import pytest
from processes import failures


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # for one process
def test_on_four_two_and_one_processes(tmp_path):
    path = str(tmp_path / "checkpoint")
    four = {
        "four ranks save what one process has, and go on": ("four_train_save_and_resume", path),
        "replicas stay alike": ("replicas_stay_alike",),
    }
    two = {
        "two ranks go on": ("resume", path),
        "every option of state dicts": ("options_of_state_dicts",),
        "codes of other rows are seen": ("wrong_rows_are_seen", path),
        "tensor parallel parameters": ("tensor_parallel_parameters",),
        "whole states are refused": ("plain_states_are_refused",),
    }
    assert failures("optim_program", four, world=4) == {}
    assert failures("optim_program", two) == {}
    claims.resume(0, path)
