"""`Float8Callback`: a small Llama in the Trainer; its checkpoints are plain and resume exactly.

`test_frameworks.py` trains with it too.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

import torch
from fresh import example_of
from one_process import assert_same_model
from safetensors.torch import load_file
from trainers import (  # noqa: F401
    LAYERS,
    data_of,
    llama,
    short_collections,
    trainer_of,
)
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingType,
)
from float8.config import RECIPES, DelayedScalingConfig
from float8.distributed.sharded_weight import ShardedWeight
from float8.integrations import transformers as integration
from float8.integrations.transformers import Float8Callback, convert
from float8.numerics import load_run

GATHERING = replace(RECIPES["tensorwise"], enable_fsdp_float8_all_gather=True)
DELAYED = DelayedScalingConfig(history_len=3, margin=1)


def losses_of(trainer):
    return {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e}


def test_the_example_of_the_docstring_runs(tmp_path, monkeypatch, capsys):
    code = example_of(integration.__doc__)
    assert len(code.splitlines()) < 60
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    assert "eval_loss" in capsys.readouterr().out
    cast = names["model"].model.layers[0].mlp.up_proj.cast_input
    assert int((cast.amax_history > 0).sum()) == 4


def test_resumes_to_the_bits_of_an_uninterrupted_run(tmp_path):
    """Within an epoch and between two; steps of two microbatches, the last of an epoch of one."""
    recipe = replace(RECIPES["delayed"], delayed_scaling=DELAYED)

    def run(folder, seed=0, **options):
        callback = Float8Callback(recipe)
        epochs = {"max_steps": -1, "num_train_epochs": 2, "save_steps": 1, **options}
        trainer = trainer_of(tmp_path / folder, llama(seed), callback, **epochs)
        trainer.train_dataset = data_of(10)
        return trainer

    evaluating = {"eval_strategy": "steps", "eval_steps": 1}
    whole = run("a", **evaluating, compute_metrics=lambda p: {"shape": p.predictions.shape[1]})
    whole.train()
    assert whole.state.global_step == 6
    assert whole.evaluate()["eval_shape"] == 16
    assert isinstance(whole.model.model.layers[0].mlp.up_proj, Float8Linear)
    for step in (2, 3):  # the first losses come with the checkpoint
        resumed = run("b", seed=1, save_strategy="no")  # and without evaluation
        resumed.args.restore_callback_states_from_checkpoint = step == 3
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{step}"))
        assert losses_of(resumed) == losses_of(whole)
        assert_same_model(resumed.model, whole.model, (recipe, step))


def test_a_checkpoint_is_that_of_a_plain_model(tmp_path):
    trainer = trainer_of(tmp_path, llama(), Float8Callback("delayed"))
    trainer.train()
    stored = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert stored.keys() == llama().state_dict().keys()
    plain, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint-4", output_loading_info=True
    )
    assert not any(info.values()), info
    tokens = data_of(1)[0]["input_ids"][None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = plain(tokens).logits.float()
        assert torch.equal(trainer.model.eval()(tokens).logits, expected)


def test_evaluates_in_float8_if_asked(tmp_path):
    expected = trainer_of(tmp_path, llama(), Float8Callback("rowwise")).evaluate()["eval_loss"]
    callback = Float8Callback("rowwise", float8_in_evaluation=True)
    found = trainer_of(tmp_path, llama(), callback).evaluate()["eval_loss"]
    assert found != expected
    assert found == pytest.approx(expected, rel=1e-2)


def test_the_best_checkpoint_comes_back_with_its_histories(tmp_path):
    callback = Float8Callback("delayed")
    trainer = trainer_of(
        tmp_path, llama(), callback, save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, greater_is_better=True, save_total_limit=1,
        metric_for_best_model="loss",
    )  # fmt: skip
    trainer.train()  # the loss falls, and the largest is the best here
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    cast = trainer.model.model.layers[0].mlp.up_proj.cast_grad_output
    assert int((cast.amax_history > 0).sum()) == 1
    assert cast.history_ready
    once = trainer_of(tmp_path / "b", llama(), Float8Callback("delayed"), max_steps=1)
    once.train()
    assert_same_model(trainer.model, once.model, "best")


class TestConversion:
    def test_weights_that_are_gathered_in_float8_are_written_plain(self, tmp_path):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # built before
        trainer = trainer_of(
            tmp_path, model, Float8Callback(GATHERING), (optimizer, None), max_steps=2
        )
        trainer.train()
        weight = model.model.layers[0].mlp.up_proj.weight
        assert isinstance(weight, ShardedWeight)
        stored = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
        stored = stored["model.layers.0.mlp.up_proj.weight"]
        assert torch.equal(stored, weight.plain)
        assert not torch.equal(stored, llama().model.layers[0].mlp.up_proj.weight)


def test_every_nth_step_is_inspected(tmp_path):
    run = tmp_path / "run.json"
    callback = Float8Callback(inspect_every=2, report_path=run)
    trainer_of(tmp_path, llama(), callback).train()
    assert [report.step for report in load_run(run)] == [0, 2]
    assert callback.monitor.report.step == 2
    rows = callback.monitor.report.rows()
    assert {row["operand"] for row in rows} == {"input", "weight", "grad_output"}
    assert "model.layers.0.mlp.up_proj" in {row["layer"] for row in rows}
    assert {row["calls"] for row in rows} == {2}  # microbatches
    resumed = trainer_of(tmp_path, llama(), callback, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert [report.step for report in load_run(run)] == [0, 2, 4]


def saturating():
    """A config whose inputs are cut to 1/64."""
    return Float8LinearConfig(cast_config_input=CastConfig(ScalingType.STATIC, static_scale=2**-15))


@pytest.mark.parametrize("in_order", [False, True])
def test_an_alarm_stops_the_training(in_order, tmp_path):
    def stop(alarm):
        if not in_order:
            raise RuntimeError(str(alarm))
        trainer.control.should_training_stop = True

    callback = Float8Callback(saturating(), inspect_every=1, on_alarm=stop)
    trainer = trainer_of(tmp_path, llama(), callback, max_steps=6)
    if in_order:
        trainer.train()
    else:
        with pytest.raises(RuntimeError, match=r"saturation: model\.layers\.0"):
            trainer.train()
    assert trainer.state.global_step == 1


def test_accelerates_settings_mean_what_they_say():
    settings = {"amax_history_len": 3, "use_autocast_during_eval": True}
    adapter = Float8Callback(settings).adapter
    assert adapter.float8_in_evaluation
    assert adapter.config.delayed_scaling.history_len == 3
    assert not Float8Callback(settings, float8_in_evaluation=False).adapter.float8_in_evaluation
    kwargs = type("AORecipeKwargs", (SimpleNamespace,), {"config": Float8LinearConfig()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Float8LinearConfig, "from_torchao", classmethod(lambda cls, given: given))
        only_up = kwargs(module_filter_func=lambda module, fqn: fqn.endswith("up_proj"))
        callback = Float8Callback(only_up)
    arguments = SimpleNamespace(mixed_precision="bf16")
    callback.on_init_end(arguments, None, None, model=(model := llama()))
    assert model.float8_conversion.converted == ["model.layers.0.mlp.up_proj"]


class Preferences(Trainer):
    """As trainers of TRL, which keep a frozen ``ref_model`` and compare log probabilities."""

    ref_model = None

    def compute_loss(self, model, inputs, *args, return_outputs=False, **options):
        loss = model(**inputs).loss
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            differs = loss.detach() - self.ref_model(**inputs).loss
        self.differences.append(differs.item())
        return (loss, {}) if return_outputs else loss

    def begin(self):
        self.callback_handler.optimizer = self.create_optimizer()
        self.callback_handler.on_train_begin(self.args, self.state, self.control)


EARLY = replace(RECIPES["delayed"], delayed_scaling=DelayedScalingConfig(history_len=1))


@pytest.mark.parametrize("before", [False, True], ids=["plain", "converted before"])
@pytest.mark.parametrize("recipe", [RECIPES["tensorwise"], EARLY], ids=["tensorwise", "delayed"])
@pytest.mark.parametrize("float8_in_evaluation", [False, True])
def test_a_reference_model_computes_as_the_model_does(
    recipe, float8_in_evaluation, before, tmp_path, monkeypatch
):
    monkeypatch.setattr("trainers.Trainer", Preferences)
    callback = Float8Callback(recipe, float8_in_evaluation=float8_in_evaluation)
    options = {"learning_rate": 0.0, "max_steps": 3, "save_strategy": "no"}
    trainer = trainer_of(tmp_path, llama(), callback, prediction_loss_only=True, **options)
    trainer.ref_model, trainer.differences = llama().requires_grad_(False), []
    if before:
        convert(trainer.ref_model, recipe)
    for _ in range(2):
        trainer.train()
        trainer.evaluate()
    assert isinstance(trainer.ref_model.model.layers[0].mlp.up_proj, Float8Linear)
    assert len(trainer.differences) == 14  # 2 of 3 steps of 2 microbatches, and an evaluation
    assert not any(trainer.differences)


@pytest.mark.parametrize("reason", ["is_fsdp_enabled", "precompute_ref_log_probs"])
def test_a_reference_that_stays_in_high_precision_is_warned_of(reason, tmp_path, monkeypatch):
    monkeypatch.setattr("trainers.Trainer", Preferences)
    trainer = trainer_of(tmp_path, llama(), Float8Callback())
    trainer.ref_model = llama()
    setattr(trainer if reason == "is_fsdp_enabled" else trainer.args, reason, True)
    with pytest.warns(UserWarning, match=r"set precompute.*ref_model=convert\(ref_model, config\)"):
        trainer.begin()
    assert not hasattr(trainer.ref_model, "float8_conversion")


class TestRefusals:
    def test_a_model_init_that_makes_a_plain_model(self, tmp_path):
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
        data = data_of()

        def plain():
            return llama()

        def converted():
            return convert(llama())

        for init in (plain, converted):
            trainer = Trainer(
                None, arguments, train_dataset=data, callbacks=[Float8Callback()], model_init=init
            )
            if init is plain:
                with pytest.raises(ValueError, match=r"model_init must return .*convert"):
                    trainer.train()
            else:
                trainer.train()

    def test_a_history_of_another_length(self, tmp_path):
        trainer_of(tmp_path, llama(), Float8Callback("delayed"), max_steps=2).train()
        short = replace(RECIPES["delayed"], delayed_scaling=DelayedScalingConfig(history_len=4))
        trainer = trainer_of(tmp_path, llama(), Float8Callback(short))
        with pytest.raises(RuntimeError, match=r"amax_history.*16.*4"):
            trainer.train(resume_from_checkpoint=True)
        other = replace(RECIPES["delayed"], delayed_scaling=DelayedScalingConfig(margin=2))
        trainer = trainer_of(tmp_path, llama(), Float8Callback(other), save_strategy="no")
        trainer.train(resume_from_checkpoint=True)
        cast = trainer.model.model.layers[0].mlp.up_proj.cast_input
        assert int((cast.amax_history > 0).sum()) == 4

    def test_a_callback_that_comes_too_late_or_twice(self, tmp_path):
        trainer = trainer_of(tmp_path, llama(), None)
        trainer.add_callback(Float8Callback)
        with pytest.raises(ValueError, match=r"has not converted this model: Trainer"):
            trainer.train()
        trainer = trainer_of(tmp_path, llama(), Float8Callback("delayed"))
        trainer.add_callback(Float8Callback("delayed"))
        with pytest.raises(ValueError, match=r"2 Float8Callbacks.*give it one"):
            trainer.train()

    def test_copies_of_the_model_for_each_forward(self):
        callback = Float8Callback("delayed")
        model = convert(llama(), "delayed")
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(ValueError, match="DataParallel over 2 GPUs"):
            callback.on_train_begin(
                SimpleNamespace(n_gpu=2), None, None, model=model, optimizer=optimizer
            )


def test_accelerates_own_fp8_is_refused_before_a_layer_is_converted(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")  # as accelerate launch does
    model = llama()
    with pytest.raises(ValueError, match=r"backend TE have Accelerate.*`mixed_precision: bf16`"):
        trainer_of(tmp_path, model, Float8Callback())
    assert not any(isinstance(m, Float8Linear) for m in model.modules())
