"""torch.distributed.checkpoint as it is: written by four processes, read by four, two and one.

And by a program that does not import float8.
"""

import checkpoint_program
import pytest
from fresh import facts_of
from processes import failures
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

NO_GROUP = "ignore:torch.distributed is disabled:UserWarning"
RECIPES = checkpoint_program.RECIPES
# The recipe of two processes, and that of the checkpoint: equal casts, or other ones.
RESUMED = (
    ("delayed", "delayed"),
    ("gathered tensorwise", "gathered tensorwise"),
    ("gathered delayed", "delayed"),
    ("tensorwise", "gathered tensorwise"),
)
CHANGED = (
    ("delayed", None),
    ("tensorwise", None),
    (None, "delayed"),
    ("delayed", "tensorwise"),
)


def path_of(folder, recipe):
    return str(folder / str(recipe))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Four processes write one checkpoint for each recipe; (failures, folder)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    checks = [("four_save_and_resume", recipe, path_of(folder, recipe)) for recipe in RECIPES]
    return failures("checkpoint_program", checks, world=4), folder


@pytest.mark.slow
def test_four_processes_save_and_resume_to_the_same_losses_and_bits(saved):
    assert saved[0] == {}


@pytest.mark.slow
def test_two_processes_resume_from_checkpoints_of_four(saved):
    folder = saved[1]
    checks = [
        (check, after, before, path_of(folder, before))
        for check, pairs in (("two_resume", RESUMED), ("two_resume_with_another_recipe", CHANGED))
        for after, before in pairs
    ]
    checks.append(("a_lost_history_changes_the_losses", path_of(folder, "delayed")))
    assert failures("checkpoint_program", checks) == {}


@pytest.mark.slow
@pytest.mark.filterwarnings(NO_GROUP)
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_process_resumes_from_checkpoints_of_four(saved, recipe):
    checkpoint_program.resumes(recipe, recipe, path_of(saved[1], recipe))


READ = """
import sys, torch
saved = torch.load({path!r}, weights_only=True)
facts["model"] = {{k: [str(v.dtype), list(v.shape)] for k, v in saved["model"].items()}}
facts["types"] = sorted({{type(v).__name__ for v in saved["model"].values()}})
facts["optimizer"] = sorted(saved["optimizer"]["state"]["0.weight"])
facts["float8"] = "float8" in sys.modules
"""


@pytest.mark.slow
@pytest.mark.filterwarnings(NO_GROUP)
def test_the_files_hold_plain_tensors_for_a_program_without_float8(saved, tmp_path):
    path = tmp_path / "whole.pt"
    dcp_to_torch_save(path_of(saved[1], "gathered delayed"), path)
    facts = facts_of(READ.format(path=str(path)))
    assert not facts["float8"]
    assert facts["types"] == ["Tensor"]
    assert facts["optimizer"] == ["exp_avg", "exp_avg_sq", "step"]
    expected = checkpoint_program.one.make("delayed").state_dict()
    assert facts["model"] == {k: [str(v.dtype), list(v.shape)] for k, v in expected.items()}
