"""torch.distributed.checkpoint as it is: written by four processes, read by four, two and one.

And by a program that does not import float8.
"""

import checkpoint_program as program
import one_process as one
import pytest
from checkpoint_program import RECIPES, expected_losses, resumes, train
from fresh import facts_of
from processes import pool
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from float8 import high_precision

pytestmark = pytest.mark.slow
NO_GROUP = "ignore:torch.distributed is disabled:UserWarning"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Four processes write one checkpoint for each recipe, and resume from it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for recipe in RECIPES:
        pool().run(4, "checkpoint_program", "saves_and_resumes", recipe, folder / str(recipe))
    return folder


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("after", "before"),
    [
        ("delayed", "delayed"),
        ("gathered tensorwise", "gathered tensorwise"),
        ("gathered delayed", "delayed"),
        ("tensorwise", "gathered tensorwise"),
    ],
)
def test_two_processes_resume_from_checkpoints_of_four(rank, saved, after, before):
    resumes(after, before, saved / before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("after", "before"),
    [("delayed", None), ("tensorwise", None), (None, "delayed"), ("delayed", "tensorwise")],
)
def test_another_recipe_loads_a_checkpoint_as_in_one_process(rank, saved, after, before):
    _, losses = resumes(after, before, saved / str(before))
    old, new = one.make(before), one.make(None)
    optimizer = one.adamw(old)
    train(old, optimizer, range(program.BEFORE))
    with high_precision(old):
        new.load_state_dict(old.state_dict())
    state, optimizer = optimizer.state_dict(), one.adamw(new)
    optimizer.load_state_dict(state)
    one.convert(new, after)
    assert losses == train(new, optimizer, range(program.BEFORE, program.BEFORE + program.AFTER))


@pytest.mark.ranks(2)
def test_a_lost_history_changes_the_losses(rank, saved):
    model, optimizer = program.sharded("delayed")
    with high_precision(model):
        program.load(model, optimizer, saved / "delayed")
    assert all(not m.history_ready for m in model.modules() if hasattr(m, "history_ready"))
    losses = train(model, optimizer, range(program.BEFORE, program.BEFORE + program.AFTER))
    assert losses != expected_losses("delayed")[program.BEFORE :]


@pytest.mark.filterwarnings(NO_GROUP)
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_process_resumes_from_checkpoints_of_four(saved, recipe):
    resumes(recipe, recipe, saved / str(recipe))


READ = """
import sys, torch
saved = torch.load({path!r}, weights_only=True)
facts["model"] = {{k: [str(v.dtype), list(v.shape)] for k, v in saved["model"].items()}}
facts["types"] = sorted({{type(v).__name__ for v in saved["model"].values()}})
facts["optimizer"] = sorted(saved["optimizer"]["state"]["0.weight"])
facts["float8"] = "float8" in sys.modules
"""


@pytest.mark.filterwarnings(NO_GROUP)
def test_the_files_hold_plain_tensors_for_a_program_without_float8(saved, tmp_path):
    path = tmp_path / "whole.pt"
    dcp_to_torch_save(saved / "gathered delayed", path)
    facts = facts_of(READ.format(path=str(path)))
    assert not facts["float8"]
    assert facts["types"] == ["Tensor"]
    assert facts["optimizer"] == ["exp_avg", "exp_avg_sq", "step"]
    expected = one.make("delayed").state_dict()
    assert facts["model"] == {k: [str(v.dtype), list(v.shape)] for k, v in expected.items()}
