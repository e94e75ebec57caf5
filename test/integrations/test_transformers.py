"""`Float8Callback`: a small Llama in the Trainer; its checkpoints are plain and resume exactly."""

from __future__ import annotations

import logging
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

import torch
import yaml
from fresh import example_of
from one_process import assert_same_model
from processes import failures
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
from float8.numerics import load_alarms, load_run

GATHERING = replace(RECIPES["tensorwise"], enable_fsdp_float8_all_gather=True)
DELAYED = DelayedScalingConfig(history_len=3, margin=1, interval=2)


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


@pytest.mark.parametrize(
    "recipe", ["tensorwise", "mxfp8", replace(RECIPES["delayed"], delayed_scaling=DELAYED)]
)
def test_resumes_to_the_bits_of_an_uninterrupted_run(recipe, tmp_path):
    """Within an epoch and between two; steps of two microbatches, the last of an epoch of one."""

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


@pytest.mark.slow
def test_compiled(tmp_path):
    def one(module, fqn):  # dynamo takes a second for each layer
        return fqn.endswith("up_proj")

    models = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        trainer = trainer_of(
            tmp_path, llama(), Float8Callback(module_filter_fn=one), max_steps=1, **options
        )
        trainer.train()
        models.append(trainer.model)
    assert_same_model(*models, "torch_compile")


def test_evaluates_in_high_precision_unless_asked_otherwise(tmp_path):
    expected = trainer_of(tmp_path, llama(), None).evaluate()["eval_loss"]
    found = trainer_of(tmp_path, llama(), Float8Callback("rowwise")).evaluate()["eval_loss"]
    assert found == expected
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


def test_a_run_without_float8_goes_on_with_it(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "greater_is_better": True}
    best = {**best, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    trainer_of(tmp_path, llama(), None, max_steps=2, **best).train()
    for options, steps in (({"save_strategy": "no"}, 1), (best, 0)):
        trainer = trainer_of(tmp_path, llama(1), Float8Callback("delayed"), max_steps=3, **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert trainer.state.global_step == 3
        cast = trainer.model.model.layers[0].mlp.up_proj.cast_input
        assert int((cast.amax_history > 0).sum()) == steps
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")  # from before float8
    weights = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert torch.equal(trainer.model.lm_head.weight, weights["lm_head.weight"])


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


def test_alarms_are_in_the_log_and_in_the_trainers_logs(tmp_path, caplog):
    callback = Float8Callback(saturating(), inspect_every=1, report_path=tmp_path / "run.json")
    trainer = trainer_of(tmp_path, llama(), callback, logging_steps=1)
    trainer.train()
    assert any("alarm at step 0: saturation: model.layers.0" in line for line in caplog.messages)
    counts = [e["float8/alarms"] for e in trainer.state.log_history if "loss" in e]
    assert counts[0] > 0 and counts[2] >= 14
    assert len(load_alarms(tmp_path / "run.json")) == counts[-1]


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
    with pytest.raises(ValueError, match="need inspect_every=n"):
        Float8Callback(on_alarm=stop)


def test_an_error_within_an_inspected_step_leaves_the_model_as_it_was(tmp_path):
    callback = Float8Callback(inspect_every=1)
    trainer = trainer_of(tmp_path, llama(), callback)
    good, trainer.train_dataset = trainer.train_dataset, [{"input_ids": [99999], "labels": [0]}] * 8
    with pytest.raises(IndexError):
        trainer.train()
    trainer.train_dataset = good
    trainer.train()
    assert callback.monitor.report.step == 3


def test_accelerates_settings_mean_what_they_say():
    assert not Float8Callback("delayed").float8_in_evaluation
    settings = {"amax_history_len": 3, "use_autocast_during_eval": True}
    callback = Float8Callback(settings)
    assert callback.float8_in_evaluation
    assert not Float8Callback(settings, float8_in_evaluation=False).float8_in_evaluation
    assert callback.config.delayed_scaling.history_len == 3

    def one(module, fqn):
        return fqn.endswith("up_proj")

    config = Float8LinearConfig()
    kwargs = type("AORecipeKwargs", (SimpleNamespace,), {})
    with pytest.MonkeyPatch.context() as patch:
        made = classmethod(lambda cls, given: given)
        patch.setattr(Float8LinearConfig, "from_torchao", made)
        callback = Float8Callback(kwargs(config=config, module_filter_func=one))
    arguments = SimpleNamespace(mixed_precision="bf16")
    callback.on_init_end(arguments, None, None, model=(model := llama()))
    assert model.float8_conversion.converted == ["model.layers.0.mlp.up_proj"]


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
                with pytest.raises(ValueError, match=r"let model_init return.*convert"):
                    trainer.train()
            else:
                trainer.train()

    def test_a_history_of_another_length(self, tmp_path):
        trainer_of(tmp_path, llama(), Float8Callback("delayed"), max_steps=2).train()
        short = replace(RECIPES["delayed"], delayed_scaling=DelayedScalingConfig(history_len=4))
        trainer = trainer_of(tmp_path, llama(), Float8Callback(short))
        with pytest.raises(ValueError, match=r"history of 16 steps, this model one of 4"):
            trainer.train(resume_from_checkpoint=True)
        rare = replace(RECIPES["delayed"], delayed_scaling=DelayedScalingConfig(interval=2))
        trainer = trainer_of(tmp_path, llama(), Float8Callback(rare), save_strategy="no")
        trainer.train(resume_from_checkpoint=True)
        cast = trainer.model.model.layers[0].mlp.up_proj.cast_input
        assert int((cast.amax_history > 0).sum()) == 4

    def test_a_callback_that_comes_too_late_or_twice(self, tmp_path):
        trainer = trainer_of(tmp_path, llama(), None)
        trainer.add_callback(Float8Callback)
        with pytest.raises(ValueError, match=r"added to an existing Trainer.*callbacks="):
            trainer.train()
        trainer = trainer_of(tmp_path, llama(), Float8Callback("delayed"))
        trainer.add_callback(Float8Callback("delayed"))
        with pytest.raises(ValueError, match=r"2 callbacks of type Float8Callback.*give it one"):
            trainer.train()

    def test_copies_of_the_model_for_each_forward(self):
        callback = Float8Callback("delayed")
        model = convert(llama(), "delayed")
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(ValueError, match="DataParallel over 2 GPUs"):
            callback.on_train_begin(
                SimpleNamespace(n_gpu=2), None, None, model=model, optimizer=optimizer
            )


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda packed: packed | {"scale": "not base64!"},
        lambda packed: packed | {"scale": 7},
        lambda packed: packed | {"scale": "AAA="},  # two bytes
        lambda packed: packed | {"scale": packed["amax_history"]},
        lambda packed: {"amax_history": packed["amax_history"]},
        lambda packed: "packed",
        lambda packed: None,
    ],
)
def test_corrupt_histories_name_the_layer_the_file_and_the_fix(corrupt):
    callback = Float8Callback("delayed")
    callback._take(llama(), None)
    before = {n: b.clone() for n, b in callback._model.named_buffers()}
    state = callback.state()
    histories = state["attributes"]["histories"]
    name = list(histories)[-1]
    for packed in histories.values():
        packed["current_amax"] = "AACAPw=="  # 1.0: what comes first must not be loaded either
    histories[name] = corrupt(histories[name])
    expected = (
        rf"^{name}: its history of amaxes in out/trainer_state\.json cannot be read \(.*\): "
        "resume from another checkpoint"
    )
    with pytest.raises(ValueError, match=expected):
        callback._restore(state, "out/trainer_state.json")
    for n, buffer in callback._model.named_buffers():
        assert torch.equal(buffer, before[n])
    for empty in ({}, {"attributes": {"histories": []}}):
        with pytest.raises(ValueError, match=r"trainer_state\.json cannot be read \(it has no"):
            callback._restore(empty, "out/trainer_state.json")


# What `accelerate config` writes. Its launcher sets the environment, which the Trainer reads.
FILES = {
    "TE": """
        mixed_precision: fp8
        fp8_config: {backend: TE, fp8_format: HYBRID, amax_history_length: 8, margin: 0,
                     amax_compute_algorithm: max, use_autocast_during_eval: true}
    """,
    "AO": """
        mixed_precision: fp8
        fp8_config: {backend: AO, enable_fsdp_float8_all_gather: false, pad_inner_dim: true}
    """,
    "bf16": "mixed_precision: bf16",
}


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Sets the environment that ``accelerate launch --config_file`` does, for one of `FILES`."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.state import AcceleratorState
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    def launch(name):
        file = tmp_path / "accelerate.yaml"
        text = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: true\n"
        file.write_text(text + textwrap.dedent(FILES[name]))
        args = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
        _, environment = prepare_simple_launcher_cmd_env(_validate_launch_command(args)[0])
        for key, value in environment.items():
            if key.startswith("ACCELERATE_"):
                monkeypatch.setenv(key, value)
        AcceleratorState._reset_state(True)

    yield launch
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(("name", "bf16"), [("AO", False), ("AO", True), ("TE", True)])
def test_fp8_in_accelerates_config_file_is_refused_with_what_to_write(
    name, bf16, launched, tmp_path
):
    launched(name)
    model = llama()
    expected = rf"backend {name} have Accelerate.*`mixed_precision: bf16` and no `fp8_config`.*bf16"
    with pytest.raises(ValueError, match=expected):
        trainer_of(tmp_path, model, Float8Callback(), bf16=bf16)
    assert not any(isinstance(m, Float8Linear) for m in model.modules())


def test_what_the_refusal_says_works(launched, tmp_path):
    launched("bf16")
    settings = yaml.safe_load(FILES["TE"])["fp8_config"]
    callback = Float8Callback(settings)
    trainer = trainer_of(tmp_path, llama(), callback, bf16=False, max_steps=1)
    trainer.train()
    assert trainer.accelerator.mixed_precision == "bf16"
    assert callback.config.delayed_scaling.history_len == 8
    assert callback.float8_in_evaluation


def test_casts_that_a_checkpoint_does_not_have_start_anew_and_are_named(tmp_path, caplog):
    trainer_of(tmp_path, llama(), Float8Callback("delayed"), max_steps=2).train()
    everything = Float8Callback("delayed", module_filter_fn=lambda module, fqn: True)
    trainer = trainer_of(tmp_path, llama(), everything, max_steps=3)
    with caplog.at_level(logging.INFO, logger="float8"):
        trainer.train(resume_from_checkpoint=True)
    assert "3 delayed casts start a new history: ['lm_head.cast_grad_output'" in caplog.text


CASES = {
    "DDP": ("resumes", "delayed", False),
    "FSDP2, gathered": ("resumes", "gathered delayed", True),
    "FSDP2, save_float8": ("saves_float8", "blockwise"),
}


@pytest.mark.slow
def test_on_two_processes():
    assert failures("transformers_program", CASES, alone=True) == {}
