"""torchtitan's own Trainer, run by its own command line on two gloo processes, in float8."""

import importlib.util

import pytest
import torch.distributed.fsdp
from fresh import ROOT
from processes import failures

pytestmark = pytest.mark.slow

if importlib.util.find_spec("torchtitan") is None:  # importing it takes seconds
    pytest.skip("torchtitan is not installed", allow_module_level=True)
if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    pytest.skip("torchtitan 0.3 itself needs a newer torch", allow_module_level=True)

CASES = {
    "a converter takes what it should": ("converter_takes_what_it_should",),
    "a converter says what is wrong": ("converter_says_what_is_wrong",),
    "only layers that gain": ("only_faster_layers",),
    "layers keep the Module protocol": ("layers_keep_the_protocol",),
    "other optimizers are left alone": ("other_optimizers_are_left_alone",),
    "what parallelism refuses": ("what_parallelism_refuses",),
    "loss goes down as in high precision": ("loss_goes_down",),
    "the override is the converter": ("the_override_is_the_converter",),
    "float8 all-gather": ("gathers_in_float8",),
    "compiling changes nothing": ("compiling_changes_nothing",),
    "tensor parallel": ("tensor_parallel",),
    "delayed scaling resumes exactly": ("resumes_exactly",),
    "a Hugging Face checkpoint": ("exports_to_hugging_face",),
    "experts train in every recipe": ("experts_train_in_every_recipe",),
    "rows beyond the last expert": ("rows_beyond_the_last_expert_change_nothing",),
    "experts become plain again": ("experts_become_plain_again",),
    "which experts a converter took": ("a_converter_says_which_experts_it_took",),
}


@pytest.mark.slow
def test_on_two_processes():
    assert failures("titan_program", CASES, alone=True) == {}


def test_the_example_fits_on_a_page():
    assert len((ROOT / "scripts/example_torchtitan.py").read_text().splitlines()) < 60
