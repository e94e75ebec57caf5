"""Each framework trains, evaluates and resumes to the bits of a bare loop."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

import one_process as one
import torch
from accelerate.state import AcceleratorState, GradientState
from frameworks import TRAIN, Case, by_hand
from processes import failures

from float8 import Float8Linear, convert_from_float8_training

FRAMEWORK = pytest.mark.parametrize("framework", TRAIN)
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning has advice for every short run


@pytest.fixture(autouse=True)
def _fresh_state():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@FRAMEWORK
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8"])
def test_training_has_the_bits_of_a_bare_loop(framework, recipe):
    case = Case(recipe, bf16=True, epochs=2)
    model = TRAIN[framework](case)
    one.assert_same_model(model, by_hand(case), case)
    assert all(type(model[i]) is Float8Linear for i in (0, 2))


@FRAMEWORK
def test_a_trained_model_evaluates_in_high_precision(framework):
    model, x = TRAIN[framework](Case("tensorwise")), torch.randn(16, 32)
    quantised = model(x)
    with torch.no_grad():
        assert torch.equal(model.train()(x), quantised)
        found = model.eval()(x)
    assert torch.equal(found, convert_from_float8_training(model)(x))
    assert not torch.equal(found, quantised)


@FRAMEWORK
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_saved_run_goes_on_to_the_same_bits_in_another_model(framework, recipe, tmp_path):
    case, train = Case(recipe, bf16=True), TRAIN[framework]
    train(case._replace(save=str(tmp_path)))
    resumed = train(case._replace(load=str(tmp_path), epochs=2, seed=1))
    one.assert_same_model(resumed, by_hand(case._replace(epochs=2)), case)


FSDP = {}
CASES = {
    **{f"{name}, DDP": ("trains_like_one_process", name, "delayed") for name in TRAIN},
    **{
        f"{name}, {recipe} under FSDP2": ("trains_like_one_process", name, recipe, FSDP)
        for name in ("accelerate", "transformers", "lightning")
        for recipe in ("delayed", "gathered delayed")
    },
    "FSDP2, tied": ("trains_like_one_process", "accelerate", "gathered tensorwise", FSDP, True),
    "FSDP2, from rank 0": (
        "trains_like_one_process",
        "accelerate",
        "gathered tensorwise",
        {"cpu_ram_efficient_loading": True},
    ),
    "accelerate resumes": ("resumes", "accelerate", "gathered delayed", FSDP),
    "accelerate resumes from one file": (
        "resumes",
        "accelerate",
        "gathered delayed",
        {"state_dict_type": "FULL_STATE_DICT"},
    ),
    "float8 moments": ("float8_moments_resume",),
    "bfloat16 model": ("a_bfloat16_model_is_upcast",),
    "clips, saves": ("accelerate_clips_and_writes_plain_tensors",),
    "states": ("accelerate_refuses_an_optimizer_with_states",),
    "saved in float8": ("what_the_trainer_trained_is_saved_in_float8",),
    "order": ("lightning_converts_before_it_shards",),
    "transformers resumes": ("resumes", "transformers", "gathered delayed", FSDP),
    "lightning resumes": ("resumes", "lightning", "delayed"),
}


@pytest.mark.slow
def test_on_two_processes():
    assert failures("frameworks", CASES, alone=True) == {}
