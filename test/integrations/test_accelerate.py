"""`prepare_float8`: optimizers, settings and checkpoints of Accelerate.

`test_frameworks.py` trains with it.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

import one_process as one
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from frameworks import Case, adamw, by_accelerate, by_hand
from fresh import example_of
from torch import nn

from float8 import Float8LinearConfig
from float8.config import RECIPES
from float8.integrations import accelerate as integration
from float8.integrations.accelerate import prepare_float8

GATHERING = replace(RECIPES["tensorwise"], enable_fsdp_float8_all_gather=True)


@pytest.fixture(autouse=True)
def _fresh_state():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def make():
    return Case("tensorwise").model()


def accelerator_of(**options):
    return Accelerator(cpu=True, **options)


def step(accelerator, model, optimizer, number=0, factor=1.0):
    loss = one.loss_of(model, one.batch(number, 0)) * factor
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def test_the_example_of_the_docstring_runs(tmp_path, monkeypatch):
    code = example_of(integration.__doc__)
    assert len(code.splitlines()) < 60
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(integration.Accelerator, "__init__", on_cpu(Accelerator.__init__))
    names = {}
    exec(code, names)
    assert (tmp_path / "checkpoint" / "model.safetensors").exists()
    assert int((names["model"][0].cast_input.amax_history > 0).sum()) == 4  # of 8 microbatches


def on_cpu(init):
    return lambda self, *args, **kwargs: init(self, *args, cpu=True, **kwargs)


def test_a_model_that_accelerate_compiles_has_the_same_bits():
    """Its autocast is around the compiled forward, in which dynamo lets no code switch it."""
    case = Case("tensorwise", bf16=True)
    one.assert_same_model(by_accelerate(case, dynamo_backend="aot_eager"), by_hand(case), case)


def test_a_step_that_a_grad_scaler_skips_is_not_counted():
    accelerator, model = accelerator_of(), make()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer = prepare_float8(accelerator, model, adamw(model), "delayed")
    skipped = []
    for number, factor in enumerate((1.0, torch.inf, 1.0)):
        step(accelerator, model, optimizer, number, factor)
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [False, True, False]
    amaxes = [one.batch(number, 0)[0].abs().max() for number in range(3)]
    expected = torch.stack([max(amaxes[1:]), amaxes[0], torch.tensor(0.0)])
    assert torch.equal(model[0].cast_input.amax_history[:3], expected)
    found = model[0].cast_grad_output.amax_history[:3]
    assert [amax > 0 for amax in found.tolist()] == [False, True, False]


def test_a_step_with_a_learning_rate_of_0_is_counted():
    model = make()
    model, optimizer = prepare_float8(accelerator_of(), model, adamw(model), "delayed")
    optimizer.param_groups[0]["lr"] = 0.0  # a warm-up starts so
    step(accelerator_of(), model, optimizer)
    assert model[0].cast_input.amax_history.count_nonzero() == 1
    optimizer.step()  # of torch.distributed.checkpoint, which creates states so
    assert model[0].cast_input.amax_history[0] > 0


def test_an_optimizer_steps_the_converted_parameters():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = prepare_float8(accelerator_of(), model, optimizer, GATHERING)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_evaluates_as_te_recipe_kwargs_say(monkeypatch):
    monkeypatch.setattr("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: 1)
    from accelerate.utils import TERecipeKwargs

    x = one.batch(0, 0)[0]
    plain = make()(x)
    for in_float8 in (False, True):
        recipe = TERecipeKwargs(amax_history_len=3, use_autocast_during_eval=in_float8)
        model = make()
        model, _ = prepare_float8(accelerator_of(), model, adamw(model), recipe)
        assert model[0].config == Float8LinearConfig.from_te_recipe(
            amax_history_len=3, amax_compute_algo="most_recent"
        )
        with torch.no_grad():
            assert torch.equal(model.eval()(x), plain) != in_float8


@pytest.mark.parametrize(
    ("own_filter", "converted"), [(lambda module, fqn: fqn == "0", "0"), (None, "2")]
)
def test_torchao_settings_bring_their_filter(own_filter, converted, monkeypatch):
    kwargs = type("AORecipeKwargs", (SimpleNamespace,), {})
    settings = kwargs(config="of torchao", module_filter_func=own_filter)
    seen = []
    made = classmethod(lambda cls, config: seen.append(config) or RECIPES["rowwise"])
    monkeypatch.setattr(Float8LinearConfig, "from_torchao", made)
    model = nn.Sequential(*make(), nn.Linear(32, 24), nn.Linear(24, 32))
    model, _ = prepare_float8(accelerator_of(), model, adamw(model), settings)
    assert seen == ["of torchao"]
    assert model.float8_conversion.converted == [converted]
    assert model[int(converted)].config == RECIPES["rowwise"]


class TestRefusals:
    def test_a_prepared_model(self):
        accelerator = accelerator_of()
        model = make()
        model, optimizer = accelerator.prepare(model, adamw(model))
        with pytest.raises(ValueError, match="prepared before"):
            prepare_float8(accelerator, model, optimizer)
        with pytest.raises(ValueError, match="prepared before"):
            prepare_float8(accelerator, make(), optimizer)
        assert type(model[0]) is nn.Linear

    def test_an_accelerator_that_converts_by_itself(self, monkeypatch):
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
        model = make()
        with pytest.raises(ValueError, match=r"backend TE have Accelerate.* take bf16"):
            prepare_float8(accelerator_of(), model, adamw(model))
        monkeypatch.delenv("ACCELERATE_FP8_BACKEND")
        accelerator = accelerator_of()
        monkeypatch.setattr(type(accelerator), "mixed_precision", "fp8")
        with pytest.raises(ValueError, match="mixed_precision='fp8'"):
            prepare_float8(accelerator, model, adamw(model))

    @pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
    def test_wrappers_with_parameters_or_steps_of_their_own(self, kind, monkeypatch):
        accelerator, model = accelerator_of(), make()
        monkeypatch.setattr(type(accelerator), "distributed_type", DistributedType[kind])
        monkeypatch.setattr(type(accelerator), "is_fsdp2", False)
        with pytest.raises(ValueError, match=rf"^{kind} .*fsdp_version=2"):
            prepare_float8(accelerator, model, adamw(model))
