"""torch.distributed.checkpoint as it is: written by four processes, read by four, two and one.

And by a program that has never heard of float8.
"""

import checkpoint_program as claims
import pytest
from fresh import facts_of
from processes import failures
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

NO_GROUP = "ignore:torch.distributed is disabled:UserWarning"


def path_of(folder, recipe):
    return str(folder / str(recipe))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Four processes write one checkpoint for each recipe; what failed, and where they are."""
    folder = tmp_path_factory.mktemp("checkpoints")
    four = {
        f"{recipe}: saved by four": ("four_save_and_resume", recipe, path_of(folder, recipe))
        for recipe in claims.RECIPES
    }
    return failures("checkpoint_program", four, world=4), folder


@pytest.mark.slow
def test_four_processes_save_and_resume_to_the_same_losses_and_bits(saved):
    assert saved[0] == {}


@pytest.mark.slow
def test_two_processes_go_on_where_four_stopped(saved):
    folder = saved[1]
    same = [(recipe, recipe) for recipe in claims.RECIPES]
    gathered = [("delayed", "gathered delayed"), ("gathered tensorwise", "tensorwise")]
    other = [(None, "delayed"), (None, "tensorwise"), ("delayed", None), ("tensorwise", "delayed")]
    two = {
        f"{before}, resumed by two as {after}": (claim, before, after, path_of(folder, before))
        for claim, pairs in (("two_resume", same + gathered), ("float8_comes_and_goes", other))
        for before, after in pairs
    }
    two["a lost history is seen"] = ("histories_travel", path_of(folder, "delayed"))
    assert failures("checkpoint_program", two) == {}


@pytest.mark.slow
@pytest.mark.filterwarnings(NO_GROUP)
@pytest.mark.parametrize("recipe", claims.RECIPES)
def test_one_process_goes_on_where_four_stopped(saved, recipe):
    claims.resumes(recipe, recipe, path_of(saved[1], recipe))


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
    expected = claims.one.make("delayed").state_dict()
    assert facts["model"] == {k: [str(v.dtype), list(v.shape)] for k, v in expected.items()}
